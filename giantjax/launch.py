"""Which process of how many this one is: what was said explicitly, else what the launcher left in the environment.

A launcher is recognised by the variable that holds the rank. Where several are set the innermost counts, for one launcher
is often started by another: torchrun by srun, mpirun in a Slurm allocation, any of them in a pod.

| launcher, innermost first | rank | number of processes | process 0 |
|---|---|---|---|
| torchrun and alike | RANK | WORLD_SIZE | MASTER_ADDR, MASTER_PORT |
| veGiantModel | WORKER_RANK, LOCAL_RANK | NUM_WORKER, GPU_PER_WORKER | WORKER_0_HOST, WORKER_0_PORT |
| Open MPI | OMPI_COMM_WORLD_RANK | OMPI_COMM_WORLD_SIZE | OMPI_MCA_orte_hnp_uri or PMIX_NAMESPACE |
| Slurm | SLURM_PROCID | SLURM_NTASKS | first of SLURM_JOB_NODELIST |
| Kubernetes | JOB_COMPLETION_INDEX | JAX_NUM_PROCESSES or WORLD_SIZE | MASTER_ADDR, MASTER_PORT |

JAX_COORDINATOR_ADDRESS, which JAX reads too, goes before the last column; so do MASTER_ADDR and MASTER_PORT where a script
sets them for the ranks of Open MPI or Slurm.
"""

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from giantjax.errors import InputError

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Job:
    """Which process of how many this is."""

    coordinator: str | None
    """HOST:PORT at which the processes find process 0; None for a single process, which looks for nobody."""
    num_processes: int
    process_id: int
    local_process_id: int | None
    """Place among the processes of its node, hence the GPU that is its own; None where it is alone there or nobody says."""
    source: str
    """Who says so, for the start-up summary and for errors."""


class Said(NamedTuple):
    """A number and the words in which it was said, such as `WORLD_SIZE is 8`."""

    value: int
    words: str


class Claim(NamedTuple):
    """What one launcher says."""

    launcher: str
    rank: Said | None
    rank_variable: str
    size: Said | None
    size_variable: str
    local: int | None
    address: Callable[[], str]
    """HOST:PORT of process 0; raises InputError where the launcher does not say. Asked only if nobody else says."""


