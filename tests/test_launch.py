"""Launchers: each tells a process its place, what is said explicitly goes first, and nothing said by halves passes."""

import contextlib

import pytest

from giantjax.errors import InputError
from giantjax.launch import Job, find_job, first_host

TORCHRUN = {"RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
VEGIANTMODEL = {"NUM_WORKER": "2", "WORKER_RANK": "1", "GPU_PER_WORKER": "8", "WORKER_0_HOST": "10.0.0.1", "WORKER_0_PORT": "6000"}
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "16",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1,10.108.0.1:34911",
}
# What prterun leaves: its node is in the name, while the address is that of the node's own daemon.
OPEN_MPI_5 = {
    **{name: value for name, value in OPEN_MPI_4.items() if not name.startswith("OMPI_MCA")},
    "PRTE_LAUNCHED": "1",
    "PMIX_NAMESPACE": "prterun-ip-10-0-0-18-12345@1",
    "PMIX_RANK": "5",
    "PMIX_SERVER_URI41": "prterun-ip-10-0-0-18-12345@0.1;tcp4://127.0.0.1:45678",
}
SLURM = {
    "SLURM_JOB_ID": "200505",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "32",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gnode[010-012,020],login2",
    "SLURM_TASKS_PER_NODE": "8(x4)",
}
# A batch script that srun was not called in: as `env` printed it, but for the names.
SLURM_BATCH = {
    "SLURM_JOB_ID": "200505",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODELIST": "gnode[10,20,25,37]",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "2", "JAX_NUM_PROCESSES": "4", "JAX_COORDINATOR_ADDRESS": "gpt-0.gpt:6000"}
LAUNCHERS = {
    "torchrun": TORCHRUN,
    "vegiantmodel": VEGIANTMODEL,
    "open-mpi-4": OPEN_MPI_4,
    "open-mpi-5": OPEN_MPI_5,
    "slurm": SLURM,
    "kubernetes": KUBERNETES,
}


def without(environment, *names):
    return {name: value for name, value in environment.items() if name not in names}


def place(job):
    return job.coordinator, job.num_processes, job.process_id, job.local_process_id


@pytest.mark.parametrize(
    "environment", [{}, {"HOME": "/root", "MASTER_ADDR": "localhost"}, {"WORLD_SIZE": "1"}, {"RANK": "", "WORLD_SIZE": " "}]
)
def test_without_a_launcher_there_is_one_process(environment):
    assert place(find_job(environment)) == (None, 1, 0, None)


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        ("torchrun", ("node1:29500", 16, 11, 3)),
        ("vegiantmodel", ("10.0.0.1:6000", 2, 1, None)),
        ("open-mpi-4", (f"10.96.0.1:{61440 + 1531576320 // 4096 % 4096}", 16, 5, 1)),
        ("open-mpi-5", ("ip-10-0-0-18:63153", 16, 5, 1)),
        ("slurm", (f"gnode010:{61440 + 200505 % 4096}", 32, 9, 1)),
        ("kubernetes", ("gpt-0.gpt:6000", 4, 2, None)),
    ],
)
def test_each_launcher_tells_a_process_its_place(launcher, expected):
    assert place(find_job(LAUNCHERS[launcher])) == expected


@pytest.mark.parametrize("environment", LAUNCHERS.values(), ids=LAUNCHERS.keys())
def test_what_is_explicit_goes_before_every_launcher(environment):
    assert place(find_job(environment, coordinator="head:7", num_processes=64, process_id=0)) == ("head:7", 64, 0, None)
    told = find_job(environment)
    assert find_job(environment, coordinator="[::1]:7").coordinator == "[::1]:7"
    assert place(find_job(environment, coordinator="head:7"))[1:] == place(told)[1:]
    assert place(find_job(environment, num_processes=64)) == (told.coordinator, 64, told.process_id, told.local_process_id)
    assert place(find_job(environment, process_id=0)) == (told.coordinator, told.num_processes, 0, None)
    assert place(find_job(environment, process_id=told.process_id)) == place(told)
    assert place(find_job(environment, num_processes=1)) == (None, 1, 0, None)


@pytest.mark.parametrize("environment", LAUNCHERS.values(), ids=LAUNCHERS.keys())
def test_the_same_place_is_known_by_all_processes_and_said_in_words(environment):
    rank = next(
        name for name in ("RANK", "WORKER_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX") if name in environment
    )
    first, this = find_job({**environment, rank: "0"}), find_job(environment)
    assert (first.coordinator, first.num_processes, first.process_id) == (this.coordinator, this.num_processes, 0)
    assert rank in this.source and str(this.num_processes) in this.source


