"""The processes of a job meet over TCP before any of them starts JAX, which aborts where one is missing.

Process 0 listens at the coordinator's address; the others connect and say who they are. Then, any number of times, each
hands in a value, process 0 decides of all of them, and everyone gets the decision, or the same refusal. All of it is JSON,
an object a line, and is over before JAX listens at the same address.
"""

import contextlib
import errno
import json
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from giantjax.errors import InputError, TrainingFault
from giantjax.launch import Job

PATIENCE = 15.0
"""Seconds after which it is said whom one waits for."""
LONGEST = 1 << 24
"""Bytes of a line; what sends more is no process of a job."""


@dataclass
class Peer:
    """One connection of process 0."""

    socket: socket.socket
    process_id: int | None = None
    """None until it has said so."""
    host: str = ""
    received: bytes = b""
    value: Any = None
    has_value: bool = False

    def __str__(self) -> str:
        return f"process {self.process_id} ({self.host})"


class Peers:
    """The processes of one job before training; a context manager, in which a refusal of one is a refusal of all.

    Raises:
        InputError: process 0 cannot listen at the address, its host name does not resolve, two processes have the same
            number, or they count differently many.
        TrainingFault: not all come within `seconds`.
    """

    def __init__(self, job: Job, seconds: float):
        self.job, self.seconds, self.host = job, seconds, socket.gethostname()
        self._listener: socket.socket | None = None
        self._peers: dict[int, Peer] = {}
        self._strangers: list[Peer] = []
        self._hub: socket.socket | None = None
        self._received = b""

    def __enter__(self) -> "Peers":
        try:
            if self.job.num_processes > 1 and self.job.process_id == 0:
                self._listen()
                self._gather(lambda: set(range(1, self.job.num_processes)) - set(self._peers), "come to")
                self._tell({"decision": None})
            elif self.job.num_processes > 1:
                self._connect()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, InputError):
            if self._hub:
                _send(self._hub, {"refused": str(error)})
            self._tell({"refused": f"process 0 ({self.host}) was refused: {error}"})
        self._close()

    def settle(self, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """What `decide` makes, on process 0, of the values that all processes hand in, in the order of their numbers.

        Values and decision are what JSON can hold, and come back as JSON does.

        Raises:
            InputError: of `decide`, on every process; or another process was refused.
            TrainingFault: another process left, or does not answer within the time.
        """
        if self._hub:
            _send(self._hub, {"value": value})
            try:
                return self._answer(time.monotonic() + self.seconds + PATIENCE)
            except OSError as error:
                raise TrainingFault(f"process 0 at {self.job.coordinator} left before training began; its own message says why") from error
        self._gather(lambda: {number for number, peer in self._peers.items() if not peer.has_value}, "go on at")
        values = [_as_json(value), *(self._peers[number].value for number in sorted(self._peers))]
        for peer in self._peers.values():
            peer.has_value = False
        try:
            decision = _as_json(decide(values))
        except InputError as error:
            self._tell({"refused": str(error)})
            raise
        self._tell({"decision": decision})
        return decision

    def _close(self) -> None:
        for peer in [*self._peers.values(), *self._strangers]:
            peer.socket.close()
        for each in (self._listener, self._hub):
            if each:
                each.close()

    # ---- process 0 ----

    def _listen(self) -> None:
        assert self.job.coordinator is not None
        dual = socket.has_dualstack_ipv6()
        try:
            address = ("", int(self.job.coordinator.rpartition(":")[2]))
            family = socket.AF_INET6 if dual else socket.AF_INET
            self._listener = socket.create_server(address, family=family, dualstack_ipv6=dual, backlog=1024)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            raise InputError(
                f"process 0 cannot listen at {self.job.coordinator} ({self.job.source}): "
                f"{'another program, or another process 0, listens there' if taken else error.strerror}; "
                "name another port by --runtime.coordinator HOST:PORT on every process"
            ) from error

    def _gather(self, lacking: Callable[[], set[int]], what: str) -> None:
        """Serve all connections until no process is lacking."""
        begin, said = time.monotonic(), False
        with selectors.DefaultSelector() as selector:
            if self._listener:
                selector.register(self._listener, selectors.EVENT_READ)
            for peer in list(self._peers.values()):
                selector.register(peer.socket, selectors.EVENT_READ, peer)
                self._read_lines(peer)  # what came together with the line before
            while missing := lacking():
                waited = time.monotonic() - begin
                if waited > self.seconds:
                    self._fail(
                        f"{processes(missing)} of {self.job.num_processes} did not {what} {self.job.coordinator} within "
                        f"{self.seconds:g} s ({self.job.source}); see why, or raise runtime.start_timeout"
                    )
                if waited > PATIENCE and not said:
                    _mention(f"waiting at {self.job.coordinator} for {processes(missing)} of {self.job.num_processes}")
                    said = True
                for key, _ in selector.select(min(0.5, self.seconds)):
                    if key.data is None:
                        assert self._listener is not None
                        self._strangers.append(Peer(self._listener.accept()[0]))
                        selector.register(self._strangers[-1].socket, selectors.EVENT_READ, self._strangers[-1])
                    elif not self._receive(key.data):
                        selector.unregister(key.data.socket)
                        self._lose(key.data)

    def _receive(self, peer: Peer) -> bool:
        """Read what there is; whether the connection is still one of this job."""
        try:
            piece = peer.socket.recv(1 << 16)
        except OSError:
            piece = b""
        peer.received += piece
        return bool(piece) and len(peer.received) < LONGEST and self._read_lines(peer)

    def _read_lines(self, peer: Peer) -> bool:
        while b"\n" in peer.received and not peer.has_value:
            line, _, peer.received = peer.received.partition(b"\n")
            said = _parse(line)
            if peer.process_id is None:
                if not isinstance(said.get("process"), int):
                    return False
                self._greet(peer, said)
            elif "refused" in said:
                self._refuse(f"{peer} was refused: {said['refused']}")
            else:
                peer.value, peer.has_value = said.get("value"), True
        return True

    def _greet(self, peer: Peer, said: dict[str, Any]) -> None:
        """Take a process that says who it is."""
        peer.process_id, peer.host = said["process"], str(said.get("host"))
        count, source = said.get("of"), said.get("source")
        if peer.process_id in self._peers or not peer.process_id:
            other = self._peers[peer.process_id].host if peer.process_id else self.host
            self._refuse(
                f"two processes say that they are process {peer.process_id}, one on {other} and one on {peer.host} ({source}); "
                f"give each of the {self.job.num_processes} a runtime.process_id of its own"
            )
        if count != self.job.num_processes:
            self._refuse(
                f"{peer} counts {count} processes ({source}), but process 0 ({self.host}) counts {self.job.num_processes} "
                f"({self.job.source}); start every process with the same runtime.num_processes"
            )
        self._strangers.remove(peer)
        self._peers[peer.process_id] = peer

    def _lose(self, peer: Peer) -> None:
        peer.socket.close()
        if peer in self._strangers:
            self._strangers.remove(peer)
        else:
            assert peer.process_id is not None
            del self._peers[peer.process_id]
            self._fail(f"{peer} left before training began; its own message says why")

    def _refuse(self, sentence: str) -> None:
        self._tell({"refused": sentence})
        raise InputError(sentence)

    def _fail(self, sentence: str) -> None:
        self._tell({"failed": sentence})
        raise TrainingFault(sentence)

    def _tell(self, what: dict[str, Any]) -> None:
        for peer in [*self._peers.values(), *self._strangers]:
            _send(peer.socket, what)

    # ---- the others ----

    def _connect(self) -> None:
        """Look for process 0 until it is there, and everyone with it."""
        assert self.job.coordinator is not None
        host, _, port = self.job.coordinator.rpartition(":")
        hello = {"process": self.job.process_id, "of": self.job.num_processes, "host": self.host, "source": self.job.source}
        begin, said, why, resolves = time.monotonic(), False, "", True
        while (waited := time.monotonic() - begin) < self.seconds:
            try:
                self._hub = socket.create_connection((host.strip("[]"), int(port)), timeout=min(5.0, self.seconds))
                _send(self._hub, hello)
                self._answer(begin + self.seconds + PATIENCE)
                return
            except (OSError, UnicodeError) as error:
                resolves = not isinstance(error, (socket.gaierror, UnicodeError))
                why = (error.strerror if isinstance(error, OSError) else None) or str(error)
            if self._hub:
                self._hub.close()
            if waited > PATIENCE and not said:
                _mention(f"process {self.job.process_id} waits for process 0 at {self.job.coordinator}: {why}")
                said = True
            time.sleep(min(1.0, 0.1 + waited / 10))
        sentence = f"process {self.job.process_id} did not find process 0 at {self.job.coordinator} within {self.seconds:g} s"
        if not resolves:
            raise InputError(f"{sentence}, for its host name does not resolve: {why} ({self.job.source}); mend runtime.coordinator")
        raise TrainingFault(f"{sentence}: {why} ({self.job.source}); see why it is not there, or raise runtime.start_timeout")

    def _answer(self, end: float) -> Any:
        """The next decision of process 0.

        Raises:
            OSError: there is none.
        """
        assert self._hub is not None
        while b"\n" not in self._received:
            self._hub.settimeout(max(0.1, end - time.monotonic()))
            piece = self._hub.recv(1 << 16)
            if not piece or len(self._received) > LONGEST:
                self._received = b""
                raise ConnectionError("the connection was closed")
            self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        said = _parse(line)
        if "refused" in said:
            raise InputError(said["refused"])
        if "failed" in said:
            raise TrainingFault(said["failed"])
        if "decision" not in said:
            raise ConnectionError("what listens there is no process of this job")
        return said["decision"]


def _send(to: socket.socket, what: dict[str, Any]) -> None:
    # Whoever has left is missed where it is waited for.
    with contextlib.suppress(OSError):
        to.settimeout(30)
        to.sendall(json.dumps(what).encode() + b"\n")


def _parse(line: bytes) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _mention(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def processes(numbers: Iterable[int]) -> str:
    """Processes in words: `process 3`, or `processes 0-2, 5`."""
    ordered = sorted(numbers)
    runs: list[list[int]] = []
    for number in ordered:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
    return f"process{'es' * (len(ordered) > 1)} {words}"
