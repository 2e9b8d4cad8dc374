"""The executables that this process has loaded, and which of them a program runs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Final

import jax

from snaprt import jaxapi, metrics
from snaprt.compile.downcast import Narrowing, narrowings
from snaprt.compile.executable import Executable
from snaprt.graph.program import LITERAL, Node, Program, Structure

MAX_PROGRAMS: Final = 2048
"""How many programs stay loaded in a process; the least recently used one goes first."""

_DONATIONS_TO_COMPILE: Final = 2
"""How often in a row a program must find other inputs free before it is compiled for those ..."""

WORTH_COMPILING_BYTES: Final = 64 << 20
"""... and how much memory the difference must be: less is not worth a compilation."""


LARGE_CALL: Final = 16
"""A call of a jitted function with so many equations takes scalars as arguments from the start, as
under JAX: to compile it once more, when one has varied, takes longer than to pass them."""


def differs_little(program: Program, donated: Collection[int]) -> bool:
    """Return whether taking the memory of ``donated`` will do for what ``program`` donates."""
    others = set(program.donated).symmetric_difference(donated)
    return sum(program.inputs[index].nbytes for index in others) < WORTH_COMPILING_BYTES


@dataclass(frozen=True)
class Ready:
    """What a program runs."""

    executable: Executable
    arguments: list[jax.Array]  # what to call it with: the inputs, then the literals that vary
    is_new: bool  # whether it was loaded or compiled for this
    promoted: frozenset[int]  # which of its literals are arguments


@dataclass
class _Family:
    """The executables of programs that differ in the values of their literals alone."""

    promoted: frozenset[int] = frozenset()
    literals: tuple[bytes, ...] = ()
    executables: dict[tuple[bytes, ...], _Variants] = field(default_factory=dict)


@dataclass
class _Variants:
    """The executables of one program that differ in the inputs whose memory they take."""

    by_donated: dict[tuple[int, ...], Executable] = field(default_factory=dict)
    latest: Executable | None = None
    missed: int = 0

    def find(self, program: Program, *, exactly: bool) -> Executable | None:
        """Return the executable to use for the inputs that are free; ``None`` to compile one.

        Which inputs are free may change by chance, as when a garbage collector lets go of an
        array. So a program is compiled anew when it has found others free twice in a row, and they
        are large; else what an executable takes and should not is copied. If it must be
        ``exactly`` so, nothing is copied.
        """
        executable = self.by_donated.get(program.donated)
        if executable is not None or self.latest is None or exactly:
            self.missed = 0
            return executable
        if differs_little(program, self.latest.donated):
            return self.latest
        self.missed += 1
        return self.latest if self.missed < _DONATIONS_TO_COMPILE else None

    def add(self, executable: Executable) -> None:
        """Keep an executable that was compiled."""
        self.by_donated[executable.donated] = self.latest = executable
        self.missed = 0


# Where literals stand that were seen to vary: what takes them, by its signature and its place in
# the source, and as which operand.
_varying: set[tuple[int, tuple[Any, ...], int]] = set()

# By whether they have a flag that tells of NaN, whether literals are constants, what they compute
# in narrower types, and by their structure.
_families: OrderedDict[tuple[bool, bool, tuple[Narrowing, ...], Structure], _Family] = OrderedDict()
_lock = threading.RLock()


def executable_for(
    program: Program,
    compile_it: Callable[[Program, frozenset[int]], Executable],
    *,
    is_watched: bool,
    exactly: bool,
    constants: bool = True,
) -> Ready:
    """Return the executable of ``program``, which is compiled if this process has none.

    A literal is compiled in as a constant, which XLA can use, until a program comes that differs
    in its value alone; from then on it is an argument, so that a learning rate that changes at
    every step costs two compilations and not one a step. In other programs of the same lines of
    the source, it is one from the start, and where a large call of a jitted function takes it.

    Args:
        program: What is to run.
        compile_it: Compiles a program, with some of its literals as arguments.
        is_watched: Whether the executable has a flag; see `snaprt.compile.lower`.
        exactly: Whether it must take the memory of what ``program`` donates, neither more nor less.
        constants: Whether a literal may be a constant. Eager JAX passes it as an argument, and what
            XLA makes of a constant can differ from that in the last bits.
    """
    literals = tuple([literal.key for literal in program.literals])
    key = (is_watched, constants, narrowings(), program.structure)
    with _lock:
        family = _families.get(key)
        if family is None:
            promoted = _sure_to_vary(program) if constants else frozenset(range(len(literals)))
            family = _families[key] = _Family(promoted, literals)
            if len(_families) > MAX_PROGRAMS:
                _families.popitem(last=False)
        else:
            _families.move_to_end(key)
        promoted = family.promoted
        variants = family.executables.get(_constants(literals, promoted))
        executable = None if variants is None else variants.find(program, exactly=exactly)
        if variants is None and family.executables:
            pairs = zip(literals, family.literals, strict=True)
            varied = [i for i, (a, b) in enumerate(pairs) if a != b]
            promoted = family.promoted = promoted | frozenset(varied)
            family.executables.clear()
            literals_vary(program.nodes, program.wiring, varied)
    is_new = executable is None
    if executable is None:
        # What a first step is given comes from elsewhere; from the second on it is our own.
        donated = program.free if variants is None else program.donated
        executable = compile_it(replace(program, donated=donated), promoted)
        with _lock:
            if family.promoted == promoted:
                fixed = _constants(literals, promoted)
                family.executables.setdefault(fixed, _Variants()).add(executable)
    arguments = program.arguments(promoted)
    for index in executable.donated:
        if index not in program.donated:
            metrics.counter_add("DonationCopied")
            arguments[index] = jaxapi.copy_array(arguments[index])
    return Ready(executable, arguments, is_new, promoted)


def forget_programs(signatures: Set[int]) -> None:
    """Let go of the executables of programs that have operations of these signatures."""
    with _lock:
        for key in list(_families):
            if not signatures.isdisjoint(key[3].operations):
                del _families[key]
        _varying.difference_update([use for use in _varying if use[0] in signatures])


def literals_vary(
    nodes: Sequence[Node], wiring: Sequence[Sequence[tuple[int, int]]], varied: Collection[int]
) -> None:
    """Take note that some literals of a program vary, by their numbers; see `Program`."""
    with _lock:
        _varying.update([use for index, use in _uses(nodes, wiring) if index in varied])


def _sure_to_vary(program: Program) -> frozenset[int]:
    """Return the literals that were seen to vary, and those that vary in many programs."""
    promoted: set[int] = set()
    if _varying:
        uses = _uses(program.nodes, program.wiring)
        promoted.update(index for index, use in uses if use in _varying)
    for node, wires in zip(program.nodes, program.wiring, strict=True):
        numbers = [number for producer, number in wires if producer == LITERAL]
        if (
            numbers
            and jaxapi.is_call_of_users_jit(node.primitive, node.params)
            and jaxapi.equations_within(node.primitive, node.params) >= LARGE_CALL
        ):
            promoted.update(numbers)
    return frozenset(promoted)


def _uses(
    nodes: Sequence[Node], wiring: Sequence[Sequence[tuple[int, int]]]
) -> Iterator[tuple[int, tuple[int, tuple[Any, ...], int]]]:
    """Yield each literal with what `_varying` knows it by."""
    for node, wires in zip(nodes, wiring, strict=True):
        numbers = {place: n for place, (producer, n) in enumerate(wires) if producer == LITERAL}
        at = jaxapi.place_of_operation(node.source) if numbers else ()
        for place, number in numbers.items():
            yield number, (node.operation.signature, at, place)


def _constants(literals: tuple[bytes, ...], promoted: frozenset[int]) -> tuple[bytes, ...]:
    if not promoted:
        return literals
    return tuple([key for i, key in enumerate(literals) if i not in promoted])