@pytest.mark.parametrize(
    ("outer", "inner"),
    [(SLURM, TORCHRUN), (SLURM, OPEN_MPI_4), (OPEN_MPI_5, TORCHRUN), (SLURM, VEGIANTMODEL), (KUBERNETES, SLURM), (VEGIANTMODEL, TORCHRUN)],
)
def test_the_inner_launcher_counts(outer, inner):
    both = without(outer, "JAX_COORDINATOR_ADDRESS") | inner
    assert place(find_job(both))[1:] == place(find_job(inner))[1:]


def test_all_explicit_needs_no_environment():
    job = find_job({}, coordinator="127.0.0.1:6000", num_processes=2, process_id=1)
    assert job == Job("127.0.0.1:6000", 2, 1, None, "set explicitly: runtime.process_id is 1, runtime.num_processes is 2")
    assert place(find_job({}, num_processes=1)) == place(find_job({}, num_processes=1, process_id=0)) == (None, 1, 0, None)
    assert place(find_job({}, coordinator="127.0.0.1:6000", num_processes=1)) == (None, 1, 0, None)


@pytest.mark.parametrize(
    ("environment", "local"),
    [
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, None),
        (without(TORCHRUN, "LOCAL_RANK"), None),
        (OPEN_MPI_4 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, None),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x32)", "SLURM_LOCALID": "0"}, None),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8(x4)"}, 1),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, None),
    ],
)
def test_a_process_alone_on_its_node_has_all_gpus(environment, local):
    assert find_job(environment).local_process_id == local


def test_torchruns_own_port_is_left_to_it():
    assert find_job(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).coordinator == "node1:29501"
    assert find_job(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": "65535"}).coordinator == "node1:65534"
    assert find_job(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).coordinator == "node1:29500"


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("local", [0, 7])
def test_vegiantmodels_workers_are_nodes(worker, local):
    environment = VEGIANTMODEL | {"WORKER_RANK": str(worker), "LOCAL_RANK": str(local)}
    assert place(find_job(environment)) == ("10.0.0.1:6000", 16, 8 * worker + local, local)


def test_open_mpi_on_one_node_and_by_ipv6():
    assert find_job(OPEN_MPI_4 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "16"}).coordinator == "127.0.0.1:62624"
    uri = "1314521088.0;tcp6://[fe80::b9b:ac5d:9cf0:b858,2620:10d:c083:150e::3000:2]:43370"
    assert find_job(OPEN_MPI_4 | {"OMPI_MCA_orte_hnp_uri": uri}).coordinator == "[fe80::b9b:ac5d:9cf0:b858]:62880"
    both = "614400000.0;usock;tcp://10.0.1.1:48323;tcp6://[2620::2]:43370"
    assert find_job(OPEN_MPI_4 | {"OMPI_MCA_orte_hnp_uri": both}).coordinator == "10.0.1.1:63984"


@pytest.mark.parametrize("environment", [OPEN_MPI_4, SLURM, without(KUBERNETES, "JAX_COORDINATOR_ADDRESS")])
def test_a_script_may_set_the_address_for_another_launcher(environment):
    master = {"MASTER_ADDR": "ib-node1", "MASTER_PORT": "7000"}
    assert find_job(environment | master).coordinator == "ib-node1:7000"
    assert find_job(environment | master | {"JAX_COORDINATOR_ADDRESS": "node1:8000"}).coordinator == "node1:8000"
    assert find_job(environment | {"JAX_COORDINATOR_ADDRESS": "node1", "JAX_COORDINATOR_PORT": "9000"}).coordinator == "node1:9000"


def test_a_stated_port_replaces_the_derived_one():
    assert find_job(SLURM | {"JAX_COORDINATOR_PORT": "9000"}).coordinator == "gnode010:9000"
    assert find_job(OPEN_MPI_5 | {"JAX_COORDINATOR_PORT": "9000"}).coordinator == "ip-10-0-0-18:9000"


def test_slurm_counts_tasks_of_the_step_and_says_where_there_is_none():
    assert find_job(SLURM | {"SLURM_STEP_NUM_TASKS": "16"}).num_processes == 16
    assert find_job(SLURM | {"SLURM_STEP_NODELIST": "gnode020"}).coordinator == "gnode020:65337"
    batch = find_job(SLURM_BATCH)
    assert place(batch) == ("gnode10:65337", 4, 0, 0)
    assert "as if not started by srun" in batch.source and "srun" not in find_job(SLURM).source


