"""plan.py --measure on CPU devices: a file that plans are made with, and one sentence where there can be none."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

from giantjax.cluster import Machine
from giantjax.cluster_file import read_cluster
from giantjax.command_line import preset
from giantjax.errors import InputError
from giantjax.parallel.nodes import Nodes, Place
from giantjax.planner.automatic import resolve_mesh
from tests.training.runs import free_port

SCRIPTS = Path(__file__).parents[2] / "scripts"
CACHE = ("--runtime.compilation-cache", str(jax.config.values["jax_compilation_cache_dir"]))

# One worker, for several processes at a time are enough for its cores.
pytestmark = pytest.mark.xdist_group("processes")


def run(script: str, *arguments: str, jobs: int = 1, seconds: float = 240) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each process of a job."""
    job = ("--runtime.coordinator", f"127.0.0.1:{free_port()}", "--runtime.num-processes", str(jobs)) if jobs > 1 else ()
    started: list[subprocess.Popen[str]] = []
    try:
        for number in range(jobs):
            own = ("--runtime.process-id", str(number)) if jobs > 1 else ()
            command = [sys.executable, str(SCRIPTS / script), *arguments, *job, *own]
            started.append(subprocess.Popen(command, env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return [_ended(process, seconds) for process in started]
    finally:
        for process in started:
            process.kill()


def _ended(process: subprocess.Popen[str], seconds: float) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (4, 1)])
def test_processes_on_a_cpu_measure_a_cluster_that_plans_are_made_for(processes, devices, tmp_path):
    path = tmp_path / "lab.toml"
    ended = run("plan.py", "--measure", str(path), "--runtime.num-cpu-devices", str(devices), *CACHE, jobs=processes)
    assert [code for code, _, _ in ended] == [0] * processes, ended
    said = ended[0][1]
    assert f"measuring {processes} nodes x {devices} devices = {processes * devices} in {processes} processes" in said
    assert "CPU devices talk through gloo: NCCL's transport settings are not tried" in said
    assert all(out == "" for _, out, _ in ended[1:])
    assert [file.name for file in tmp_path.iterdir()] == ["lab.toml"]
    cluster = read_cluster(path)
    assert (cluster.num_nodes, cluster.gpus_per_node, cluster.network.fabric) == (processes, devices, "tcp")
    assert cluster.network.measured and 1e5 < cluster.network.node_bandwidth < 1e12 and cluster.network.latency < 1
    assert (cluster.inside_bandwidth is None) == (devices == 1)
    told = tomllib.loads(path.read_text())["measured"]
    assert told["versions"]["jax"] == jax.__version__ and told["devices"] == f"{processes * devices} x cpu, planned as A100-40GB"
    assert all(link["gbytes"] > 0 and link["latency_us"] >= 0 for link in told["links"].values())
    ((code, out, err),) = run("plan.py", "--config", "gpt2_124m", "--cluster", str(path), "--top", "1")
    assert code == 0, err
    assert f"{processes} nodes of {devices} A100-40GB" in out and "best: " in out


def test_one_process_measures_its_node_and_asks_for_the_link(tmp_path):
    path = tmp_path / "lab.toml"
    ((code, out, err),) = run("plan.py", "--measure", str(path), "--runtime.num-cpu-devices", "2", *CACHE)
    assert code == 0, err
    assert "one node: nothing is measured between nodes" in out and "start this on every machine at once" in out
    cluster = read_cluster(path)
    assert cluster.num_nodes == 1 and not cluster.has_link and cluster.inside_bandwidth
    # A job of several nodes cannot be planned for it.
    nodes = Nodes(tuple(Place(f"process {i}", (0, 1), None) for i in range(2)), {})
    machine = Machine("CPU", 2, 2**34, simulated=True)
    with pytest.raises(InputError, match=r"runtime.cluster lab says nothing of a link, but this job has 2 nodes; measure them all"):
        resolve_mesh(preset("gpt13b"), machine, nodes, cluster)


@pytest.mark.parametrize(
    ("script", "arguments", "jobs", "says"),
    [
        ("plan.py", "--measure none/lab.toml --runtime.num-cpu-devices 2", 2, "none/lab.toml cannot be written: No such file or directory"),
        ("plan.py", "--measure lab.yaml --runtime.num-cpu-devices 2", 1, "--measure lab.yaml must end in .toml, such as lab.toml"),
        ("plan.py", "--measure lab.toml --runtime.num-cpu-devices 1", 1, "one device has no link to measure"),
        ("plan.py", "--measure lab.toml --config gpt13b", 1, "--measure lab.toml plans nothing, so leave --config out"),
        ("plan.py", "--measure lab.toml --runtime.cluster v100x4-tcp100", 1, "leave --runtime.cluster v100x4-tcp100 out"),
        ("plan.py", "--config gpt13b --cluster v100x4-tcp100 --runtime.num-cpu-devices 2", 1, "--runtime fields say how to --measure"),
        ("plan.py", "--config gpt13b", 1, "--cluster is missing"),
        ("plan.py", "--config gpt13b --cluster none.toml", 1, "cluster file none.toml cannot be read: No such file or directory"),
        ("pretrain.py", "--config gpt_tiny --runtime.cluster v100", 1, "runtime.cluster: there is no cluster v100; a name is GPUxNODES-"),
        ("pretrain.py", "--config gpt_tiny --runtime.cluster none.toml", 1, "runtime.cluster: cluster file none.toml cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(script, arguments, jobs, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for code, out, err in run(script, *arguments.split(), jobs=jobs, seconds=60):
        assert code == 2 and out == ""
        assert says in err and err.count("\n") == 1 and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
