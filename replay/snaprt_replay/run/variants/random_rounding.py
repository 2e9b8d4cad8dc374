"""Let a raised program round at random where the program itself rounds; on its HloModuleProto.

This is Monte Carlo arithmetic with random rounding (Parker, 1997; Verificarlo, 2015): each
operation is computed in float64, and a result that the program's own type cannot hold is moved by
up to a few units in that type's last place. Where the results of several such runs differ from the
float64 result, the program's own rounding may put a correct execution too. What the type can hold
exactly stays exact, so masks, counts and whole numbers do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from snaprt.hlo.literals import (
    ELEMENT_TYPES,
    TUPLE,
    array_shape,
    leaf_shapes,
)
from snaprt.hlo.proto import XlaMessage
from snaprt_replay import floatbits
from snaprt_replay.hlo import hlo_module
from snaprt_replay.run.variants.precision import raise_to_f64

_F32, _F64 = np.dtype(np.float32), np.dtype(np.float64)
_U64 = np.dtype(np.uint64)
# An odd number near 2**64 divided by the golden ratio: the high bits of a product with it depend on
# all bits of the other factor (Knuth, The Art of Computer Programming, 6.4).
_MIX = np.uint64(0x9E3779B97F4A7C15)
_ONE_BITS = np.uint64(0x3FF0000000000000)

_ROUNDED: Final = frozenset(
    (
        *("add", "atan2", "cbrt", "convert", "cosine", "divide", "erf", "exponential"),
        *("exponential-minus-one", "log", "log-plus-one", "logistic", "multiply", "power"),
        *("remainder", "rsqrt", "sine", "sqrt", "subtract", "tan", "tanh"),
    )
)
# These add up many products: the error grows with the square root of their number, as a random
# walk does, and an error of each addend is as good as one of the sum so far.
_SUMMED: Final = frozenset(
    (
        *("batch-norm-grad", "batch-norm-inference", "batch-norm-training", "cholesky"),
        *("convolution", "custom-call", "dot", "fft", "reduce", "reduce-window", "scatter"),
        *("select-and-scatter", "triangular-solve"),
    )
)
# LLVM takes exponential time for long chains of them in one kernel, as in a complex square root
# (jaxlib 0.12): chains of 4 take as long as none, chains of 8 do not end.
_MOST_IN_A_ROW: Final = 4
_FOLLOWED: Final = ("call", "conditional", "while")


def round_at_random(module: XlaMessage) -> XlaMessage:
    """Return the raised program with random rounding, and one more parameter.

    The parameter is a uint64 scalar: another value gives other roundings.

    Args:
        module: The HloModuleProto of the program itself; it is not changed.

    Raises:
        UsageError: See `precision.raise_to_f64`.
    """
    rounded = raise_to_f64(module).module
    types = _float_types(module)
    editor = hlo_module.Editor(rounded)
    followed = _followed(rounded)
    for computation in rounded.computations:
        if computation.id in followed:
            is_entry = computation.id == rounded.entry_computation_id
            seed = _add_seed(editor, rounded, computation) if is_entry else None
            _Rounding(editor, computation, types, seed).apply()
    return rounded


def perturb(array: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return floats moved by one unit in the last place, up, down or not at all.

    Whole numbers stay: they are masks, positions and counts, and known exactly.
    """
    if floatbits.is_complex(array.dtype):
        part = np.dtype(f"f{array.itemsize // 2}")
        flat = np.ascontiguousarray(array).reshape(-1).view(part)
        return perturb(flat, random).view(array.dtype).reshape(array.shape)
    if not floatbits.is_float(array.dtype):
        return array
    wide = array.astype(_F64)
    ulp = floatbits.epsilon(array.dtype) * np.abs(wide)
    moved = (wide + ulp * random.integers(-1, 2, array.shape)).astype(array.dtype)
    with np.errstate(invalid="ignore"):
        keep = ~np.isfinite(wide) | (wide == np.rint(wide))
    return np.where(keep, array, moved)


def _float_types(module: XlaMessage) -> Mapping[int, np.dtype]:
    """Return the real float dtype of each instruction that has one, or the parts of a complex."""
    types = {}
    for instruction in hlo_module.instructions(module):
        row = ELEMENT_TYPES.get(instruction.shape.element_type)
        if row is None or row.dtype is None:
            continue
        if floatbits.is_float(row.dtype):
            types[instruction.id] = row.dtype
        elif floatbits.is_complex(row.dtype):
            types[instruction.id] = np.dtype(f"f{row.dtype.itemsize // 2}")
    return types


