"""The reader of compiled programs and the bytes it counts, on programs written by hand."""

import re

import numpy as np
import pytest

from giantjax.hlo import Program, Shape, parse
from giantjax.overlap import collectives, dependents, flops, windows
from giantjax.traffic import axes_of, ring_edges, traffic

DEGREES = {"pipe": 2, "replica": 1, "data": 1, "tensor": 2}
NODES = [0, 0, 1, 1]

TICKS = """HloModule step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%gemm (p0: bf16[64,32], p1: bf16[32,16]) -> bf16[64,16] {
  %p0 = bf16[64,32]{1,0} parameter(0)
  %p1 = bf16[32,16]{1,0} parameter(1)
  ROOT %dot.1 = bf16[64,16]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%layers (carry: (s32[], bf16[64,32], bf16[32,16])) -> (s32[], bf16[64,32], bf16[32,16]) {
  %carry = (s32[], bf16[64,32]{1,0}, /*index=2*/bf16[32,16]{1,0}) parameter(0)
  %x = bf16[64,32]{1,0} get-tuple-element(%carry), index=1
  %w = bf16[32,16]{1,0} get-tuple-element(%carry), index=2
  %call = (bf16[64,16]{1,0}, s8[4194304]{0}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul", CUBLAS
  ROOT %next = (s32[], bf16[64,32]{1,0}, bf16[32,16]{1,0}) tuple(%carry, %x, %w)
}

%more (carry.1: (s32[], bf16[64,32], bf16[32,16])) -> pred[] {
  %carry.1 = (s32[], bf16[64,32]{1,0}, bf16[32,16]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

%tick (carry.2: (s32[], bf16[64,32], bf16[32,16])) -> (s32[], bf16[64,32], bf16[32,16]) {
  %carry.2 = (s32[], bf16[64,32]{1,0}, bf16[32,16]{1,0}) parameter(0)
  %y = bf16[64,32]{1,0} get-tuple-element(%carry.2), index=1
  %v = bf16[32,16]{1,0} get-tuple-element(%carry.2), index=2
  %hop-start = (bf16[64,32]{1,0}, bf16[64,32]{1,0}) collective-permute-start(%y), source_target_pairs={{0,2},{1,3}}
  %back = (s32[], bf16[64,32]{1,0}, bf16[32,16]{1,0}) while(%carry.2), condition=%more, body=%layers, TURNS(5)
  %hop-done = bf16[64,32]{1,0} collective-permute-done(%hop-start)
  %norms = f32[4,16]{1,0} constant({ { 1, 2 } })
  %sum-start = f32[4,16]{1,0} all-reduce-start(%norms), channel_id=2, replica_groups=[2,2]<=[4], use_global_device_ids=true, to_apply=%add
  %sum-done = f32[4,16]{1,0} all-reduce-done(%sum-start)
  %z = bf16[64,16]{1,0} fusion(%hop-done, %v), kind=kCustom, calls=%gemm
  ROOT %out = (s32[], bf16[64,32]{1,0}, bf16[32,16]{1,0}) tuple(%carry.2, %hop-done, %v)
}

ENTRY %main (p: (s32[], bf16[64,32], bf16[32,16])) -> f32[8] {
  %p = (s32[], bf16[64,32]{1,0}, bf16[32,16]{1,0}) parameter(0)
  %loop = (s32[], bf16[64,32]{1,0}, bf16[32,16]{1,0}) while(%p), condition=%more, body=%tick, TURNS(7)
  %grad = f32[8]{0} constant({0})
  ROOT %total = f32[8]{0} all-reduce(%grad), channel_id=3, replica_groups={{0,2},{1,3}}, use_global_device_ids=true, to_apply=%add
}
"""
TURNS = r'backend_config={"known_trip_count":{"n":"\1"}}'
CUBLAS = (
    'backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
    '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}'
)
TICKS = re.sub(r"TURNS\((\d)\)", TURNS, TICKS).replace("CUBLAS", CUBLAS)

PRODUCT = 2.0 * 64 * 16 * 32


def entry(lines: str) -> Program:
    """A program of these instructions, and of a computation that is sent asynchronously."""
    return parse(
        "%inner (q: f32[8]) -> f32[8] {\n  %q = f32[8]{0} parameter(0)\n"
        "  ROOT %move = f32[8]{0} collective-permute(%q), source_target_pairs={{2,0},{3,1}}\n}\n\n"
        "ENTRY %main (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} parameter(0)\n" + lines + "}\n"
    )


def test_loops_multiply() -> None:
    found = {each.instruction.name: each for each in collectives(parse(TICKS))}
    assert {name: (each.kind, each.times, each.in_loop) for name, each in found.items()} == {
        "hop-start": ("collective-permute", 7, True),
        "sum-start": ("all-reduce", 7, True),
        "total": ("all-reduce", 1, False),
    }
    assert parse(TICKS).runs["layers"] == (35, True)
    hop = found["hop-start"]
    assert (hop.pairs, hop.payload, hop.num_bytes) == (((0, 2), (1, 3)), (Shape("bf16", (64, 32)),), 4096)
    assert found["sum-start"].groups == ((0, 1), (2, 3))
    assert [axes_of(found[name], DEGREES) for name in ("hop-start", "sum-start", "total")] == [("pipe",), ("tensor",), ("pipe",)]


