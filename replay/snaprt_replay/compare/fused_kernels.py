"""Programs that compare a block of two float arrays in one pass; it must not know what for.

NumPy needs a pass over the block for each operation. Here XLA compiles all of them, and the
reductions behind them, to one vectorized loop, on a CPU client of our own: that of the process may
not exist, or starting it may take an accelerator's memory. The programs are written in StableHLO,
since JAX does not trace without starting its devices.

The loop treats subnormal numbers as zero, and sums in any order. Rows in which that, NaN or Inf
matters are told by `BlockErrors.odd` and by the size of the sums: measure those by other means.
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
"""Elements that one result of a kernel covers."""
ROWS: Final = 256
BLOCK: Final = ROW * ROWS
"""Elements that a kernel takes."""

# How an element counts that has other bits, and is 0 on both sides, beside one that only differs.
_ZERO_SIGN: Final = 1 << 16

# A sum may be taken in any order, or it would not be vectorized; nothing else is made inexact.
_OPTIONS: Final = {
    "xla_cpu_enable_fast_math": True,
    "xla_cpu_fast_math_honor_nans": True,
    "xla_cpu_fast_math_honor_infs": True,
    "xla_cpu_fast_math_honor_division": True,
    "xla_cpu_fast_math_honor_functions": True,
}


@dataclasses.dataclass(frozen=True)
class _Kind:
    """A float type: its name in MLIR, the types to calculate in, and its bits."""

    name: str
    wide: str
    integer: str
    magnitude: int
    # The bits of the smallest number that is normal in the wide type, and of infinity.
    normal: int
    infinity: int


_KINDS: Final[Mapping[np.dtype, _Kind]] = {
    np.dtype(np.float64): _Kind("f64", "f64", "i64", (1 << 63) - 1, 1 << 52, 0x7FF << 52),
    np.dtype(np.float32): _Kind("f32", "f32", "i32", (1 << 31) - 1, 1 << 23, 0xFF << 23),
    np.dtype(np.float16): _Kind("f16", "f32", "i32", (1 << 15) - 1, 1, 0x1F << 10),
    np.dtype(ml_dtypes.bfloat16): _Kind("bf16", "f32", "i32", (1 << 15) - 1, 1 << 7, 0xFF << 7),
}


@dataclasses.dataclass(frozen=True)
class BlockErrors:
    """What is known of each row of a block, in arrays of one element a row.

    Args:
        absolute: The largest absolute error, in the working type.
        relative: The largest error relative to the expected side, in the working type, rounded
            once; elements where that side is 0 do not count.
        ulp: The largest distance in ULP.
        differing: Elements with other bits.
        zero_signs: Those of them that are 0 on both sides.
        odd: Whether a number, of either side, is NaN, infinite or (in the working type) subnormal.
        expected_squared: Sum of squares of the expected side.
        difference_squared: Of the differences, actual less expected.
        expected_difference: Sum of the products of the expected side and the difference.
        product: Sum of the products of both sides.
        actual_squared: Sum of squares of the actual side.
    """

    absolute: np.ndarray
    relative: np.ndarray
    ulp: np.ndarray
    differing: np.ndarray
    zero_signs: np.ndarray
    odd: np.ndarray
    expected_squared: np.ndarray
    difference_squared: np.ndarray
    expected_difference: np.ndarray
    product: np.ndarray
    actual_squared: np.ndarray


class Kernels:
    """The programs for one float type, compiled."""

    def __init__(self, dtype: np.dtype, device: jaxapi.Device) -> None:
        self._kind = _KINDS[dtype]
        self._device = device
        self._wide = np.dtype(self._kind.wide.replace("f", "float"))
        self._integer = np.dtype(self._kind.integer.replace("i", "int"))
        self._measure = self._compile(_measuring(self._kind))
        self._measure_one = self._compile(_measuring_one(self._kind))
        self._beyond = self._compile(_counting_beyond(self._kind))

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
        none = np.zeros(ROWS, np.int32)
        nothing = none.astype(self._wide)
        odd = self._is_odd(largest, smallest)
        return BlockErrors(
            *(nothing, nothing, none, none, none, odd),
            *(squared, nothing, nothing, squared, squared),
        )

    def _is_odd(self, largest: np.ndarray, smallest: np.ndarray) -> np.ndarray:
        return np.asarray((largest >= self._kind.infinity) | (smallest < self._kind.normal - 1))

    def beyond(
        self, expected: np.ndarray, actual: np.ndarray, rtol: float, atol: float, max_ulp: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Count what is beyond tolerance, in `BLOCK` elements.

        Returns:
            For each row the elements that surely are, and those too close to the limit to tell.
        """
        numbers = (value * (1 + slack) for slack in (-1e-6, 1e-6) for value in (rtol, atol))
        with np.errstate(all="ignore"):
            limits = [np.array(number).astype(self._wide) for number in numbers]
        most = np.array(min(max_ulp, np.iinfo(self._integer).max), self._integer)
        surely, perhaps = self._run(self._beyond, expected, actual, *limits, most)
        return surely, perhaps

    def _compile(self, text: str) -> Any:
        module = jaxapi.parse_module(text)
        options = jaxapi.compile_options([self._device], _OPTIONS)
        return jaxapi.compile_module(module, [self._device], options)

    def _run(self, executable: Any, *inputs: np.ndarray) -> list[np.ndarray]:
        there = [jaxapi.put_on(self._device, value) for value in inputs]
        return [np.asarray(shards[0]) for shards in jaxapi.run_module(executable, there)]