def _followed(module: XlaMessage) -> set[int]:
    """Return the computations that run as the entry does: not a reduction's own function."""
    by_id = {computation.id: computation for computation in module.computations}
    return hlo_module.reached(
        [module.entry_computation_id],
        lambda computation_id: (
            called
            for instruction in by_id[computation_id].instructions
            if instruction.opcode in _FOLLOWED
            for called in instruction.called_computation_ids
        ),
    )


def _add_seed(editor: hlo_module.Editor, module: XlaMessage, entry: XlaMessage) -> XlaMessage:
    shape = array_shape(_U64, ())
    seed = editor.new("parameter", shape, (), like=entry.instructions[0])
    seed.parameter_number = len(hlo_module.parameters(entry))
    for program in (module.host_program_shape, entry.program_shape):
        program.parameters.add().CopyFrom(shape)
        program.parameter_names.append("seed")
    return seed


class _Rounding:
    """Rewrites one computation."""

    def __init__(
        self,
        editor: hlo_module.Editor,
        computation: XlaMessage,
        types: Mapping[int, np.dtype],
        seed: XlaMessage | None,
    ) -> None:
        self._editor = editor
        self._computation = computation
        self._types = types
        self._seed = seed
        self._by_id = {instruction.id: instruction for instruction in computation.instructions}
        self._steps = hlo_module.Steps(editor, computation.instructions[0])
        self._spread: dict[tuple[bytes, bytes], XlaMessage] = {}
        self._in_a_row: dict[int, int] = {}

    def apply(self) -> None:
        pending = [self._seed] if self._seed is not None else []

        def replace(instruction: XlaMessage) -> Sequence[XlaMessage]:
            self._steps = hlo_module.Steps(self._editor, instruction)
            self._steps.made += pending
            pending.clear()
            self._replace(instruction)
            return self._steps.made

        self._editor.replace_each(self._computation, replace)

    def _replace(self, instruction: XlaMessage) -> None:
        kind = self._types.get(instruction.id)
        summed = instruction.opcode in _SUMMED
        if instruction.opcode == "broadcast" and kind is not None:
            # Else XLA computes the operand anew in the loop over the result, and LLVM takes
            # exponential time to find out that it is the same for a whole vector (jaxlib 0.12).
            (operand,) = self._operands(instruction)
            if operand.opcode not in ("constant", "parameter"):
                instruction.operand_ids[0] = self._steps.add(
                    "opt-barrier", operand.shape, operand
                ).id
        in_a_row = max((self._in_a_row.get(each, 0) for each in instruction.operand_ids), default=0)
        self._in_a_row[instruction.id] = in_a_row
        if kind is None or not (summed or instruction.opcode in _ROUNDED):
            self._steps.made.append(instruction)
            return
        exact = self._steps.add_twin(instruction)
        moved, scale = exact, 1.0
        if summed:
            scale = math.sqrt(max(1.0, _addends(instruction, self._operands(instruction))))
            first, *others = self._operands(instruction)
            if first.shape.element_type != TUPLE and not _is_exact(first):
                noisy = self._each_part(lambda part: self._moved(part, kind, scale), first)
                moved = self._steps.add_twin(instruction, [noisy, *others])
        self._each_part(
            lambda exact, moved: self._rounded_part(exact, moved, kind, scale), exact, moved
        )
        self._in_a_row[instruction.id] = (in_a_row + 1) % _MOST_IN_A_ROW
        if self._in_a_row[instruction.id] == 0:
            self._steps.add("opt-barrier", instruction.shape, self._steps.made[-1])
        self._steps.stand_for(instruction)

    def _operands(self, instruction: XlaMessage) -> list[XlaMessage]:
        return [self._by_id[operand] for operand in instruction.operand_ids]

    def _each_part(self, change: Callable[..., XlaMessage], *values: XlaMessage) -> XlaMessage:
        """Make ``change`` of float64 values, or of the two parts of complex ones."""
        kind = values[0].shape
        if ELEMENT_TYPES[kind.element_type].dtype == _F64:
            return change(*values)
        shape = array_shape(_F64, tuple(kind.dimensions))
        parts = [
            change(*(self._steps.add(part, shape, value) for value in values))
            for part in ("real", "imag")
        ]
        return self._steps.add("complex", kind, *parts)

    def _rounded_part(
        self, exact: XlaMessage, moved: XlaMessage, kind: np.dtype, scale: float
    ) -> XlaMessage:
        """Make ``exact`` where ``kind`` holds it, else ``moved`` moved once more and rounded."""
        result = self._moved(moved, kind, scale)
        if kind != _F64:
            result = self._reduced(result, kind)
        # Nothing here holds more than float64: what fits float32 is taken to be exact.
        fitting = self._reduced(exact, _F32 if kind == _F64 else kind)
        flags = _with_type(exact.shape, np.dtype(np.bool_))
        is_exact = self._steps.add("compare", flags, fitting, exact)
        is_exact.comparison_direction = "EQ"
        return self._steps.add("select", exact.shape, is_exact, exact, result)

    def _reduced(self, value: XlaMessage, kind: np.dtype) -> XlaMessage:
        reduced = self._steps.add("reduce-precision", value.shape, value)
        reduced.exponent_bits = floatbits.exponent_bits(kind)
        reduced.mantissa_bits = floatbits.mantissa_bits(kind)
        return reduced

    def _moved(self, value: XlaMessage, kind: np.dtype, scale: float) -> XlaMessage:
        """Make ``value * (1 + noise)``, the noise up to ``scale`` times that of one operation."""
        add, constant = self._steps.add, self._constant
        bits_shape, shape = _with_type(value.shape, _U64), value.shape
        bits = add("bitcast-convert", bits_shape, value)
        if self._seed is not None:
            bits = add("add", bits_shape, bits, self._everywhere(self._seed, bits_shape))
        mixed = add("multiply", bits_shape, bits, constant(_MIX, bits_shape))
        high = add("shift-right-logical", bits_shape, mixed, constant(np.uint64(12), bits_shape))
        fraction = add("or", bits_shape, high, constant(_ONE_BITS, bits_shape))
        between = add("bitcast-convert", shape, fraction)  # from 1 to 2
        amplitude = 2.0 * floatbits.epsilon(kind) * scale * _ulps(kind)
        noise = add("multiply", shape, between, constant(np.float64(amplitude), shape))
        factor = add("add", shape, noise, constant(np.float64(1.0 - 1.5 * amplitude), shape))
        return add("multiply", shape, value, factor)

    def _constant(self, value: np.generic, shape: XlaMessage) -> XlaMessage:
        key = (value.dtype.name.encode() + value.tobytes(), shape.SerializeToString())
        if key not in self._spread:
            self._spread[key] = self._steps.add_filled(value, shape)
        return self._spread[key]

    def _everywhere(self, scalar: XlaMessage, shape: XlaMessage) -> XlaMessage:
        key = (scalar.name.encode(), shape.SerializeToString())
        if key not in self._spread:
            self._spread[key] = self._steps.add("broadcast", shape, scalar)
        return self._spread[key]


