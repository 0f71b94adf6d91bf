"""Processes meet, here as threads: all get one decision or one refusal, and whoever is missing or too many is named."""

import re
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from giantjax import peers
from giantjax.agreement import refuse_differences
from giantjax.errors import InputError, TrainingFault
from giantjax.launch import Job
from giantjax.peers import Peers, processes
from tests.training.runs import free_port

HOST = socket.gethostname()


def meet(jobs: list[Job], act: Callable[[Peers], Any], seconds: float = 20) -> list[Any]:
    """What `act` gives in each process, or the error."""
    found: list[Any] = [None] * len(jobs)

    def one(place: int) -> None:
        try:
            with Peers(jobs[place], seconds) as there:
                found[place] = act(there)
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=one, args=(place,)) for place in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


def jobs(ids, number, host="127.0.0.1", port=None):
    address = f"{host}:{port or free_port()}"
    return [Job(address, number, process, None, "test") for process in ids]


def alike(found: list[Any], kind: type, words: str) -> None:
    """Every process raises the same."""
    assert {type(one) for one in found} == {kind}, found
    assert len({str(one) for one in found}) == 1, found
    assert words in str(found[0])


@pytest.mark.parametrize("number", [1, 2, 9])
def test_each_gets_the_decision_of_all_values(number):
    def act(there: Peers) -> Any:
        own = there.job.process_id
        return [there.settle({"id": own, "long": "x" * 300_000}, lambda told: [one["id"] for one in told]), there.settle((own,), sum_of)]

    def sum_of(told: list[list[int]]) -> int:
        return sum(one[0] for one in told)

    expected = [list(range(number)), sum(range(number))]
    assert meet(jobs(range(number), number), act) == [expected] * number


def test_it_does_not_matter_who_comes_first():
    port = free_port()
    late, early = jobs([0, 1], 2, "localhost", port)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(meet([early], lambda there: there.settle(1, sum))))
    thread.start()
    time.sleep(0.5)
    assert meet([late], lambda there: there.settle(2, sum)) == [3]
    thread.join(20)
    assert found == [3]


def test_a_refusal_by_process_0_is_everyones():
    def refuse(_: list[Any]) -> None:
        raise InputError("no")

    alike(meet(jobs(range(3), 3), lambda there: there.settle(1, refuse)), InputError, "no")


@pytest.mark.parametrize("who", [0, 2])
def test_a_refusal_in_one_process_ends_the_others(who):
    def act(there: Peers) -> None:
        if there.job.process_id == who:
            raise InputError("data.train is nowhere")
        there.settle(1, len)

    found = meet(jobs(range(3), 3), act)
    assert str(found.pop(who)) == "data.train is nowhere"
    alike(found, InputError, f"process {who} ({HOST}) was refused: data.train is nowhere")


@pytest.mark.parametrize("who", [0, 2])
def test_one_that_leaves_is_named(who):
    def act(there: Peers) -> None:
        if there.job.process_id == who:
            raise RuntimeError
        there.settle(1, len)

    found = meet(jobs(range(3), 3), act)
    assert isinstance(found.pop(who), RuntimeError)
    alike(found, TrainingFault, "left before training began; its own message says why")


def test_those_that_do_not_come_are_named(monkeypatch, capsys):
    monkeypatch.setattr(peers, "PATIENCE", 0.3)
    alike(meet(jobs([0, 1, 4], 8), lambda _: None, 1.5), TrainingFault, "processes 2, 3, 5-7 of 8 did not come to 127.0.0.1:")
    assert "for processes 2, 3, 5-7 of 8\n" in capsys.readouterr().err


def test_one_that_is_busy_is_named():
    def act(there: Peers) -> None:
        if there.job.process_id == 1:
            time.sleep(1.5)
        there.settle(1, len)

    alike(meet(jobs([0, 2, 1], 3), act, 1)[:2], TrainingFault, "process 1 of 3 did not go on at 127.0.0.1:")


def test_two_of_one_number_are_refused():
    found = meet(jobs([0, 1, 1], 3), lambda _: None, 5)
    alike(found, InputError, f"two processes say that they are process 1, one on {HOST} and one on {HOST} (test); give each of the 3")


def test_different_counts_are_refused():
    (first,), (second,) = jobs([0], 3, port=(port := free_port())), jobs([1], 4, port=port)
    alike(
        meet([first, second], lambda _: None), InputError, f"process 1 ({HOST}) counts 4 processes (test), but process 0 ({HOST}) counts 3"
    )


def test_a_port_that_is_taken_is_refused():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        (found,) = meet(jobs([0], 2, port=port), lambda _: None)
    assert isinstance(found, InputError)
    assert f"process 0 cannot listen at 127.0.0.1:{port} (test): another program, or another process 0, listens there" in str(found)


def test_a_name_that_does_not_resolve_is_refused():
    (found,) = meet(jobs([1], 2, "no-such-host.invalid"), lambda _: None, 1)
    assert isinstance(found, InputError)
    assert "for its host name does not resolve" in str(found)


def test_what_is_no_process_of_a_job_is_passed_over():
    port = free_port()

    def disturb() -> None:
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"process": "1"}\n', b""):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(said)

    def act(there: Peers) -> Any:
        if there.job.process_id == 1:
            disturb()
        return there.settle(there.job.process_id, sum)

    assert meet(jobs(range(3), 3, port=port), act) == [3] * 3
    with socket.create_server(("127.0.0.1", port)) as server:
        thread = threading.Thread(target=lambda: server.accept()[0].sendall(b"SSH-2.0\r\n"))
        thread.start()
        (found,) = meet(jobs([1], 2, port=port), lambda _: None, 1)
        thread.join()
    assert isinstance(found, TrainingFault)


def test_differences_say_who_has_what():
    told = [{"seed": 1, "data.train": ["a", "b"]}, {"seed": 2, "data.train": ["a", "b"]}, {"seed": 1, "data.train": ["a"], "x": 3}]
    words = (
        "differ: seed is 1 on processes 0, 2 (n0, ...) and 2 on process 1 (n1), data.train is a b on processes 0, 1 (n0, ...) and a on "
        "process 2 (n2), x is not there on processes 0, 1 (n0, ...) and 3 on process 2 (n2); start them all alike"
    )
    with pytest.raises(InputError, match=re.escape(words)):
        refuse_differences(told, ["n0", "n1", "n2"])
    refuse_differences([{"seed": 1}] * 3, ["n0"] * 3)


def test_processes_in_words():
    assert [processes(numbers) for numbers in ([3], [1, 0], [7, 2, 3, 4, 9])] == ["process 3", "processes 0, 1", "processes 2-4, 7, 9"]
