"""Make simpler what a program is made of: its types, its inputs' values, its compiler options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from snaprt.hlo.literals import ELEMENT_TYPES, array_to_literal, leaf_shapes, literal_to_array
from snaprt.hlo.proto import XlaMessage
from snaprt_replay import floatbits
from snaprt_replay.hlo.hlo_module import copy_of, instructions
from snaprt_replay.load.case import CompilerOption
from snaprt_replay.minify.candidate import Candidate, changed
from snaprt_replay.minify.cutting import Base
from snaprt_replay.run.variants.variants import Variant

_NUMBERS: Final = {row.name: row.number for row in ELEMENT_TYPES.values()}
_TO: Final = {
    **dict.fromkeys(("f16", "bf16", "f64"), "f32"),
    **dict.fromkeys(("s8", "s16", "s64"), "s32"),
    **dict.fromkeys(("u8", "u16", "u64"), "u32"),
    "c128": "c64",
}
_MOST_PARTS: Final = 16


def dtypes(base: Base, grain: int) -> Iterator[Candidate]:
    """Yield the program with one of its types replaced everywhere."""
    if base.candidate.expected is not None:
        return
    used = {
        leaf.element_type
        for module in base.candidate.modules
        for instruction in instructions(module)
        for leaf in leaf_shapes(instruction.shape)
    }
    for name, simpler in _TO.items():
        if _NUMBERS[name] in used:
            modules = [_replaced(one, name, simpler) for one in base.candidate.modules]
            before, now = (ELEMENT_TYPES[_NUMBERS[one]].dtype for one in (name, simpler))
            inputs = [
                one.astype(now) if one.dtype == before else one for one in base.candidate.inputs
            ]
            what = f"{simpler} instead of {name}"
            yield changed(base.candidate, "dtypes", what, modules=modules, inputs=inputs)


def _replaced(module: XlaMessage, name: str, simpler: str) -> XlaMessage:
    copy = copy_of(module)
    before, now = _NUMBERS[name], _NUMBERS[simpler]
    retyped: list[XlaMessage] = []
    for instruction in instructions(copy):
        retyped.append(instruction.shape)
        if instruction.HasField("literal") and instruction.literal.shape.element_type == before:
            array = literal_to_array(instruction.literal)
            instruction.literal.CopyFrom(array_to_literal(array.astype(ELEMENT_TYPES[now].dtype)))
    for signature in (
        *(computation.program_shape for computation in copy.computations),
        copy.host_program_shape,
    ):
        retyped += [*signature.parameters, signature.result]
    for shape in retyped:
        for leaf in leaf_shapes(shape):
            if leaf.element_type == before:
                leaf.element_type = now
    return copy


def values(base: Base, grain: int) -> Iterator[Candidate]:
    """Yield the program with simpler values of one input, or of a part of one.

    Each is simpler than what is there, so that this comes to an end.
    """
    if base.candidate.expected is not None:
        return  # the outputs would not be what they are expected to be
    for index, array in enumerate(base.candidate.inputs):
        for rank, (what, simplify) in enumerate(_SIMPLER):
            if rank >= _rank(array):
                break
            yield _with(base, index, simplify(array), f"input {index} {what}")
    for index, array in enumerate(base.candidate.inputs):
        if _rank(array) > _ALL_ONE:
            yield from _parts_zero(base, index, array)


def _parts_zero(base: Base, index: int, array: np.ndarray) -> Iterator[Candidate]:
    parts = 2
    while parts <= min(_MOST_PARTS, array.size):
        for part in np.array_split(np.arange(array.size), parts):
            simpler = array.copy().reshape(-1)
            if np.any(simpler[part]):
                simpler[part] = 0
                what = f"zeros in {part.size} elements of input {index}"
                yield _with(base, index, simpler.reshape(array.shape), what)
        parts *= 2


def _with(base: Base, index: int, array: np.ndarray, what: str) -> Candidate:
    inputs = list(base.candidate.inputs)
    inputs[index] = array
    return changed(base.candidate, "values", what, inputs=inputs)


def _rounded(digits: int) -> Callable[[np.ndarray], np.ndarray]:
    def simplify(array: np.ndarray) -> np.ndarray:
        if not floatbits.is_float(array.dtype):
            return array
        with np.errstate(all="ignore"):
            wide = array.astype(np.float64)
            size = np.floor(np.log10(np.abs(np.where(wide == 0, 1, wide))))
            unit = 10.0 ** np.maximum(size - digits + 1, -300)
            rounded = np.where(np.isfinite(wide), np.round(wide / unit) * unit, wide)
            return rounded.astype(array.dtype)

    return simplify


def _whole(array: np.ndarray) -> np.ndarray:
    if not floatbits.is_float(array.dtype):
        return array
    with np.errstate(all="ignore"):
        return np.round(array.astype(np.float64)).astype(array.dtype)


# From the simplest on.
_SIMPLER: Final[tuple[tuple[str, Callable[[np.ndarray], np.ndarray]], ...]] = (
    ("all zeros", np.zeros_like),
    ("all ones", np.ones_like),
    ("rounded to integers", _whole),
    ("rounded to one digit", _rounded(1)),
    ("rounded to three digits", _rounded(3)),
)
_ALL_ONE: Final = 1


def _rank(array: np.ndarray) -> int:
    """Return the number of the first row of `_SIMPLER` that changes nothing."""
    for rank, (_, simplify) in enumerate(_SIMPLER):
        if simplify(array).tobytes() == array.tobytes():
            return rank
    return len(_SIMPLER)


def flags(base: Base, grain: int) -> Iterator[Candidate]:
    """Yield the program without one of its options, on one side or the other."""
    variants = base.candidate.variants
    for side, variant in enumerate(variants):
        for less, what in _less(variant):
            now = [less if index == side else one for index, one in enumerate(variants)]
            yield changed(
                base.candidate, "flags", f"side {'AB'[side]} without {what}", variants=now
            )


def _less(variant: Variant) -> Iterator[tuple[Variant, str]]:
    for option in variant.options:
        left = tuple(one for one in variant.options if one != option)
        yield with_text(dataclasses.replace(variant, options=left)), flag_text(*option)
    if variant.matmul_precision is not None:
        what = f"matmul-precision={variant.matmul_precision}"
        yield with_text(dataclasses.replace(variant, matmul_precision=None)), what


def flag_text(name: str, value: CompilerOption) -> str:
    """Return an option as XLA_FLAGS have it."""
    return f"--{name}={str(value).lower() if isinstance(value, bool) else value}"


def with_text(variant: Variant) -> Variant:
    """Return a variant whose text says all that it is, so that a user can write it again."""
    named = {"tpu-precision": f"tpu-precision={variant.precision}"}
    first = named.get(variant.kind, variant.kind)
    if variant.kind == "device":
        first = variant.device or "default"
    parts = [first]
    if variant.options:
        parts.append("xla-flags=" + " ".join(flag_text(*option) for option in variant.options))
    if variant.matmul_precision is not None:
        parts.append(f"matmul-precision={variant.matmul_precision}")
    if variant.python is not None:
        parts.append(f"python={variant.python}")
    return dataclasses.replace(variant, text=",".join(parts))
