"""Reading a compiled program: XLA prints it as text, each computation in the order in which it runs. No jax."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4}
BYTES |= {"s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16, "token": 0, "opaque": 0}
BRANCHES = ("branch_computations", "true_computation", "false_computation")


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
    def trip_count(self) -> int:
        """Turns of a loop.

        Raises:
            ValueError: the program does not say.
        """
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', self.attributes)
        if found is None:
            raise ValueError(f"the loop {self.name} has no known trip count")
        return int(found[1])


@dataclass(frozen=True, eq=False)
class Program:
    """Computations by name, each in the order of its schedule."""

    computations: dict[str, tuple[Instruction, ...]]
    entry: str

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
                    for called in each.calls("calls", "to_apply", *BRANCHES):
                        visit(called, times, in_loop)

        visit(self.entry, 1, False)
        return found

    @cached_property
    def _places(self) -> dict[str, dict[str, int]]:
        return {name: {each.name: place for place, each in enumerate(body)} for name, body in self.computations.items()}

    def find(self, computation: str, instruction: str) -> Instruction:
        """The instruction of that name."""
        return self.computations[computation][self._places[computation][instruction]]

    def place(self, computation: str, instruction: str) -> int:
        """Where in its computation's schedule the instruction stands."""
        return self._places[computation][instruction]


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
