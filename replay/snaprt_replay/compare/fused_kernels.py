"""Programs that measure a block of two float arrays in one pass.

NumPy needs a pass over the block for each operation. Here XLA compiles all of them, and the
reductions after them, to one vectorized loop, on a CPU client of our own: the process may not have
one, and starting its own may take an accelerator's memory. The programs are written in StableHLO,
because JAX does not trace without starting its devices.

The loop treats subnormal numbers as zero and sums in any order. `BlockErrors.odd` and the size of
the sums mark the rows in which that, NaN or Inf matters: measure those by other means.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import ml_dtypes
import numpy as np

from snaprt import jaxapi

ROW: Final = 1 << 13
"""Number of elements that one result of a kernel covers."""
ROWS: Final = 256
BLOCK: Final = ROW * ROWS
"""Number of elements that a kernel takes."""

# The count of an element whose bits differ but is 0 on both sides; any other that differs counts 1.
_ZERO_SIGN: Final = 1 << 16

# Allow sums in any order, or they would not be vectorized; keep everything else exact.
_OPTIONS: Final = {
    "xla_cpu_enable_fast_math": True,
    "xla_cpu_fast_math_honor_nans": True,
    "xla_cpu_fast_math_honor_infs": True,
    "xla_cpu_fast_math_honor_division": True,
    "xla_cpu_fast_math_honor_functions": True,
}


@dataclasses.dataclass(frozen=True)
class _Kind:
    """A float type: its name in MLIR, the width of the working type, and special bits."""

    name: str  # its name in MLIR
    width: int  # how many bits the working type has
    magnitude: int  # all bits but the sign
    normal: int  # the bits of the smallest number that is normal in the working type
    infinity: int  # the bits of infinity


_KINDS: Final[Mapping[np.dtype, _Kind]] = {
    np.dtype(np.float64): _Kind("f64", 64, (1 << 63) - 1, 1 << 52, 0x7FF << 52),
    np.dtype(np.float32): _Kind("f32", 32, (1 << 31) - 1, 1 << 23, 0xFF << 23),
    np.dtype(np.float16): _Kind("f16", 32, (1 << 15) - 1, 1, 0x1F << 10),
    np.dtype(ml_dtypes.bfloat16): _Kind("bf16", 32, (1 << 15) - 1, 1 << 7, 0xFF << 7),
}


@dataclasses.dataclass(frozen=True)
class BlockErrors:
    """The errors of each row of a block, in arrays of one element per row."""

    absolute: np.ndarray  # the largest absolute error, in the working type
    # The largest error relative to the expected side, in the working type, rounded twice; elements
    # where that side is 0 do not count.
    relative: np.ndarray
    ulp: np.ndarray  # the largest distance in ULP
    differing: np.ndarray  # how many elements have different bits
    zero_sign: np.ndarray  # how many of them are 0 on both sides
    # Whether a number on either side is NaN, infinite or (in the working type) subnormal.
    odd: np.ndarray
    expected_squared: np.ndarray  # sum of squares of the expected side
    difference_squared: np.ndarray  # sum of squares of the differences, actual minus expected
    expected_difference: np.ndarray  # sum of the products of the expected side and the difference
    product: np.ndarray  # sum of the products of both sides
    actual_squared: np.ndarray  # sum of squares of the actual side


class Kernels:
    """The compiled programs for one float type."""

    def __init__(self, dtype: np.dtype, device: jaxapi.Device) -> None:
        self._kind = _KINDS[dtype]
        self._device = device
        self._wide = np.dtype(f"f{self._kind.width // 8}")
        self._measure = self._compile(_MEASURE, _MEASURED)
        self._measure_one = self._compile(_MEASURE_ONE, _MEASURED_ONE, sides=1)
        limits = (*["F"] * 4, "I")
        self._beyond = self._compile(_COUNT_BEYOND, _COUNTED_BEYOND, limits)

    def measure(self, expected: np.ndarray, actual: np.ndarray) -> BlockErrors:
        """Measure `BLOCK` elements of this type."""
        absolute, relative, ulp, counts, largest, smallest, *sums = self._run(
            self._measure, expected, actual
        )
        return BlockErrors(
            absolute.view(self._wide),
            relative.view(self._wide),
            ulp,
            counts & (_ZERO_SIGN - 1),
            counts >> _ZERO_SIGN.bit_length() - 1,
            self._is_odd(largest, smallest),
            *sums,
        )

    def measure_equal(self, values: np.ndarray) -> BlockErrors:
        """Measure `BLOCK` elements of this type that are the same on both sides."""
        largest, smallest, squared = self._run(self._measure_one, values)
        none = np.zeros(ROWS, self._wide)
        odd = self._is_odd(largest, smallest)
        return BlockErrors(none, none, none, none, none, odd, squared, none, none, squared, squared)

    def _is_odd(self, largest: np.ndarray, smallest: np.ndarray) -> np.ndarray:
        return np.asarray((largest >= self._kind.infinity) | (smallest < self._kind.normal - 1))

    def beyond(
        self, expected: np.ndarray, actual: np.ndarray, rtol: float, atol: float, max_ulp: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Count the elements beyond tolerance among `BLOCK` elements.

        Returns:
            For each row, how many surely are, and how many are too close to the limit to tell.
        """
        numbers = (value * (1 + slack) for slack in (-1e-6, 1e-6) for value in (rtol, atol))
        with np.errstate(all="ignore"):
            limits = [np.array(number).astype(self._wide) for number in numbers]
        integer = np.dtype(f"i{self._wide.itemsize}")
        most = np.array(min(max_ulp, np.iinfo(integer).max), integer)
        surely, perhaps = self._run(self._beyond, expected, actual, *limits, most)
        return surely, perhaps

    def _compile(
        self,
        body: str,
        results: Sequence[tuple[str, str, str]],
        limits: Sequence[str] = (),
        sides: int = 2,
    ) -> Any:
        module = jaxapi.parse_module(_module(self._kind, body, results, limits, sides))
        options = jaxapi.compile_options([self._device], _OPTIONS)
        return jaxapi.compile_module(module, [self._device], options)

    def _run(self, executable: Any, *inputs: np.ndarray) -> list[np.ndarray]:
        placed = [jaxapi.put_on(self._device, value) for value in inputs]
        return [np.asarray(shards[0]) for shards in jaxapi.run_module(executable, placed)]


