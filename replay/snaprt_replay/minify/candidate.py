"""A program that may show the failure, with its inputs."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence

import numpy as np

from snaprt.hlo.proto import XlaMessage, serialize
from snaprt_replay.hlo.hlo_module import entry_computation, root_instruction
from snaprt_replay.run.variants.variants import Variant

_NO_WORK = frozenset({"parameter", "constant", "tuple", "get-tuple-element"})
_STEPS = frozenset({"while", "conditional", "call"})


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """One program on its way to becoming small."""

    # An HloModuleProto, flat (see `inline`), whose entry takes arrays and returns a tuple of
    # arrays. A second one where the reference side runs another program: then both take and return
    # the same.
    modules: tuple[XlaMessage, ...]
    inputs: tuple[np.ndarray, ...]  # one array for each parameter
    # How the suspect and the reference side run it; empty where that is not to change.
    variants: tuple[Variant, ...] = ()
    # The outputs it should have, where they are known and no reference side runs.
    expected: tuple[np.ndarray, ...] | None = None
    change: str = ""  # what made it of the program before, in words
    view: str = ""  # the name of the view that made it
    grain: int = 0  # how much the view took at a time; it goes on from there

    @functools.cached_property
    def contents(self) -> tuple[bytes, ...]:
        """Return the serialized modules."""
        return tuple(serialize(module) for module in self.modules)

    def content(self, side: int) -> bytes:
        """Return the serialized module of the suspect (0) or the reference (1)."""
        return self.contents[min(side, len(self.contents) - 1)]

    @functools.cached_property
    def key(self) -> str:
        """Return a digest that candidates share which run alike."""
        found = hashlib.blake2b(digest_size=16)
        for content in self.contents:
            found.update(hashlib.blake2b(content).digest())
        for variant in self.variants:
            found.update(repr(dataclasses.replace(variant, text="")).encode())
        for array in (*self.inputs, *(self.expected or ())):
            found.update(f"{array.dtype.name}{array.shape}".encode())
            found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()

    @property
    def instructions(self) -> int:
        """Return how many instructions the suspect's program has; see `count_instructions`."""
        return count_instructions(self.modules[0])

    @property
    def length(self) -> str:
        """How many instructions that are, in words."""
        return f"{self.instructions:,} instruction{'' if self.instructions == 1 else 's'}"

    @functools.cached_property
    def size(self) -> tuple[int, int]:
        """Return how many instructions and how many outputs the suspect's program has."""
        root = root_instruction(entry_computation(self.modules[0]))
        return self.instructions, len(root.operand_ids)


def count_instructions(module: XlaMessage) -> int:
    """Count the instructions that compute something, those of loops and branches too.

    Parameters, constants, and what only packs tuples do not count, nor do the small computations
    that a reduction, a sort and their like apply to elements.
    """
    by_id = {one.id: one for one in module.computations}

    def count(computation: XlaMessage) -> int:
        total = 0
        for instruction in computation.instructions:
            total += instruction.opcode not in _NO_WORK
            if instruction.opcode in _STEPS:
                total += sum(count(by_id[called]) for called in instruction.called_computation_ids)
        return total

    return count(entry_computation(module))


def changed(
    base: Candidate,
    view: str,
    change: str,
    *,
    modules: Sequence[XlaMessage] | None = None,
    inputs: Sequence[np.ndarray] | None = None,
    variants: Sequence[Variant] | None = None,
    grain: int = 0,
) -> Candidate:
    """Return a candidate that differs from ``base`` in what is given."""
    return dataclasses.replace(
        base,
        modules=base.modules if modules is None else tuple(modules),
        inputs=base.inputs if inputs is None else tuple(inputs),
        variants=base.variants if variants is None else tuple(variants),
        change=change,
        view=view,
        grain=grain,
    )