def kernels_for(dtype: np.dtype) -> Kernels | None:
    """Return the kernels for a float type, compiled at the first call; None where it has none."""
    return _compiled(dtype) if dtype in _KINDS else None


@functools.cache
def _compiled(dtype: np.dtype) -> Kernels:
    return Kernels(dtype, _cpu())


@functools.cache
def _cpu() -> jaxapi.Device:
    return jaxapi.own_cpu()


# --- StableHLO ------------------------------------------------------------------------------------


class _Text:
    """A function in the making; every value but the arguments is a matrix, a row a row of it."""

    def __init__(self, kind: _Kind) -> None:
        self.kind = kind
        self.lines: list[str] = []

    def shaped(self, element: str) -> str:
        return f"tensor<{ROWS}x{ROW}x{element}>"

    def add(self, name: str, operands: str, kinds: str, result: str, attributes: str = "") -> str:
        """Add an operation on matrices; ``kinds`` names the operands' elements."""
        value = f"%v{len(self.lines)}"
        types = ", ".join(self.shaped(kind) for kind in kinds.split())
        line = f'{value} = "stablehlo.{name}"({operands}) {attributes} : ({types}) -> '
        self.lines.append(line + self.shaped(result))
        return value

    def integers(self, name: str, *operands: str) -> str:
        kind = self.kind.integer
        return self.add(name, ", ".join(operands), f"{kind} " * len(operands), kind)

    def floats(self, name: str, *operands: str) -> str:
        kind = self.kind.wide
        return self.add(name, ", ".join(operands), f"{kind} " * len(operands), kind)

    def compare(self, how: str, left: str, right: str, element: str, sort: str) -> str:
        signs = f"#stablehlo<comparison_type {sort}>"
        attributes = (
            f"{{comparison_direction = #stablehlo<comparison_direction {how}>, "
            f"compare_type = {signs}}}"
        )
        return self.add("compare", f"{left}, {right}", f"{element} {element}", "i1", attributes)

    def constant(self, number: int, element: str | None = None) -> str:
        kind = element or self.kind.integer
        attributes = f"{{value = dense<{number}> : {self.shaped(kind)}}}"
        return self.add("constant", "", "", kind, attributes)

    def spread(self, argument: str, element: str) -> str:
        value = f"%v{len(self.lines)}"
        self.lines.append(
            f'{value} = "stablehlo.broadcast_in_dim"({argument}) '
            f"{{broadcast_dimensions = array<i64>}} : (tensor<{element}>) -> "
            f"{self.shaped(element)}"
        )
        return value

    def side(self, argument: str) -> tuple[str, str]:
        """Return an argument in the working type, and its bits as integers, sign extended."""
        kind, value = self.kind, f"%v{len(self.lines)}"
        flat = f"tensor<{BLOCK}x{kind.name}>"
        self.lines.append(
            f'{value} = "stablehlo.reshape"({argument}) : ({flat}) -> {self.shaped(kind.name)}'
        )
        if kind.name == kind.wide:
            return value, self.add("bitcast_convert", value, kind.name, kind.integer)
        bits = self.add("bitcast_convert", value, kind.name, "i16")
        return (
            self.add("convert", value, kind.name, kind.wide),
            self.add("convert", bits, "i16", kind.integer),
        )

    def distance(self, left: str, right: str) -> str:
        """Return the distance in ULP of two numbers' bits; as unsigned, it fits."""
        steps = []
        for bits in (left, right):
            sign = self.integers(
                "shift_right_arithmetic", bits, self.constant(int(self.kind.integer[1:]) - 1)
            )
            magnitude = self.integers("and", bits, self.constant(self.kind.magnitude))
            steps.append(self.integers("subtract", self.integers("xor", magnitude, sign), sign))
        return self.integers(
            "subtract", self.integers("maximum", *steps), self.integers("minimum", *steps)
        )

    def as_unsigned(self, value: str) -> str:
        return self.add("bitcast_convert", value, self.kind.integer, f"u{self.kind.integer}")

    def unsigned_less_one(self, value: str) -> str:
        """Return an integer less one, as unsigned: zeros are larger than all then."""
        return self.as_unsigned(self.integers("subtract", value, self.constant(1)))

    def count(self, condition: str) -> str:
        return self.add("convert", condition, "i1", "i32")

    def function(
        self, arguments: Sequence[str], results: Sequence[tuple[str, str, str]], sides: int = 2
    ) -> str:
        """Return a module that reduces each row of some values.

        Args:
            arguments: Types of what follows the sides.
            results: Of each value its name, its element type, and how to reduce it.
            sides: How many sides it takes.
        """
        side = f"tensor<{BLOCK}x{self.kind.name}>"
        types = [side] * sides + [f"tensor<{kind}>" for kind in arguments]
        scalars = [f"tensor<{kind}>" for _, kind, _ in results]
        rows = [f"tensor<{ROWS}x{kind}>" for _, kind, _ in results]
        starts = [
            f"%z{index} = stablehlo.constant dense<{_start(kind, how)}> : {scalar}"
            for index, ((_, kind, how), scalar) in enumerate(zip(results, scalars, strict=True))
        ]
        count = len(results)
        block = ", ".join(
            f"%{letter}{index}: {scalar}" for letter in "ab" for index, scalar in enumerate(scalars)
        )
        body = [
            f"%c{index} = stablehlo.{how} %a{index}, %b{index} : {scalar}"
            for index, ((_, _, how), scalar) in enumerate(zip(results, scalars, strict=True))
        ]
        values = ", ".join(
            [*(value for value, _, _ in results), *(f"%z{index}" for index in range(count))]
        )
        taken = ", ".join([*(self.shaped(kind) for _, kind, _ in results), *scalars])
        reduced = ", ".join(f"%r#{index}" for index in range(count))
        last = ", ".join(f"%c{index}" for index in range(count))
        parameters = ", ".join(f"%arg{index}: {kind}" for index, kind in enumerate(types))
        lines = [
            f"func.func public @main({parameters}) -> ({', '.join(rows)}) {{",
            *self.lines,
            *starts,
            f'%r:{count} = "stablehlo.reduce"({values}) <{{dimensions = array<i64: 1>}}> ({{',
            f"^bb0({block}):",
            *body,
            f'"stablehlo.return"({last}) : ({", ".join(scalars)}) -> ()',
            f"}}) : ({taken}) -> ({', '.join(rows)})",
            f"return {reduced} : {', '.join(rows)}",
            "}",
        ]
        return "\n".join(lines)