def _ulps(kind: np.dtype) -> float:
    """Return by how many units in the last place a sound operation may miss.

    Elementary functions are approximated to about 4 ULP (the bound that XLA's own tests allow most
    of them in float32). Smaller types are computed in float32, then rounded.
    """
    return 4.0 if kind.itemsize >= 4 else 1.0


def _is_exact(value: XlaMessage) -> bool:
    row = ELEMENT_TYPES.get(value.shape.element_type)
    return row is None or row.dtype is None or row.dtype.kind not in "fc"


def _with_type(shape: XlaMessage, dtype: np.dtype) -> XlaMessage:
    changed = hlo_module.copy_of(shape)
    changed.element_type = array_shape(dtype, ()).element_type
    return changed


def _elements(shape: XlaMessage) -> int:
    return max((math.prod(leaf.dimensions) for leaf in leaf_shapes(shape)), default=0)


def _addends(instruction: XlaMessage, operands: Sequence[XlaMessage]) -> float:
    """Return about how many numbers an element of an operation's result is the sum of."""
    first = operands[0].shape
    if instruction.opcode == "dot":
        contracted = instruction.dot_dimension_numbers.lhs_contracting_dimensions
        return math.prod(first.dimensions[dimension] for dimension in contracted)
    if instruction.opcode in ("convolution", "reduce-window", "select-and-scatter"):
        window = math.prod(dimension.size for dimension in instruction.window.dimensions)
        features = max(operands[-1].shape.dimensions, default=1)
        return window * (features if instruction.opcode == "convolution" else 1)
    if instruction.opcode in ("reduce", "scatter"):
        return _elements(first) / max(1, _elements(instruction.shape))
    return max(first.dimensions, default=1)
