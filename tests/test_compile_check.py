"""The train step of a small model compiled for GPUs that are not here: what the report says of it, and that it is right."""

import functools
import math
from dataclasses import replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import pytest

from giantjax import targets
from giantjax.cluster import GPUS, Cluster
from giantjax.compile_check import compile_lowered, lower_plan, verify
from giantjax.compile_report import STEADY, Compute, Report, show
from giantjax.config import MeshConfig, ModelConfig, PipelineConfig, RunConfig, TrainingConfig
from giantjax.errors import InputError
from giantjax.hlo import Shape
from giantjax.targets import INSTALL, TARGETS, compile_only_devices, uncached
from giantjax.traffic import foretell

needs_plugin = pytest.mark.skipif(not targets.is_installed(), reason=f"compiling for GPUs that are not here needs {INSTALL}")
together = pytest.mark.xdist_group("compile check")
MICROBATCHES = 60


def cluster(gpu: str = "A100-40GB", num_nodes: int = 2, gpus_per_node: int = 2) -> Cluster:
    return Cluster("test", next(each for each in GPUS if each.name == gpu), num_nodes, gpus_per_node)


def run(
    mesh: MeshConfig, *, schedule: str = "1f1b", recompute: str = "none", zero_stage: int = 0, head: str = "untied", inner: int = 4096
) -> RunConfig:
    """Four layers whose products outweigh those of the head."""
    return RunConfig(
        name="test",
        model=ModelConfig(
            num_layers=4,
            hidden_size=512,
            num_heads=4,
            sequence_length=128,
            vocabulary_size=250,
            feedforward_size=inner,
            head="tied" if head == "tied" else "untied",
        ),
        training=TrainingConfig(
            num_steps=1, global_batch_size=2 * MICROBATCHES * mesh.data * mesh.replica, zero_stage=zero_stage, recompute=recompute
        ),
        mesh=mesh,
        pipeline=PipelineConfig(schedule=schedule, microbatch_size=2),
    )


ACROSS = MeshConfig(pipe=2, tensor=2)


class Recorder(NamedTuple):
    """Stands in the place of a lowered step, and keeps what it compiles to."""

    step: jax.stages.Lowered
    kept: list[jax.stages.Compiled]

    def compile(self, **options: Any) -> jax.stages.Compiled:
        self.kept.append(self.step.compile(**options))
        return self.kept[-1]


@functools.cache
def compiled(config: RunConfig, gpu: str, compute: Compute | None, triton: bool) -> tuple[Report, jax.stages.Compiled]:
    lowered = lower_plan(config, cluster(gpu), compute)
    recorder = Recorder(lowered.step, [])
    found = compile_lowered(lowered._replace(step=cast(jax.stages.Lowered, recorder)), triton=triton)
    return found, recorder.kept[0]


def report(config: RunConfig | None = None, gpu: str = "A100-40GB", compute: Compute | None = None, triton: bool = True) -> Report:
    return compiled(config or run(ACROSS), gpu, compute, triton)[0]


@needs_plugin
@together
@pytest.mark.parametrize(("gpu", "compute", "triton"), [("A100-40GB", None, True), ("V100-32GB", "fp16", False)], ids=str)
def test_each_hop_lies_over_the_other_directions_compute(gpu: str, compute: Compute | None, triton: bool) -> None:
    found = report(gpu=gpu, compute=compute, triton=triton)
    assert found.hidden("forward") >= STEADY and found.hidden("backward") >= STEADY and found.exposed <= 1 - STEADY
    steady = [hop for hop in found.hops if hop.steady]
    assert {hop.direction for hop in steady} == {"forward", "backward"}
    assert found.compute == (compute or "bf16")
    assert found.gradient_sums_in_loops == ()


@needs_plugin
@together
@pytest.mark.slow
def test_gpipe_hides_nothing() -> None:
    """What starts a hop waits for it in the same tick: the check can tell."""
    found = report(run(ACROSS, schedule="gpipe"))
    assert found.exposed > 0.9
    assert not any(hop.steady for hop in found.hops)


@needs_plugin
@together
def test_only_slices_and_gradients_of_shared_parameters_cross_nodes() -> None:
    found = report()
    assert found.sends_slices and found.slice_bytes == 2 * 128 * 512 * 2 // 2
    assert 1 <= found.boundary_bytes / found.foretold.boundaries <= 1.05
    assert found.gradient_bytes == pytest.approx(found.foretold.gradients, rel=0.01)
    assert found.other_bytes == 0
    assert {use.kind for use in found.uses if use.across} <= {"collective-permute", "all-reduce"}
    assert found.network_ratio == pytest.approx(1, abs=0.05)
    assert found.busiest_node <= found.network_bytes and found.busiest_device <= found.busiest_node


REPLICAS = MeshConfig(replica=2, data=2)


@needs_plugin
@together
def test_replicas_across_nodes_send_gradients_and_nothing_else() -> None:
    found = report(run(REPLICAS, zero_stage=1))
    assert found.foretold.boundaries == found.boundary_bytes == found.other_bytes == 0
    # Without hops the loop over microbatches is told by what it carries: gradients of the largest weights first.
    assert found.carried[0].shape == Shape("f32", (1, 512, 4096)) or found.carried[0].shape == Shape("f32", (1, 4096, 512))
    assert found.network_ratio == pytest.approx(1, abs=0.05)