def _start(kind: str, how: str) -> str:
    """Return the number with which reducing elements that are not negative starts."""
    if how == "minimum":
        return str((1 << int(kind[2:])) - 1)  # of an unsigned type
    return "0.0" if kind[0] == "f" else "0"


def _measuring(kind: _Kind) -> str:
    text = _Text(kind)
    integer, unsigned, wide = kind.integer, f"u{kind.integer}", kind.wide
    left, left_bits = text.side("%arg0")
    right, right_bits = text.side("%arg1")
    zero = text.constant(0)
    difference = text.floats("subtract", right, left)
    # The bits of numbers that are not negative are in the numbers' own order, NaN above all; and
    # the maximum of integers is vectorized where that of floats is not.
    absolute = text.add("bitcast_convert", text.floats("abs", difference), wide, integer)
    ratio = text.floats("abs", text.floats("divide", difference, left))
    magnitudes = [
        text.integers("and", bits, text.constant(kind.magnitude))
        for bits in (left_bits, right_bits)
    ]
    no_size = text.compare("EQ", magnitudes[0], zero, integer, "SIGNED")
    relative = text.add(
        "select",
        f"{no_size}, {zero}, {text.add('bitcast_convert', ratio, wide, integer)}",
        f"i1 {integer} {integer}",
        integer,
    )
    unequal = text.compare("NE", left_bits, right_bits, integer, "SIGNED")
    both_zero = text.compare("EQ", text.integers("or", *magnitudes), zero, integer, "SIGNED")
    one, zero_sign = (text.constant(number, "i32") for number in (1, 1 + _ZERO_SIGN))
    weight = text.add("select", f"{both_zero}, {zero_sign}, {one}", "i1 i32 i32", "i32")
    nothing = text.constant(0, "i32")
    counts = text.add("select", f"{unequal}, {weight}, {nothing}", "i1 i32 i32", "i32")
    less = [text.unsigned_less_one(bits) for bits in magnitudes]
    smallest = text.add("minimum", ", ".join(less), f"{unsigned} {unsigned}", unsigned)
    products = (
        (left, left),
        (difference, difference),
        (left, difference),
        (left, right),
        (right, right),
    )
    sums = [(text.floats("multiply", one, other), wide, "add") for one, other in products]
    return text.function(
        [],
        [
            (absolute, integer, "maximum"),
            (relative, integer, "maximum"),
            (text.as_unsigned(text.distance(left_bits, right_bits)), unsigned, "maximum"),
            (counts, "i32", "add"),
            (text.integers("maximum", *magnitudes), integer, "maximum"),
            (smallest, unsigned, "minimum"),
            *sums,
        ],
    )


