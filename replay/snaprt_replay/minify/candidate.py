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
    # arrays. A second module if the reference side runs a different program: both then have the
    # same parameters and outputs.
    modules: tuple[XlaMessage, ...]
    inputs: tuple[np.ndarray, ...]  # one array for each parameter
    # How the suspect and the reference side run it; empty to leave that unchanged.
    variants: tuple[Variant, ...] = ()
    # The expected outputs, if they are known and no reference side runs.
    expected: tuple[np.ndarray, ...] | None = None
    change: str = ""  # how it differs from the previous program, in words
    view: str = ""  # the name of the view that made it
    grain: int = 0  # how much the view removed at a time; the view continues from there

    @functools.cached_property
    def contents(self) -> tuple[bytes, ...]:
        """Return the serialized modules."""
        return tuple(serialize(module) for module in self.modules)

    def content(self, side: int) -> bytes:
        """Return the serialized module of the suspect (0) or the reference (1)."""
        return self.contents[min(side, len(self.contents) - 1)]

    @functools.cached_property
    def key(self) -> str:
        """Return a digest that is the same for candidates that run the same way."""
        digest = hashlib.blake2b(digest_size=16)
        for content in self.contents:
            digest.update(hashlib.blake2b(content).digest())
        for variant in self.variants:
            digest.update(repr(dataclasses.replace(variant, text="")).encode())
        for array in (*self.inputs, *(self.expected or ())):
            digest.update(f"{array.dtype.name}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    @property
    def instructions(self) -> int:
        """Return how many instructions the suspect's program has; see `count_instructions`."""
        return count_instructions(self.modules[0])

    @property
    def length(self) -> str:
        """Return the number of instructions, in words."""
        return f"{self.instructions:,} instruction{'' if self.instructions == 1 else 's'}"

    @functools.cached_property
    def size(self) -> tuple[int, int]:
        """Return how many instructions and how many outputs the suspect's program has."""
        root = root_instruction(entry_computation(self.modules[0]))
        return self.instructions, len(root.operand_ids)


def count_instructions(module: XlaMessage) -> int:
    """Count the instructions that compute something, including those in loops and branches.

    Parameters, constants, and instructions that only pack or unpack tuples do not count. Neither do
    the small computations that reductions, sorts and similar instructions apply to elements.
    """
    by_id = {computation.id: computation for computation in module.computations}

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
    """Return a copy of ``base`` with the given parts replaced."""
    return dataclasses.replace(
        base,
        modules=base.modules if modules is None else tuple(modules),
        inputs=base.inputs if inputs is None else tuple(inputs),
        variants=base.variants if variants is None else tuple(variants),
        change=change,
        view=view,
        grain=grain,
    )