@needs_plugin
@together
@pytest.mark.parametrize("mesh", [MeshConfig(replica=2, tensor=2), MeshConfig(replica=2, pipe=2)], ids=str)
def test_sums_over_replicas_lie_over_the_last_backward_pass(mesh: MeshConfig) -> None:
    found = report(run(mesh))
    assert not found.gradient_sums_in_loops
    # The last part's sum, and that of what all layers share, have nothing left to lie over.
    assert 0.3 < found.overlapped_sums < 1


@needs_plugin
@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_bytes_foretold_of_gradients(zero_stage: int) -> None:
    """Each of two nodes sends four bytes a parameter once, whatever its two devices hold."""
    config = run(REPLICAS, zero_stage=zero_stage)
    layout = lower_plan(config, cluster()).layout
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(layout.shapes.params))
    assert foretell(config, layout, [0, 0, 1, 1], 2) == (0, 2 * 4 * parameters, 0)
    assert foretell(config, layout, [0, 0, 0, 0], 2) == (0, 0, 0)


@needs_plugin
@together
@pytest.mark.parametrize(("compression", "bytes_a_value"), [("bf16", 2), ("int8", 1 + 4 / 256)])
def test_rounded_gradients_cross_nodes_in_fewer_bytes(compression: Any, bytes_a_value: float) -> None:
    config = run(REPLICAS, zero_stage=1)
    found = report(replace(config, training=replace(config.training, compression=compression)))
    assert found.network_ratio == pytest.approx(1, abs=0.05)
    assert found.network_bytes == pytest.approx(report(config).network_bytes * bytes_a_value / 4, rel=0.05)


@needs_plugin
@together
def test_memory_is_what_xla_says() -> None:
    found, program = compiled(run(ACROSS), "A100-40GB", None, True)
    said, memory = program.memory_analysis(), found.memory
    assert said is not None
    assert (memory.arguments, memory.temporary) == (said.argument_size_in_bytes, said.temp_size_in_bytes)
    assert memory.total == said.argument_size_in_bytes + said.output_size_in_bytes - said.alias_size_in_bytes + said.temp_size_in_bytes
    # The state is donated: its successor takes its place.
    assert memory.aliased > 0.99 * memory.outputs
    assert memory.usable == int(TARGETS["A100-40GB"].memory_bytes * 0.92) - 2**30
    assert found.fits


@needs_plugin
@together
def test_verify_takes_the_worse_of_two_programs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    first = report()
    both = [first, replace(first, triton=False, memory=replace(first.memory, temporary=first.memory.temporary + 1))]
    monkeypatch.setattr("giantjax.compile_check.compile_lowered", lambda _, triton: both[0] if triton else both[1])
    found = verify(run(ACROSS), cluster())
    assert not found.triton and found.memory.total == first.memory.total + 1
    assert found.compile_s == sum(each.compile_s for each in both)
    assert set(found.summary()) == {"fits", "memory_bytes", "network_bytes_per_step", "exposed", "compile_s"}
    show(found)
    printed = capsys.readouterr().out
    assert "so it fits" in printed and "sums of gradients in ticks: none" in printed


@needs_plugin
@together
@pytest.mark.parametrize("gpu", sorted(TARGETS))
def test_every_gpu_can_be_compiled_for(gpu: str) -> None:
    devices = compile_only_devices(cluster(gpu))
    assert [device.process_index for device in devices] == [0, 0, 1, 1]
    assert devices[0].device_kind == TARGETS[gpu].name
    where = jax.sharding.SingleDeviceSharding(devices[0])
    lowered = jax.jit(lambda x: jnp.tanh(x @ x)).lower(jax.ShapeDtypeStruct((64, 64), jnp.float16, sharding=where))
    with uncached():
        assert lowered.compile().memory_analysis()


@needs_plugin
def test_missing_degrees_follow_from_the_cluster() -> None:
    asked: dict[str, Any] = {"pipe": 2, "tensor": None}
    assert lower_plan(replace(run(ACROSS), mesh=MeshConfig(**asked)), cluster()).config.mesh == ACROSS


@needs_plugin
def test_a_mesh_of_another_size_is_refused() -> None:
    with pytest.raises(InputError, match=r"mesh.pipe 2 x mesh.replica 1 x mesh.data 1 x mesh.tensor 1 = 2 devices, but there are 2 nodes"):
        lower_plan(run(MeshConfig(pipe=2)), cluster())


def test_without_the_plugin_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(**_: object) -> None:
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", absent)
    monkeypatch.setattr(targets, "is_installed", lambda: False)
    with pytest.raises(InputError, match=r"compiling for A100-40GB needs JAX's CUDA plugin .*; pip install -e '\.\[aot\]'"):
        compile_only_devices(cluster())


def test_every_gpu_of_a_cluster_is_described() -> None:
    assert set(TARGETS) == {gpu.name for gpu in GPUS}
    with pytest.raises(InputError, match="nothing can be compiled for B300 of test; the GPUs described are V100-16GB"):
        compile_only_devices(Cluster("test", replace(GPUS[0], name="B300"), 1))