def _measuring_one(kind: _Kind) -> str:
    text = _Text(kind)
    values, bits = text.side("%arg0")
    magnitude = text.integers("and", bits, text.constant(kind.magnitude))
    results = [
        (magnitude, kind.integer, "maximum"),
        (text.unsigned_less_one(magnitude), f"u{kind.integer}", "minimum"),
        (text.floats("multiply", values, values), kind.wide, "add"),
    ]
    return text.function([], results, sides=1)


def _counting_beyond(kind: _Kind) -> str:
    text = _Text(kind)
    unsigned, wide = f"u{kind.integer}", kind.wide
    left, left_bits = text.side("%arg0")
    right, right_bits = text.side("%arg1")
    size, distance = (
        text.floats("abs", left),
        text.floats("abs", text.floats("subtract", right, left)),
    )
    low, high = (
        text.floats(
            "add",
            text.floats("multiply", size, text.spread(f"%arg{first}", wide)),
            text.spread(f"%arg{first + 1}", wide),
        )
        for first in (2, 4)
    )
    ulps = text.as_unsigned(text.distance(left_bits, right_bits))
    most = text.as_unsigned(text.spread("%arg6", kind.integer))
    far = text.compare("GT", ulps, most, unsigned, "UNSIGNED")
    above = text.compare("GT", distance, high, wide, "FLOAT")
    below = text.compare("LT", distance, low, wide, "FLOAT")
    surely = text.add("and", f"{far}, {above}", "i1 i1", "i1")
    settled = text.add("or", f"{above}, {below}", "i1 i1", "i1")
    between = text.add("not", settled, "i1", "i1")
    perhaps = text.add("and", f"{far}, {between}", "i1 i1", "i1")
    counts = [(text.count(condition), "i32", "add") for condition in (surely, perhaps)]
    return text.function([wide, wide, wide, wide, kind.integer], counts)
