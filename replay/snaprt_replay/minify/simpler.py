"""The smaller programs that minify tries: with fewer instructions, or with simpler ones.

Recorded values replace what is removed. Sizes go from half of the instructions down to one, as in
delta debugging (A. Zeller and R. Hildebrandt, "Simplifying and Isolating Failure-Inducing
Input", 2002).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from snaprt.hlo.literals import ELEMENT_TYPES, array_to_literal, leaf_shapes, literal_to_array
from snaprt.hlo.proto import XlaMessage
from snaprt.units import counted
from snaprt_replay import floatbits
from snaprt_replay.hlo import hlo_module
from snaprt_replay.hlo.hlo_module import copy_of, entry_computation
from snaprt_replay.hlo.inline import inline_calls
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
        for instruction in hlo_module.instructions(module)
        for leaf in leaf_shapes(instruction.shape)
    }
    for name, simpler in _TO.items():
        if _NUMBERS[name] in used:
            modules = [_replaced(module, name, simpler) for module in base.candidate.modules]
            before, now = (
                ELEMENT_TYPES[_NUMBERS[type_name]].dtype for type_name in (name, simpler)
            )
            inputs = [
                array.astype(now) if array.dtype == before else array
                for array in base.candidate.inputs
            ]
            what = f"{simpler} instead of {name}"
            yield changed(base.candidate, "dtypes", what, modules=modules, inputs=inputs)


def _replaced(module: XlaMessage, name: str, simpler: str) -> XlaMessage:
    copy = copy_of(module)
    before, now = _NUMBERS[name], _NUMBERS[simpler]
    retyped: list[XlaMessage] = []
    for instruction in hlo_module.instructions(copy):
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
    """Yield the program with simpler values for one input, or for a part of one.

    Each array is simpler than the present one, so that the search terminates.
    """
    if base.candidate.expected is not None:
        return  # the expected outputs would no longer apply
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
                what = f"zeros in {counted(part.size, 'element')} of input {index}"
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
        # Of an array without dimensions, NumPy's functions make a scalar, which is no array.
        return np.asarray(np.round(array.astype(np.float64))).astype(array.dtype)


# Simplest first.
_SIMPLER: Final[tuple[tuple[str, Callable[[np.ndarray], np.ndarray]], ...]] = (
    ("all zeros", np.zeros_like),
    ("all ones", np.ones_like),
    ("rounded to integers", _whole),
    ("rounded to one digit", _rounded(1)),
    ("rounded to three digits", _rounded(3)),
)
_ALL_ONE: Final = 1


def _rank(array: np.ndarray) -> int:
    """Return the index of the first row of `_SIMPLER` that changes nothing."""
    for rank, (_, simplify) in enumerate(_SIMPLER):
        if simplify(array).tobytes() == array.tobytes():
            return rank
    return len(_SIMPLER)


def flags(base: Base, grain: int) -> Iterator[Candidate]:
    """Yield the program without one of its options, on either side."""
    variants = base.candidate.variants
    for side, variant in enumerate(variants):
        for less, what in _less(variant):
            now = [less if index == side else unchanged for index, unchanged in enumerate(variants)]
            yield changed(
                base.candidate, "flags", f"side {'AB'[side]} without {what}", variants=now
            )


def _less(variant: Variant) -> Iterator[tuple[Variant, str]]:
    for option in variant.options:
        left = tuple(other for other in variant.options if other != option)
        yield with_text(dataclasses.replace(variant, options=left)), flag_text(*option)
    if variant.matmul_precision is not None:
        what = f"matmul-precision={variant.matmul_precision}"
        yield with_text(dataclasses.replace(variant, matmul_precision=None)), what


def flag_text(name: str, value: CompilerOption) -> str:
    """Return an option as it is written in XLA_FLAGS."""
    return f"--{name}={str(value).lower() if isinstance(value, bool) else value}"


def with_text(variant: Variant) -> Variant:
    """Return a variant whose text describes it completely, so that a user can specify it again."""
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


def halves(size: int) -> Iterator[int]:
    """Yield a size, its half, its quarter, ..., one."""
    while size:
        yield size
        size //= 2


def outputs(base: Base, grain: int) -> Iterator[Candidate]:
    """Yield the program with only one output, then without a half, a quarter, ... of them."""
    results = base.results
    if len(results) < 2:
        return
    names = {result: base.line.by_id[result].name for result in results}
    if not grain:
        for result in results:
            yield from base.cut([result], [], "outputs", f"only the outputs {names[result]}", 1)
    for size in halves(grain or len(results) // 2):
        for start in range(0, len(results), size):
            left = results[:start] + results[start + size :]
            dropped = ", ".join(names[result] for result in results[start : start + size][:3])
            yield from base.cut(left, [], "outputs", f"without the output {dropped}", size)


def prefix(base: Base, grain: int) -> Iterator[Candidate]:
    """Yield the program cut off at its middle, then at three quarters, ...

    The values that are live at the cut are the outputs.
    """
    line = base.line
    for left_out in halves(len(base.computed) // 2):
        last = base.computed[len(base.computed) - left_out - 1]
        results = line.live(line.end_of(last))
        yield from base.cut(results, [], "prefix", f"stopped after {line.by_id[last].name}")


def suffix(base: Base, grain: int) -> Iterator[Candidate]:
    """Yield the program starting from its middle, then from the first quarter, ..."""
    line = base.line
    skipped = halves(len(base.computed) // 2)
    starts = [line.position[base.computed[number]] for number in skipped]
    base.record({instruction for start in starts for instruction in line.live(start)})
    for start in starts:
        what = f"started at {line.order[start].name}"
        yield from base.cut(base.results, line.live(start), "suffix", what)


def loops(base: Base, grain: int) -> Iterator[Candidate]:
    """Yield the program with each loop run once, each conditional replaced by each branch."""
    if base.candidate.expected is not None:
        return  # the expected outputs would no longer apply
    for instruction in base.line.order:
        if instruction.opcode == "while":
            yield from _called_once(
                base, instruction.name, 0, f"only one iteration of {instruction.name}"
            )
        if instruction.opcode == "conditional":
            for branch in range(len(instruction.called_computation_ids)):
                what = f"only branch {branch} of {instruction.name}"
                yield from _called_once(base, instruction.name, branch, what)


def _called_once(base: Base, name: str, number: int, what: str) -> Iterator[Candidate]:
    modules = []
    for module in base.candidate.modules:
        copy = copy_of(module)
        matching = [
            instruction
            for instruction in entry_computation(copy).instructions
            if instruction.name == name
        ]
        if not matching:
            return
        _call(matching[0], number)
        inline_calls(copy)
        modules.append(copy)
    yield changed(base.candidate, "loops", what, modules=modules)


def _call(instruction: XlaMessage, number: int) -> None:
    called = instruction.called_computation_ids[number]
    if instruction.opcode == "conditional":
        instruction.operand_ids[:] = [instruction.operand_ids[number + 1]]
    instruction.opcode = "call"
    instruction.called_computation_ids[:] = [called]
    instruction.ClearField("backend_config")


def instructions(base: Base, grain: int) -> Iterator[Candidate]:
    """Yield the program without half of its instructions, a quarter, ..., one.

    The remaining instructions read the recorded values of the removed ones. A removed instruction
    is no longer an output. Finally, each last instruction is replaced as an output by its operands.
    """
    computed, by_id = base.computed, base.line.by_id
    most = len(computed) // 2
    for size in halves(min(grain or most, most)):
        for start in range(0, len(computed), size):
            removed = computed[start : start + size]
            results = [result for result in base.results if result not in removed]
            more = f" and {len(removed) - 1} more" if len(removed) > 1 else ""
            what = f"with the recorded value of {by_id[computed[start]].name}{more}"
            yield from base.cut(results, removed, "instructions", what, size)
    sources = ("parameter", "constant")
    for last in base.results:
        if by_id[last].opcode not in sources:
            read = [
                operand
                for operand in by_id[last].operand_ids
                if by_id[operand].opcode not in sources
            ]
            left = dict.fromkeys([*(result for result in base.results if result != last), *read])
            what = f"without the last instruction {by_id[last].name}"
            yield from base.cut(left, [], "instructions", what)