@functools.cache
def kernels_for(dtype: np.dtype) -> Kernels | None:
    """Return the kernels for a float type, compiled on first use; None if it has none."""
    return Kernels(dtype, _cpu()) if dtype in _KINDS else None


@functools.cache
def _cpu() -> jaxapi.Device:
    return jaxapi.own_cpu()


# --- StableHLO ------------------------------------------------------------------------------------
# {F}, {I}, {U}, {N} and {B} are matrices of floats, of signed and unsigned integers as wide as
# these, of int32 and of bool; a result is a matrix, the element's letter, and how rows are reduced.

_CONSTANTS: Final = """
%zero = stablehlo.constant dense<0> : {I}
%ones = stablehlo.constant dense<1> : {I}
%magnitude = stablehlo.constant dense<{magnitude}> : {I}
%shift = stablehlo.constant dense<{shift}> : {I}
%nothing = stablehlo.constant dense<0> : {N}
%one = stablehlo.constant dense<1> : {N}
%zero_sign = stablehlo.constant dense<{zero_sign}> : {N}
"""

_TAKE_WIDE: Final = """
%{side} = stablehlo.reshape %arg{number} : ({flat}) -> {F}
%{side}_bits = stablehlo.bitcast_convert %{side} : ({F}) -> {I}
"""
_TAKE_HALF: Final = """
%{side}_half = stablehlo.reshape %arg{number} : ({flat}) -> {H}
%{side} = stablehlo.convert %{side}_half : ({H}) -> {F}
%{side}_short = stablehlo.bitcast_convert %{side}_half : ({H}) -> {S}
%{side}_bits = stablehlo.convert %{side}_short : ({S}) -> {I}
"""
# The steps are in the numbers' own order. One less than a magnitude is, as unsigned, largest for 0.
_PREPARE: Final = """
%{side}_magnitude = stablehlo.and %{side}_bits, %magnitude : {I}
%{side}_sign = stablehlo.shift_right_arithmetic %{side}_bits, %shift : {I}
%{side}_turned = stablehlo.xor %{side}_magnitude, %{side}_sign : {I}
%{side}_steps = stablehlo.subtract %{side}_turned, %{side}_sign : {I}
%{side}_less = stablehlo.subtract %{side}_magnitude, %ones : {I}
%{side}_smallest = stablehlo.bitcast_convert %{side}_less : ({I}) -> {U}
%{side}_squared = stablehlo.multiply %{side}, %{side} : {F}
"""
_COMPARE: Final = """
%difference = stablehlo.subtract %right, %left : {F}
%distance = stablehlo.abs %difference : {F}
%highest = stablehlo.maximum %left_steps, %right_steps : {I}
%lowest = stablehlo.minimum %left_steps, %right_steps : {I}
%steps = stablehlo.subtract %highest, %lowest : {I}
%ulp = stablehlo.bitcast_convert %steps : ({I}) -> {U}
"""

