"""Reading a compiled program: XLA prints it as text, each computation in the order in which it runs.

What is read: how often each computation runs, the collectives with the devices that take part, and the floating-point
operations of matrix products between two points of the schedule. No jax.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4}
BYTES |= {"s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16, "token": 0, "opaque": 0}
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-broadcast", "collective-permute", "send", "recv")
HOPS = ("collective-permute", "send", "recv")
GEMM = re.compile(r'custom_call_target="__cublas\$(?:gemm|lt\$matmul)')


class Shape(NamedTuple):
    """Type and dims of one array."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Bytes; those of types not listed in BYTES (fp8) are 1 an element."""
        return math.ceil(self.size * BYTES.get(self.dtype, 1))

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    """Of the result, a tuple's leaves in order."""
    operands: tuple[str, ...]
    attributes: str
    """All that follows the operands."""

    def calls(self, *roles: str) -> tuple[str, ...]:
        """Computations that the attributes name in these roles (`body`, `calls`, `to_apply`, ...)."""
        found = re.findall(rf"\b(?:{'|'.join(roles)})=(?:%([\w.\-]+)|\{{([^}}]*)\}})", self.attributes)
        return tuple(name for single, several in found for name in ([single] if single else re.findall(r"%([\w.\-]+)", several)))

    @property
    def source(self) -> str:
        """Where in the traced function it comes from (`op_name`), empty where it does not say."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1] if found else ""

    @property
    def trip_count(self) -> int:
        """Turns of a loop.

        Raises:
            ValueError: the program does not say.
        """
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', self.attributes)
        if found is None:
            raise ValueError(f"the loop {self.name} has no known trip count")
        return int(found[1])


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


class Work(NamedTuple):
    """Floating-point operations of matrix products."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Both."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Program:
    """Computations by name, each in the order of its schedule."""

    computations: dict[str, tuple[Instruction, ...]]
    entry: str
    _work: dict[str, Work] = field(default_factory=dict, repr=False)

    @cached_property
    def runs(self) -> dict[str, tuple[int, bool]]:
        """How often each computation runs, and whether in a loop; what fusions and reductions call is left out."""
        found: dict[str, tuple[int, bool]] = {}

        def visit(name: str, times: int, in_loop: bool) -> None:
            before, looped = found.get(name, (0, False))
            found[name] = (before + times, looped or in_loop)
            for each in self.computations[name]:
                if each.opcode == "while":
                    visit(each.calls("body")[0], times * each.trip_count, True)
                elif each.opcode in ("call", "async-start", "conditional"):
                    # Every branch of a conditional counts: on some device each may be the one taken.
                    for called in each.calls("calls", "to_apply", "branch_computations", "true_computation", "false_computation"):
                        visit(called, times, in_loop)

        visit(self.entry, 1, False)
        return found

    @cached_property
    def _places(self) -> dict[str, dict[str, int]]:
        return {name: {each.name: place for place, each in enumerate(body)} for name, body in self.computations.items()}

    def collectives(self) -> list[Collective]:
        """Every collective that runs; of a pair of start and end, the start."""
        found = []
        for name, (times, in_loop) in self.runs.items():
            for each in self.computations[name]:
                kind = each.opcode.removesuffix("-start")
                if kind in KINDS:
                    payload = each.shapes[:1] if kind == "recv" else self._payload(name, each)
                    found.append(Collective(kind, name, each, payload, _groups(each), _pairs(each), times, in_loop))
        return found

    def _payload(self, computation: str, each: Instruction) -> tuple[Shape, ...]:
        body, places = self.computations[computation], self._places[computation]
        inputs = each.operands[:1] if each.opcode == "send" else each.operands
        return tuple(shape for operand in inputs for shape in body[places[operand]].shapes)

    def windows(self) -> list[Window]:
        """Each hop's start and end, with what is scheduled between them; nothing for one that does not overlap at all."""
        by_name = {(hop.computation, hop.instruction.name): hop for hop in self.collectives() if hop.kind in HOPS}
        found = []
        for name in self.runs:
            body, places = self.computations[name], self._places[name]
            for place, each in enumerate(body):
                hop = by_name.get((name, each.name))
                if each.opcode == "async-start":
                    inner = [(called, one.name) for called in each.calls("calls", "to_apply") for one in self.computations[called]]
                    hop = next((by_name[key] for key in inner if key in by_name), None)
                if hop is None:
                    continue
                last = each
                if each.opcode != "collective-permute":
                    last = _end(body[place + 1 :], each)
                found.append(Window(name, each, last, hop, body[place + 1 : max(place + 1, places[last.name])]))
        return found

    def work(self, instructions: tuple[Instruction, ...], computation: str) -> Work:
        """Matrix products among `instructions` of `computation`, those of loops and of what they call included.

        Products that a backward pass does, recomputation included, are told by where they come from.
        """
        forward = backward = 0.0
        for each in instructions:
            if each.opcode == "dot" or (each.opcode == "custom-call" and GEMM.search(each.attributes)):
                flops = self._product_flops(computation, each)
                is_backward = "transpose(" in each.source
                forward, backward = forward + flops * (not is_backward), backward + flops * is_backward
                continue
            turns = each.trip_count if each.opcode == "while" else 1
            roles = {"while": ("body",), "fusion": ("calls",), "call": ("to_apply", "calls"), "async-start": ("calls",)}
            branches = ("branch_computations", "true_computation", "false_computation")
            called = each.calls(*(branches if each.opcode == "conditional" else roles.get(each.opcode, ("no role",))))
            for name in called:
                inner = self._work_of(name)
                forward, backward = forward + turns * inner.forward, backward + turns * inner.backward
        return Work(forward, backward)

    def _work_of(self, name: str) -> Work:
        if name not in self._work:
            self._work[name] = self.work(self.computations[name], name)
        return self._work[name]

    def _product_flops(self, computation: str, each: Instruction) -> float:
        """2 x elements of the result x length of the sums."""
        body, places = self.computations[computation], self._places[computation]
        left = body[places[each.operands[0]]].shapes[0]
        found = re.search(r'lhs_contracting_dims=\{([\d,]*)\}|"lhs_contracting_dimensions":\[([^\]]*)\]', each.attributes)
        dims = re.findall(r"\d+", (found[1] or found[2] or "") if found else "")
        return 2.0 * each.shapes[0].size * math.prod(left.dims[int(dim)] for dim in dims)


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