def test_a_batch_script_of_slurm_without_a_number_of_tasks_counts_nodes():
    batch = without(SLURM_BATCH, "SLURM_NTASKS")
    assert place(find_job(batch | {"SLURM_JOB_NUM_NODES": "1"})) == (None, 1, 0, None)
    assert find_job(batch | {"SLURM_JOB_NUM_NODES": "4"}).num_processes == 4
    with pytest.raises(InputError, match="SLURM_PROCID is 0, but nothing says how many processes"):
        find_job(batch)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node001", "node001"),
        ("node1,node2", "node1"),
        ("node[001-004,007]", "node001"),
        ("node[001,007-015],host2", "node001"),
        ("c5-large-dy[3-4]", "c5-large-dy3"),
        ("rack[1-2]node[08-10]", "rack1node08"),
        ("gpu[7]-ib.cluster,gpu9", "gpu7-ib.cluster"),
    ],
)
def test_first_host_of_a_host_list(hosts, first):
    assert first_host(hosts) == first


@pytest.mark.parametrize("hosts", ["", "node[001", "node001-004]", "node[a-b]", "node[1,]", ",node1", "node[]", "(null) (null)"])
def test_other_lists_are_refused(hosts):
    with pytest.raises(InputError, match=r"is not a host list of Slurm, such as node\[001-004,007\]"):
        first_host(hosts)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (TORCHRUN | {"RANK": "16"}, "RANK is 16, but WORLD_SIZE is 16; processes are numbered from 0 to 15"),
        (TORCHRUN | {"RANK": "x"}, "RANK is 'x'; it must be a whole number from 0 up"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE is 0; a job has at least 1 process"),
        (
            without(TORCHRUN, "WORLD_SIZE"),
            "RANK is 11, but nothing says how many processes there are; set WORLD_SIZE or pass --runtime.num-",
        ),
        (
            without(TORCHRUN, "RANK"),
            "WORLD_SIZE is 16, but nothing says which of them this process is; set RANK or pass --runtime.process-id",
        ),
        (without(TORCHRUN, "MASTER_PORT"), "MASTER_ADDR is node1, but MASTER_PORT is not set"),
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_PORT is 29500, but MASTER_ADDR is not set"),
        (
            without(TORCHRUN, "MASTER_ADDR", "MASTER_PORT"),
            "RANK is 11 and WORLD_SIZE is 16, but nothing says where process 0 is; set MASTER_ADDR",
        ),
        (
            TORCHRUN | {"MASTER_PORT": "70000"},
            "MASTER_ADDR and MASTER_PORT is node1:70000; it must be HOST:PORT with a port from 1 to 65535",
        ),
        (without(VEGIANTMODEL, "WORKER_RANK"), "NUM_WORKER is 2, but nothing says which of them this process is; set WORKER_RANK"),
        (without(VEGIANTMODEL, "NUM_WORKER"), "WORKER_RANK is 1, but nothing says how many .* set NUM_WORKER"),
        (without(VEGIANTMODEL, "WORKER_0_PORT"), "WORKER_0_HOST is 10.0.0.1, but WORKER_0_PORT is not set"),
        (without(VEGIANTMODEL, "GPU_PER_WORKER") | {"LOCAL_RANK": "3"}, "LOCAL_RANK is 3, but GPU_PER_WORKER is not set; .* 4 or more"),
        (
            VEGIANTMODEL | {"LOCAL_RANK": "8"},
            "LOCAL_RANK is 8, but GPU_PER_WORKER is 8; set GPU_PER_WORKER to the GPUs of a node, 9 or more",
        ),
        (
            VEGIANTMODEL | {"WORKER_RANK": "2", "LOCAL_RANK": "0"},
            "WORKER_RANK is 2 and LOCAL_RANK is 0, but NUM_WORKER is 2 and GPU_PER_WORKER is 8",
        ),
        (
            without(OPEN_MPI_5, "PMIX_NAMESPACE"),
            "OMPI_COMM_WORLD_SIZE is 16, but nothing says where process 0 is; .* pass --runtime.coordinator",
        ),
        (OPEN_MPI_4 | {"OMPI_MCA_orte_hnp_uri": "1.0;usock"}, "nothing says where process 0 is; .* pass --runtime.coordinator HOST:PORT"),
        (without(OPEN_MPI_4, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_RANK is 5, but nothing says how many .* set OMPI_COMM_WORLD_SIZE"),
        (without(SLURM, "SLURM_PROCID"), "SLURM_NTASKS is 32, but nothing says which .* or --runtime.num-processes 1 to run alone"),
        (
            without(SLURM, "SLURM_JOB_NODELIST"),
            "SLURM_PROCID is 9 and SLURM_NTASKS is 32, but nothing says where .* set SLURM_JOB_NODELIST",
        ),
        (without(SLURM, "SLURM_JOB_ID"), "nothing says where process 0 is; set SLURM_JOB_NODELIST and SLURM_JOB_ID"),
        (SLURM | {"SLURM_JOB_NODELIST": "node[1"}, r"'node\[1' is not a host list"),
        (SLURM | {"MASTER_ADDR": "node1"}, "MASTER_ADDR is node1, but MASTER_PORT is not set; set both, or neither"),
        (without(KUBERNETES, "JAX_NUM_PROCESSES"), "JOB_COMPLETION_INDEX is 2, but nothing says how many .* set JAX_NUM_PROCESSES"),
        (without(KUBERNETES, "JAX_COORDINATOR_ADDRESS"), "nothing says where .* set JAX_COORDINATOR_ADDRESS to JOB-0.SERVICE:PORT"),
        (without(KUBERNETES, "JOB_COMPLETION_INDEX"), "JAX_NUM_PROCESSES is 4, but nothing says which .* set JOB_COMPLETION_INDEX"),
        (KUBERNETES | {"JAX_COORDINATOR_ADDRESS": "gpt-0.gpt"}, "JAX_COORDINATOR_ADDRESS is gpt-0.gpt; it must be HOST:PORT"),
        ({"JAX_COORDINATOR_ADDRESS": "gpt-0.gpt:6000"}, "the coordinator is gpt-0.gpt:6000, but nothing says how many processes"),
        ({"RANK": "0"}, "RANK is 0, but nothing says how many processes there are"),
        ({"WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, "WORLD_SIZE is 8, but nothing says which of them"),
    ],
)
def test_what_is_said_by_halves_or_contradicts_itself_is_refused_in_one_sentence(environment, words):
    with pytest.raises(InputError, match=words) as error:
        find_job(environment)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("explicit", "words"),
    [
        (
            {"num_processes": 4},
            "runtime.num_processes is 4, but nothing says which of them this process is; pass --runtime.process-id from 0 to 3",
        ),
        (
            {"num_processes": 4, "process_id": 0},
            "runtime.num_processes is 4, but nothing says where process 0 is; .* --runtime.coordinator HOST:PORT",
        ),
        ({"process_id": 3}, "runtime.process_id is 3, but nothing says how many processes there are; pass --runtime.num-processes"),
        ({"coordinator": "node1:6000"}, "the coordinator is node1:6000, but nothing says how many processes"),
        (
            {"coordinator": "node1:6000", "num_processes": 4, "process_id": 4},
            "runtime.process_id is 4, but runtime.num_processes is 4; .* 0 to 3",
        ),
        ({"coordinator": "node1:6000", "num_processes": 4, "process_id": -1}, "runtime.process_id is -1, but runtime.num_processes is 4"),
        (
            {"num_processes": 1, "process_id": 1},
            "runtime.process_id is 1, but runtime.num_processes is 1; processes are numbered from 0 to 0",
        ),
        ({"num_processes": 0}, "runtime.num_processes is 0; a job has at least 1 process"),
        (
            {"coordinator": "node1", "num_processes": 4, "process_id": 0},
            "runtime.coordinator is node1; it must be HOST:PORT .* such as node1:61440",
        ),
        ({"coordinator": "node1:0"}, "runtime.coordinator is node1:0; it must be HOST:PORT with a port from 1 to 65535"),
        ({"coordinator": "http://node1:80"}, "runtime.coordinator is http://node1:80; it must be HOST:PORT"),
        ({"coordinator": "::1:80"}, "runtime.coordinator is ::1:80; it must be HOST:PORT"),
    ],
)
def test_explicit_values_by_halves_are_refused(explicit, words):
    with pytest.raises(InputError, match=words):
        find_job({}, **explicit)


def test_a_rank_beyond_the_explicit_number_is_refused():
    with pytest.raises(InputError, match=r"RANK is 11, but runtime\.num_processes is 4; processes are numbered from 0 to 3"):
        find_job(TORCHRUN, num_processes=4)


@pytest.mark.parametrize("environment", LAUNCHERS.values(), ids=LAUNCHERS.keys())
def test_no_missing_variable_makes_a_job_of_its_own(environment):
    for missing in environment:
        with contextlib.suppress(InputError):
            assert find_job(without(environment, missing)).num_processes == find_job(environment).num_processes