# The bits of numbers that are not negative are in the numbers' own order, NaN above all; and the
# maximum of integers is vectorized where that of floats is not.
_MEASURE: Final = """
%absolute = stablehlo.bitcast_convert %distance : ({F}) -> {I}
%quotient = stablehlo.divide %difference, %left : {F}
%ratio = stablehlo.abs %quotient : {F}
%ratio_bits = stablehlo.bitcast_convert %ratio : ({F}) -> {I}
%no_size = stablehlo.compare EQ, %left_magnitude, %zero, SIGNED : ({I}, {I}) -> {B}
%relative = stablehlo.select %no_size, %zero, %ratio_bits : {B}, {I}
%unequal = stablehlo.compare NE, %left_bits, %right_bits, SIGNED : ({I}, {I}) -> {B}
%either = stablehlo.or %left_magnitude, %right_magnitude : {I}
%both_zero = stablehlo.compare EQ, %either, %zero, SIGNED : ({I}, {I}) -> {B}
%weight = stablehlo.select %both_zero, %zero_sign, %one : {B}, {N}
%counts = stablehlo.select %unequal, %weight, %nothing : {B}, {N}
%largest = stablehlo.maximum %left_magnitude, %right_magnitude : {I}
%smallest = stablehlo.minimum %left_smallest, %right_smallest : {U}
%difference_squared = stablehlo.multiply %difference, %difference : {F}
%expected_difference = stablehlo.multiply %left, %difference : {F}
%product = stablehlo.multiply %left, %right : {F}
"""
_MEASURED: Final = (
    ("absolute", "I", "maximum"),
    ("relative", "I", "maximum"),
    ("ulp", "U", "maximum"),
    ("counts", "N", "add"),
    ("largest", "I", "maximum"),
    ("smallest", "U", "minimum"),
    ("left_squared", "F", "add"),
    ("difference_squared", "F", "add"),
    ("expected_difference", "F", "add"),
    ("product", "F", "add"),
    ("right_squared", "F", "add"),
)

_MEASURE_ONE: Final = ""
_MEASURED_ONE: Final = (
    ("left_magnitude", "I", "maximum"),
    ("left_smallest", "U", "minimum"),
    ("left_squared", "F", "add"),
)

_COUNT_BEYOND: Final = """
%size = stablehlo.abs %left : {F}
%low_share = stablehlo.multiply %size, %limit0 : {F}
%low = stablehlo.add %low_share, %limit1 : {F}
%high_share = stablehlo.multiply %size, %limit2 : {F}
%high = stablehlo.add %high_share, %limit3 : {F}
%most = stablehlo.bitcast_convert %limit4 : ({I}) -> {U}
%far = stablehlo.compare GT, %ulp, %most, UNSIGNED : ({U}, {U}) -> {B}
%above = stablehlo.compare GT, %distance, %high, FLOAT : ({F}, {F}) -> {B}
%below = stablehlo.compare LT, %distance, %low, FLOAT : ({F}, {F}) -> {B}
%beyond = stablehlo.and %far, %above : {B}
%settled = stablehlo.or %above, %below : {B}
%between = stablehlo.not %settled : {B}
%close = stablehlo.and %far, %between : {B}
%surely = stablehlo.convert %beyond : ({B}) -> {N}
%perhaps = stablehlo.convert %close : ({B}) -> {N}
"""
_COUNTED_BEYOND: Final = (("surely", "N", "add"), ("perhaps", "N", "add"))


