"""What a compiled program communicates, and which matrix products run meanwhile. No jax.

Three things are read out of a program: its collectives with the devices that take part, what is scheduled between the start
and the end of each hop from stage to stage, and the floating-point operations of the products there.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from giantjax.hlo import BRANCHES, Instruction, Program, Shape

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-broadcast", "collective-permute", "send", "recv")
HOPS = ("collective-permute", "send", "recv")
GEMM = re.compile(r'custom_call_target="__cublas\$(?:gemm|lt\$matmul)')


@dataclass(frozen=True)
class Collective:
    """One collective operation of a program."""

    kind: str
    """One of KINDS."""
    computation: str
    instruction: Instruction
    payload: tuple[Shape, ...]
    """What each device puts in."""
    groups: tuple[tuple[int, ...], ...]
    """Places in the mesh that take part together; empty for hops."""
    pairs: tuple[tuple[int, int], ...]
    """(source, target) of hops."""
    times: int
    """How often a run of the program does it."""
    in_loop: bool

    @property
    def num_bytes(self) -> int:
        """Of the payload."""
        return sum(shape.num_bytes for shape in self.payload)


@dataclass(frozen=True)
class Window:
    """From where a hop starts to where its result is waited for."""

    computation: str
    start: Instruction
    end: Instruction
    collective: Collective
    between: tuple[Instruction, ...]
    """In the order in which they run."""


def collectives(program: Program) -> list[Collective]:
    """Every collective that runs; of a pair of start and end, the start."""
    found = []
    for name, (times, in_loop) in program.runs.items():
        for each in program.computations[name]:
            kind = each.opcode.removesuffix("-start")
            if kind in KINDS:
                payload = each.shapes[:1] if kind == "recv" else _payload(program, name, each)
                found.append(Collective(kind, name, each, payload, _groups(each), _pairs(each), times, in_loop))
    return found


def _payload(program: Program, computation: str, each: Instruction) -> tuple[Shape, ...]:
    # The second operand of a send is a token.
    inputs = each.operands[:1] if each.opcode == "send" else each.operands
    return tuple(shape for operand in inputs for shape in program.find(computation, operand).shapes)


def windows(program: Program, kinds: tuple[str, ...] = HOPS) -> list[Window]:
    """Start and end of each collective of these kinds, with what is scheduled between: nothing where it is waited for at once."""
    hops = {(hop.computation, hop.instruction.name): hop for hop in collectives(program) if hop.kind in kinds}
    found = []
    for name in program.runs:
        body = program.computations[name]
        for place, each in enumerate(body):
            hop = hops.get((name, each.name))
            if each.opcode == "async-start":
                inner = [(called, one.name) for called in each.calls("calls", "to_apply") for one in program.computations[called]]
                hop = next((hops[key] for key in inner if key in hops), None)
            elif hop and _is_wrapped(program, name):
                continue
            if hop:
                end = each if each.opcode == hop.kind and hop.kind not in ("send", "recv") else _end(body[place + 1 :], each)
                found.append(Window(name, each, end, hop, body[place + 1 : max(place + 1, program.place(name, end.name))]))
    return found


def _is_wrapped(program: Program, computation: str) -> bool:
    return any(
        computation in each.calls("calls", "to_apply")
        for name in program.runs
        for each in program.computations[name]
        if each.opcode == "async-start"
    )


def _end(following: tuple[Instruction, ...], start: Instruction) -> Instruction:
    """Where the result of `start` is waited for."""
    current = start.name
    for each in following:
        if current in each.operands and each.opcode.endswith(("-done", "-update")):
            if each.opcode.endswith("-done"):
                return each
            current = each.name
    # The end of a send or receive may stand in the next turn of the loop; nothing then says what lies between.
    return start


def dependents(program: Program, computation: str, names: Iterable[str]) -> frozenset[str]:
    """Of the instructions of `computation`, those that need the results of these."""
    found = set(names)
    for each in program.computations[computation]:
        if not found.isdisjoint(each.operands):
            found.add(each.name)
    return frozenset(found.difference(names))


def flops(program: Program, computation: str, instructions: tuple[Instruction, ...] | None = None) -> float:
    """Floating-point operations of matrix products among `instructions` of `computation`, None for all.

    Those of loops and of what they call are included, as often as they run.
    """
    if instructions is None:
        return _all_flops(program, computation)
    total = 0.0
    for each in instructions:
        if each.opcode == "dot" or (each.opcode == "custom-call" and GEMM.search(each.attributes)):
            total += _product_flops(program, computation, each)
        else:
            turns = each.trip_count if each.opcode == "while" else 1
            total += turns * sum(_all_flops(program, name) for name in each.calls(*CALLED.get(each.opcode, ("nothing",))))
    return total


CALLED = {"while": ("body",), "fusion": ("calls",), "call": ("to_apply", "calls"), "async-start": ("calls",), "conditional": BRANCHES}


@lru_cache(maxsize=4096)
def _all_flops(program: Program, computation: str) -> float:
    return flops(program, computation, program.computations[computation])


def _product_flops(program: Program, computation: str, each: Instruction) -> float:
    """2 x elements of the result x length of the sums."""
    left = program.find(computation, each.operands[0]).shapes[0]
    found = re.search(r'lhs_contracting_dims=\{([\d,]*)\}|"lhs_contracting_dimensions":\[([^\]]*)\]', each.attributes)
    dims = re.findall(r"\d+", (found[1] or found[2] or "") if found else "")
    return 2.0 * each.shapes[0].size * math.prod(left.dims[int(dim)] for dim in dims)


def _groups(each: Instruction) -> tuple[tuple[int, ...], ...]:
    """Members of each group, from the list or from the iota form `[groups,size]<=[dims]T(order)`."""
    listed = re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", each.attributes)
    if listed:
        return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", each.attributes)
    if iota:
        shape, dims = ([int(number) for number in iota[place].split(",")] for place in (1, 2))
        order = [int(number) for number in iota[3].split(",")] if iota[3] else list(range(len(dims)))
        numbers = np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(shape)
        return tuple(tuple(int(number) for number in row) for row in numbers.reshape(shape[0], -1))
    if "replica_groups=" in each.attributes:
        raise ValueError(f"the replica groups of {each.name} are in no known form: {each.attributes[:200]}")
    return ()


def _pairs(each: Instruction) -> tuple[tuple[int, int], ...]:
    found = re.search(r'source_target_pairs="?=?"?\{((?:\{\d+,\d+\},?)*)\}', each.attributes)
    return tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", found[1])) if found else ()