def find_job(
    environment: Environment, *, coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> Job:
    """The job this process belongs to.

    Args:
        environment: os.environ, or what stands for it.
        coordinator: runtime.coordinator, HOST:PORT. What is not None goes before the environment, each value for itself.
        num_processes: runtime.num_processes; 1 is a single process whatever the environment says.
        process_id: runtime.process_id.

    Raises:
        InputError: what is said is contradictory or not all there. Where a launcher counts several processes, none of them
            becomes a job of its own.
    """
    if coordinator is not None:
        _check_address("runtime.coordinator", coordinator)
    claim = None if num_processes == 1 else _find_claim(environment)
    size = claim.size if claim and num_processes is None else _explicit("num_processes", num_processes)
    rank = claim.rank if claim and process_id is None else _explicit("process_id", process_id)
    if num_processes == 1 and rank is None:
        rank = Said(0, "runtime.process_id is 0")
    stated = coordinator or _jax_address(environment)
    if size is None and rank is None and stated is None:
        return Job(None, 1, 0, None, "a single process, for no launcher is set")
    size, rank = _complete(size, rank, stated, claim)
    source = f"{claim.launcher if claim else 'set explicitly'}: {rank.words}, {size.words}"
    if size.value == 1:
        return Job(None, 1, 0, None, source)
    if stated is None:
        if claim is None:
            raise _nowhere(size.words, "is process 0 on this machine, 127.0.0.1 and a free port will do")
        stated = claim.address()
    local = claim.local if claim and claim.rank and claim.rank.value == rank.value else None
    return Job(stated, size.value, rank.value, local, source)


def _explicit(name: str, value: int | None) -> Said | None:
    return None if value is None else Said(value, f"runtime.{name} is {value}")


def _complete(size: Said | None, rank: Said | None, stated: str | None, claim: Claim | None) -> tuple[Said, Said]:
    """Both numbers, or an InputError that says what is missing or wrong."""
    if size is None:
        said = rank.words if rank else f"the coordinator is {stated}"
        remedy = f"set {claim.size_variable} or pass" if claim else "pass"
        raise InputError(f"{said}, but nothing says how many processes there are; {remedy} --runtime.num-processes, 1 to run alone")
    if size.value < 1:
        raise InputError(f"{size.words}; a job has at least 1 process")
    if rank is None:
        remedy = f"set {claim.rank_variable} or pass" if claim else "pass"
        raise InputError(
            f"{size.words}, but nothing says which of them this process is; {remedy} --runtime.process-id from 0 to "
            f"{size.value - 1}, or --runtime.num-processes 1 to run alone"
        )
    if not 0 <= rank.value < size.value:
        raise InputError(f"{rank.words}, but {size.words}; processes are numbered from 0 to {size.value - 1}")
    return size, rank


def _find_claim(environment: Environment) -> Claim | None:
    """What the innermost launcher says: one that gives a rank, else one that counts more than one process."""
    for rank, read in LAUNCHERS.items():
        if environment.get(rank):
            return read(environment)
    claims = (read(environment) for read in LAUNCHERS.values())
    return next((claim for claim in claims if claim.size and claim.size.value > 1), None)


def _torchrun(environment: Environment) -> Claim:
    rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")

    def address() -> str:
        pair = _host_and_port(environment, "MASTER_ADDR", "MASTER_PORT")
        if pair is None:
            raise _nowhere(_words(rank, size), "set MASTER_ADDR and MASTER_PORT")
        host, port = pair
        # On MASTER_PORT torchrun itself already listens, with the store that it offers to its processes.
        if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port += 1 if port < 65535 else -1
        return _address("MASTER_ADDR and MASTER_PORT", host, port)

    local = None if environment.get("LOCAL_WORLD_SIZE") == "1" else _value(environment, "LOCAL_RANK")
    return Claim("torchrun-style variables", rank, "RANK", size, "WORLD_SIZE", local, address)


def _vegiantmodel(environment: Environment) -> Claim:
    """veGiantModel calls nodes workers, and counts those (docs/step-by-step-tutorial.md of volcengine/veGiantModel).

    With LOCAL_RANK, from a launcher on each node, there is one process a GPU: process WORKER_RANK x GPU_PER_WORKER +
    LOCAL_RANK of NUM_WORKER x GPU_PER_WORKER. Without it there is one process a node, which has all GPUs of the node.
    """
    rank, size, local = (_number(environment, name) for name in ("WORKER_RANK", "NUM_WORKER", "LOCAL_RANK"))

    def address() -> str:
        pair = _host_and_port(environment, "WORKER_0_HOST", "WORKER_0_PORT")
        if pair is None:
            raise _nowhere(_words(rank, size), "set WORKER_0_HOST and WORKER_0_PORT")
        return _address("WORKER_0_HOST and WORKER_0_PORT", *pair)

    if local and rank:
        each = _number(environment, "GPU_PER_WORKER") or Said(0, "GPU_PER_WORKER is not set")
        if local.value >= each.value:
            raise InputError(f"{local.words}, but {each.words}; set GPU_PER_WORKER to the GPUs of a node, {local.value + 1} or more")
        first = rank.value * each.value
        rank = Said(first + local.value, f"{rank.words} and {local.words}")
        size = size and Said(size.value * each.value, f"{size.words} and {each.words}")
    return Claim("veGiantModel's variables", rank, "WORKER_RANK", size, "NUM_WORKER", local.value if local else None, address)


def _open_mpi(environment: Environment) -> Claim:
    rank, size = _number(environment, "OMPI_COMM_WORLD_RANK"), _number(environment, "OMPI_COMM_WORLD_SIZE")
    here = _value(environment, "OMPI_COMM_WORLD_LOCAL_SIZE")

    def address() -> str:
        pair = _host_and_port(environment, "MASTER_ADDR", "MASTER_PORT")
        if pair:
            return _address("MASTER_ADDR and MASTER_PORT", *pair)
        found = _mpirun_node(environment)
        if found is None:
            raise _nowhere(_words(rank, size), "this Open MPI does not tell its processes")
        host, seed = found
        return _address("the node of mpirun", "127.0.0.1" if size and here == size.value else host, _port(environment, seed))

    local = None if here == 1 else _value(environment, "OMPI_COMM_WORLD_LOCAL_RANK")
    return Claim("Open MPI", rank, "OMPI_COMM_WORLD_RANK", size, "OMPI_COMM_WORLD_SIZE", local, address)


def _mpirun_node(environment: Environment) -> tuple[str, int] | None:
    """The node on which mpirun runs, and with it process 0, and a number of the job; the same for all processes.

    Up to Open MPI 4 the variable is `1531576320.0;tcp://10.96.0.1,10.148.0.1:34911`, the number a multiple of 4096. From 5
    on there is the name `prterun-HOST-PID@JOB` (src/mca/plm/base/plm_base_jobid.c of openpmix/prrte); the addresses in
    PMIX_SERVER_URI* are no help, for on each node they are those of the node itself.
    """
    uri = environment.get("OMPI_MCA_orte_hnp_uri", "")
    job, host = re.match("[0-9]+", uri), re.search("tcp://([^,:;]+)", uri) or re.search(r"tcp6://\[([^],]+)", uri)
    if job and host:
        return host[1], int(job[0]) // 4096
    name = environment.get("PMIX_NAMESPACE", "")
    parts = re.fullmatch("[^-]+-(.+)-[0-9]+@[0-9]+", name)
    return (parts[1], zlib.crc32(name.encode())) if parts else None


def _slurm(environment: Environment) -> Claim:
    rank = _number(environment, "SLURM_PROCID")
    size = _number(environment, "SLURM_STEP_NUM_TASKS") or _number(environment, "SLURM_NTASKS")
    # In a batch script outside of srun this is task 0, nobody has started the others, and their number may not be set.
    started = environment.get("SLURM_STEP_ID") or environment.get("SLURM_STEP_NODELIST")
    if size is None and not started:
        size = _number(environment, "SLURM_JOB_NUM_NODES")

    def address() -> str:
        pair = _host_and_port(environment, "MASTER_ADDR", "MASTER_PORT")
        if pair:
            return _address("MASTER_ADDR and MASTER_PORT", *pair)
        lists = [name for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") if environment.get(name)]
        job = _number(environment, "SLURM_JOB_ID") or _number(environment, "SLURM_JOBID")
        if not lists or job is None:
            raise _nowhere(_words(rank, size), "set SLURM_JOB_NODELIST and SLURM_JOB_ID")
        return _address(lists[0], first_host(environment[lists[0]]), _port(environment, job.value))

    alone = re.fullmatch(r"1(\(x[0-9]+\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    local = None if alone else _value(environment, "SLURM_LOCALID")
    launcher = "Slurm" if started else "Slurm (but SLURM_STEP_ID is not set, as if not started by srun)"
    return Claim(launcher, rank, "SLURM_PROCID", size, "SLURM_NTASKS", local, address)


def _kubernetes(environment: Environment) -> Claim:
    """An indexed Job: Kubernetes tells a pod its index, but only the manifest how many there are and where the first is."""
    rank = _number(environment, "JOB_COMPLETION_INDEX")
    size = _number(environment, "JAX_NUM_PROCESSES") or _number(environment, "WORLD_SIZE")

    def address() -> str:
        pair = _host_and_port(environment, "MASTER_ADDR", "MASTER_PORT")
        if pair is None:
            raise _nowhere(_words(rank, size), "set JAX_COORDINATOR_ADDRESS to JOB-0.SERVICE:PORT, with a headless service of the job")
        return _address("MASTER_ADDR and MASTER_PORT", *pair)

    return Claim("Kubernetes", rank, "JOB_COMPLETION_INDEX", size, "JAX_NUM_PROCESSES", None, address)


LAUNCHERS: dict[str, Callable[[Environment], Claim]] = {
    "RANK": _torchrun,
    "WORKER_RANK": _vegiantmodel,
    "OMPI_COMM_WORLD_RANK": _open_mpi,
    "SLURM_PROCID": _slurm,
    "JOB_COMPLETION_INDEX": _kubernetes,
}
"""By the variable of the rank, innermost first, who reads what belongs to it."""


def first_host(hosts: str) -> str:
    """The first host of a Slurm host list: `node001` of `node[001-004,007],login2`.

    Raises:
        InputError: it is not a host list.
    """
    first = re.match(r"(?:[^,\[\]\s]|\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\])+(?=,|$)", hosts)
    if first is None:
        raise InputError(f"{hosts!r} is not a host list of Slurm, such as node[001-004,007] or node1,node2")
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first[0])


def _number(environment: Environment, name: str) -> Said | None:
    """A variable that counts; None where it is not set, or set to nothing."""
    text = environment.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch("[0-9]+", text):
        raise InputError(f"{name} is {text!r}; it must be a whole number from 0 up")
    return Said(int(text), f"{name} is {int(text)}")


def _value(environment: Environment, name: str) -> int | None:
    said = _number(environment, name)
    return None if said is None else said.value


def _words(*said: Said | None) -> str:
    return " and ".join(one.words for one in said if one)


def _nowhere(said: str, remedy: str) -> InputError:
    return InputError(f"{said}, but nothing says where process 0 is; {remedy}; or pass --runtime.coordinator HOST:PORT")


def _host_and_port(environment: Environment, host_variable: str, port_variable: str) -> tuple[str, int] | None:
    """Two variables that belong together; None where neither is set."""
    host, port = environment.get(host_variable, "").strip(), _number(environment, port_variable)
    if host and port:
        return host, port.value
    if host or port:
        said = port.words if port else f"{host_variable} is {host}"
        raise InputError(f"{said}, but {host_variable if port else port_variable} is not set; set both, or neither")
    return None


def _jax_address(environment: Environment) -> str | None:
    """JAX_COORDINATOR_ADDRESS, to which JAX_COORDINATOR_PORT may add the port."""
    address, port = environment.get("JAX_COORDINATOR_ADDRESS", "").strip(), _number(environment, "JAX_COORDINATOR_PORT")
    if not address:
        return None
    return _check_address("JAX_COORDINATOR_ADDRESS", f"{address}:{port.value}" if port and ":" not in address else address)


def _port(environment: Environment, seed: int) -> int:
    """JAX_COORDINATOR_PORT, else one of the last 4096 ports: the same for all of a job, seldom the same for two jobs."""
    said = _number(environment, "JAX_COORDINATOR_PORT")
    return said.value if said else 61440 + seed % 4096


def _address(name: str, host: str, port: int) -> str:
    return _check_address(name, f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}")


def _check_address(name: str, address: str) -> str:
    parts = re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):([0-9]+)", address)
    if parts is None or not 0 < int(parts[2]) < 65536:
        raise InputError(f"{name} is {address}; it must be HOST:PORT with a port from 1 to 65535, such as node1:61440")
    return address