def _module(
    kind: _Kind,
    body: str,
    results: Sequence[tuple[str, str, str]],
    limits: Sequence[str],
    sides: int,
) -> str:
    """Return a module that takes flat sides and scalars and reduces the rows of some values."""
    width = kind.width
    elements = {"F": f"f{width}", "I": f"i{width}", "U": f"ui{width}", "N": "i32", "B": "i1"}
    elements |= {"H": kind.name, "S": "i16"}
    types = {letter: f"tensor<{ROWS}x{ROW}x{name}>" for letter, name in elements.items()}
    flat = f"tensor<{BLOCK}x{kind.name}>"
    take = _TAKE_WIDE if kind.name == elements["F"] else _TAKE_HALF
    parts = [_CONSTANTS]
    for number, side in enumerate(("left", "right")[:sides]):
        prepared = (take + _PREPARE).replace("{side}", side)
        parts.append(prepared.replace("{number}", str(number)))
    for number, letter in enumerate(limits):
        parts.append(
            f"%limit{number} = stablehlo.broadcast_in_dim %arg{sides + number}, dims = [] : "
            f"(tensor<{elements[letter]}>) -> {types[letter]}"
        )
    parts += [_COMPARE, body] if sides == 2 else [body]
    text = "\n".join(parts).format(
        **types,
        flat=flat,
        magnitude=kind.magnitude,
        shift=width - 1,
        zero_sign=1 + _ZERO_SIGN,
    )
    argument_types = [flat] * sides + [f"tensor<{elements[letter]}>" for letter in limits]
    arguments = ", ".join(f"%arg{number}: {name}" for number, name in enumerate(argument_types))
    rows = ", ".join(f"tensor<{ROWS}x{elements[letter]}>" for _, letter, _ in results)
    scalars = [f"tensor<{elements[letter]}>" for _, letter, _ in results]
    numbered = list(enumerate(zip(results, scalars, strict=True)))
    starts = [
        f"%start{i} = stablehlo.constant dense<{_start(letter, how, width)}> : {scalar}"
        for i, ((_, letter, how), scalar) in numbered
    ]
    values = [*(f"%{name}" for name, *_ in results), *(f"%start{i}" for i, _ in numbered)]
    block = ", ".join(f"%{a}{i}: {scalar}" for a in "ab" for i, (_, scalar) in numbered)
    reducers = [
        f"%c{i} = stablehlo.{how} %a{i}, %b{i} : {scalar}" for i, ((_, _, how), scalar) in numbered
    ]
    taken_by_reduce = ", ".join([*(types[letter] for _, letter, _ in results), *scalars])
    return "\n".join(
        [
            f"func.func public @main({arguments}) -> ({rows}) {{",
            text,
            *starts,
            f'%r:{len(results)} = "stablehlo.reduce"({", ".join(values)}) '
            "<{dimensions = array<i64: 1>}> ({",
            f"^bb0({block}):",
            *reducers,
            f'"stablehlo.return"({", ".join(f"%c{i}" for i, _ in numbered)}) : '
            f"({', '.join(scalars)}) -> ()",
            f"}}) : ({taken_by_reduce}) -> ({rows})",
            f"return {', '.join(f'%r#{i}' for i, _ in numbered)} : {rows}",
            "}",
        ]
    )


def _start(letter: str, how: str, width: int) -> str:
    """Return the start value for a reduction of elements that are not negative."""
    if how == "minimum":
        return str((1 << width) - 1)
    return "0.0" if letter == "F" else "0"
