"""How far apart two results may be before they are a mismatch.

An element passes if ``|actual - expected| <= atol + rtol * |expected|``, or if the two are at most
``max_ulp`` representable numbers apart. The defaults fit two *correct* executions of one program on
different devices or under different flags; docs/explanation/comparison.md gives the table and its
reasons.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np

from snaprt.errors import UsageError
from snaprt_replay import floatbits


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How much an output may differ.

    Args:
        rtol: Relative to the expected element.
        atol: Absolute, in the output's own unit.
        max_ulp: Distance in representable numbers of the output's dtype.
        origin: Where these values come from, for the reader.

    Examples:
        >>> from snaprt import replay
        >>> loss = replay.NamedArray("loss", np.float32([1.0, 2.0]))
        >>> replay.compare([loss], [loss]).outputs[0].tolerance.max_ulp
        4
    """

    rtol: float
    atol: float
    max_ulp: int
    origin: str = ""

    def __str__(self) -> str:
        return f"rtol {self.rtol:.2g}, atol {self.atol:.2g}, {self.max_ulp} ulp"


# Devices differ in whether they flush float32 numbers below the smallest normal one to zero.
_FLUSHED_BELOW = floatbits.smallest_normal(np.dtype(np.float32))

EXACT = Tolerance(0.0, 0.0, 0, "exact type")


@dataclasses.dataclass(frozen=True)
class ToleranceRequest:
    """The tolerance that the user requests; None means "not set".

    If at least one of the three is set, those that are not set are zero: ``--max-ulp 4`` alone
    means 4 ULP and nothing else.

    Examples:
        >>> from snaprt import replay
        >>> strict = replay.ToleranceRequest(max_ulp=0)
        >>> replay.replay("step.inputs.snap", tolerance=strict).mismatch
        False
    """

    rtol: float | None = None
    atol: float | None = None
    max_ulp: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not value >= 0:
                raise UsageError(
                    f"{field.name} must be a number of at least 0, not {value}",
                    hint="0 requires equality",
                )

    @property
    def is_default(self) -> bool:
        """Return whether nothing was requested."""
        return self.rtol is None and self.atol is None and self.max_ulp is None


EXACTLY: Final = ToleranceRequest(rtol=0.0, atol=0.0, max_ulp=0)
"""No tolerance: outputs are equal bit for bit, or they differ."""


@dataclasses.dataclass(frozen=True)
class DefaultTolerance:
    """One row of the table of defaults."""

    largest_epsilon: float  # the row applies to dtypes whose machine epsilon is at most this
    types: str  # those dtypes, for the reader
    epsilons: float  # rtol, and atol over the output's root mean square, in machine epsilons
    max_ulp: int  # as in `Tolerance`
    reason: str  # why these values


DEFAULTS = (
    DefaultTolerance(
        2.0**-23,
        "float64, float32, complex128, complex64",
        128,
        4,
        "the expected rounding error of a sum of 128 * 128 terms added in a different order",
    ),
    DefaultTolerance(
        2.0**-7,
        "float16, bfloat16",
        4,
        2,
        "sums use float32, so a result is rounded only a few times",
    ),
    DefaultTolerance(
        1.0,
        "float8, float6 and float4 kinds",
        1,
        1,
        "the adjacent value: one step of these types is already large",
    ),
)


def default_for(dtype: np.dtype) -> DefaultTolerance:
    """Return the row of `DEFAULTS` that applies to a float dtype."""
    epsilon = floatbits.epsilon(dtype)
    return next(row for row in DEFAULTS if epsilon <= row.largest_epsilon)


def resolve(request: ToleranceRequest, dtype: np.dtype, rms: float) -> Tolerance:
    """Return the tolerance for one output.

    Args:
        request: The tolerance that the user requests.
        dtype: A real float dtype.
        rms: The root mean square of the expected output's finite elements. The default atol is a
            multiple of it: where terms cancel, an element is small but its error is as large as
            its neighbors', and an output whose values are all around 1e-9 needs another atol than
            one around 1.
    """
    if not request.is_default:
        return Tolerance(
            request.rtol or 0.0, request.atol or 0.0, request.max_ulp or 0, "asked for"
        )
    row = default_for(dtype)
    rtol = row.epsilons * floatbits.epsilon(dtype)
    atol = max(rtol * rms, min(floatbits.smallest_normal(dtype), _FLUSHED_BELOW))
    return Tolerance(rtol, atol, row.max_ulp, f"default for {dtype.name}, atol is rtol x rms")