def parse(text: str) -> Program:
    """The program that `compiled.as_text()` prints."""
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, name, body = "", "", list[Instruction]()
    for line in text.splitlines():
        if not name:
            head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
            if head:
                name, body = head[2], []
                entry = name if head[1] else entry
        elif line.startswith("}"):
            computations[name], name = tuple(body), ""
        elif " = " in line:
            body.append(_instruction(line))
    if not entry:
        raise ValueError("this is not the text of a compiled program: no computation is marked ENTRY")
    return Program(computations, entry)


def _instruction(line: str) -> Instruction:
    name, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opens = rest.index("(", end)
    closes = _closing(rest, opens)
    opcode, operands = rest[end:opens].strip(), rest[opens + 1 : closes]
    names = re.findall(r"%([\w.\-]+)", operands) if opcode != "constant" else []
    return Instruction(name.removeprefix("%"), opcode, tuple(_shapes(rest[:end])), tuple(names), rest[closes + 1 :])


def _closing(text: str, start: int) -> int:
    """Place of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"a parenthesis is not closed in: {text[:80]}")


def _shapes(text: str) -> Iterator[Shape]:
    for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", text):
        yield Shape(dtype, tuple(int(dim) for dim in dims.split(",") if dim))


def _groups(each: Instruction) -> tuple[tuple[int, ...], ...]:
    """Members of each group, from the list or from the iota form `[groups,size]<=[dims]T(order)`."""
    listed = re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", each.attributes)
    if listed:
        return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", each.attributes)
    if iota:
        import numpy as np

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