def test_work_between_start_and_end_of_a_hop() -> None:
    program = parse(TICKS)
    (window,) = windows(program)
    assert [each.name for each in window.between] == ["back"]
    # The inner loop's product is by cuBLAS, five times; the fusion's runs after the hop, whose result it needs.
    assert flops(program, window.computation, window.between) == 5 * PRODUCT
    assert dependents(program, "tick", ["hop-done"]) == {"z", "out"}
    assert flops(program, "tick") == 6 * PRODUCT
    assert flops(program, "main") == 7 * 6 * PRODUCT


def test_bytes_inside_and_between_nodes() -> None:
    sent = traffic(collectives(parse(TICKS)), NODES)
    # Hops: 7 x 4096 bytes from both devices of node 0. The last sum: rings of two, each sends its 32 bytes once.
    assert sent.across.tolist() == [7 * 4096 + 32, 7 * 4096 + 32, 32, 32]
    # The sums in ticks: rings of two within a node, 7 x 256 bytes.
    assert sent.inside.tolist() == [7 * 256] * 4


@pytest.mark.parametrize(("kind", "each_edge"), [("all-reduce", 2 * 3 / 4 * 100), ("reduce-scatter", 3 / 4 * 100), ("all-gather", 3 * 100)])
def test_a_ring_crosses_each_node_once(kind: str, each_edge: float) -> None:
    """However the members are listed."""
    edges = list(ring_edges(kind, [0, 2, 1, 3], NODES, 100))
    assert sum(NODES[a] != NODES[b] for a, b, _ in edges) == 2
    assert {sent for _, _, sent in edges} == {each_edge} and len(edges) == 4


def test_all_to_all_sends_to_each() -> None:
    edges = list(ring_edges("all-to-all", [0, 1, 2, 3], NODES, 100))
    assert len(edges) == 12 and {sent for _, _, sent in edges} == {25}


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("replica_groups={}", ()),
    ],
)
def test_forms_of_groups(text: str, groups: tuple[tuple[int, ...], ...]) -> None:
    (found,) = collectives(entry(f"  ROOT %r = f32[8]{{0}} all-reduce(%p), {text}, to_apply=%add\n"))
    assert found.groups == groups
    # No groups means all devices together.
    assert np.all(traffic([found], NODES).inside + traffic([found], NODES).across > 0)


def test_unknown_groups_are_not_guessed() -> None:
    with pytest.raises(ValueError, match="in no known form"):
        collectives(entry("  ROOT %r = f32[8]{0} all-reduce(%p), replica_groups=@mesh<x=2>{x}, to_apply=%add\n"))


def test_asynchronous_wrappers() -> None:
    program = entry(
        "  %s = ((f32[8]{0}), f32[8]{0}, u32[]) async-start(%p), calls=%inner\n"
        "  %u = ((f32[8]{0}), f32[8]{0}, u32[]) async-update(%s)\n"
        "  %n = f32[8]{0} negate(%p)\n"
        "  ROOT %d = f32[8]{0} async-done(%u)\n"
    )
    (found,) = collectives(program)
    assert (found.kind, found.times, found.pairs) == ("collective-permute", 1, ((2, 0), (3, 1)))
    (window,) = windows(program)
    assert (window.computation, [each.name for each in window.between]) == ("main", ["u", "n"])


def test_send_and_receive() -> None:
    attributes = "channel_id=1, frontend_attributes={_xla_send_recv_source_target_pairs={{0,2},{1,3}}}"
    program = entry(
        "  %t = token[] after-all()\n"
        f"  %r = (f32[8]{{0}}, u32[], token[]) recv(%t), {attributes}\n"
        f"  %s = (f32[8]{{0}}, u32[], token[]) send(%p, %t), {attributes}\n"
        "  %n = f32[8]{0} negate(%p)\n"
        "  %sd = token[] send-done(%s)\n"
        "  %rd = (f32[8]{0}, token[]) recv-done(%r)\n"
        "  ROOT %g = f32[8]{0} get-tuple-element(%rd), index=0\n"
    )
    assert {(each.kind, each.pairs) for each in collectives(program)} == {("recv", ((0, 2), (1, 3))), ("send", ((0, 2), (1, 3)))}
    # What is received was sent: bytes count once.
    assert traffic(collectives(program), NODES).across.tolist() == [32, 32, 0, 0]
    assert {window.collective.kind: [each.name for each in window.between] for window in windows(program)} == {
        "recv": ["s", "n", "sd"],
        "send": ["n"],
    }


def test_a_hop_that_waits_hides_nothing() -> None:
    program = entry("  ROOT %m = f32[8]{0} collective-permute(%p), source_target_pairs={{0,2}}\n")
    (window,) = windows(program)
    assert window.between == ()


def test_a_loop_of_unknown_length_is_not_guessed() -> None:
    with pytest.raises(ValueError, match="the loop loop has no known trip count"):
        collectives(parse(TICKS.replace('"n":"7"', "")))


def test_other_text_is_refused() -> None:
    with pytest.raises(ValueError, match="no computation is marked ENTRY"):
        parse("module @jit_f {}")
