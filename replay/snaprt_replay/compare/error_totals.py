"""What is known of how two float arrays differ, added up over their chunks; it measures nothing."""

from __future__ import annotations

import dataclasses
import math
import operator

import numpy as np

from snaprt_replay.compare.results import SpecialCounts
from snaprt_replay.compare.tolerance import EXACT, Tolerance

# ULP distances are counted in buckets: a distance as float32, cut to 8 significant bits. Up to 256
# that is exact, above it at most 0.8 % low, and any uint64 fits.
_BUCKET_OFFSET = 126 << 7
_BUCKETS = (65 << 7) + 1


@dataclasses.dataclass
class Worst:
    """The largest value seen and its flat index; the first one wins."""

    value: float | int = 0
    index: int = -1

    def offer(self, values: np.ndarray, positions: np.ndarray | None, start: int) -> None:
        """Take the largest of ``values`` if it beats what was seen."""
        if values.size:
            self.offer_at(values, int(values.argmax()), positions, start)

    def offer_at(
        self, values: np.ndarray, where: int, positions: np.ndarray | None, start: int
    ) -> None:
        """Take the element of ``values`` at ``where`` if it beats what was seen."""
        value = values[where].item()
        if value > self.value:
            self.value = value
            self.index = start + (where if positions is None else int(positions[where]))

    def merge(self, later: Worst) -> None:
        """Take over what was seen further on in the array, if it is larger."""
        if later.value > self.value:
            self.value, self.index = later.value, later.index


@dataclasses.dataclass(frozen=True)
class OpenChunk:
    """A chunk of which it is open whether anything in it is beyond tolerance.

    Args:
        start: Its first flat index.
        stop: The one behind its last.
        worst_abs: The largest absolute error among its pairs of finite numbers.
        worst_ulp: The largest distance in ULP among them.
    """

    start: int
    stop: int
    worst_abs: float
    worst_ulp: int

    def is_within(self, tolerance: Tolerance) -> bool:
        """Return whether the worst errors alone show that nothing is beyond."""
        return self.worst_abs < tolerance.atol * (1 - 1e-6) or self.worst_ulp <= tolerance.max_ulp


@dataclasses.dataclass(frozen=True, eq=False)
class OpenBlock:
    """A block of which it is open whether anything in it is beyond tolerance.

    Args:
        start: Its first flat index.
        rows: The rows to look at.
        absolute: The largest absolute error of each row.
        ulp: The largest distance in ULP of each row.
    """

    start: int
    rows: np.ndarray
    absolute: np.ndarray
    ulp: np.ndarray

    def open_rows(self, tolerance: Tolerance) -> np.ndarray:
        """Return the indices of the rows whose worst errors leave it open."""
        within = self.absolute < tolerance.atol * (1 - 1e-6)
        within |= self.ulp <= tolerance.max_ulp
        return np.flatnonzero(self.rows & ~within)


@dataclasses.dataclass
class FloatErrors:
    """What was found; indices are flat, and the sums run over pairs of finite numbers."""

    tolerance: Tolerance = EXACT
    differing: int = 0
    beyond: int = 0
    first_difference: int = -1
    first_beyond: int = -1
    worst_abs: Worst = dataclasses.field(default_factory=Worst)
    worst_rel: Worst = dataclasses.field(default_factory=Worst)
    worst_ulp: Worst = dataclasses.field(default_factory=Worst)
    specials: SpecialCounts = dataclasses.field(default_factory=SpecialCounts)
    buckets: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(_BUCKETS, np.int64))
    expected_squared: float = 0.0
    actual_squared: float = 0.0
    product: float = 0.0
    #: Over every finite number of the expected side.
    expected_all_squared: float = 0.0
    finite_expected: int = 0
    open_chunks: list[OpenChunk] = dataclasses.field(default_factory=list)
    open_blocks: list[OpenBlock] = dataclasses.field(default_factory=list)

    def merge(self, later: FloatErrors) -> None:
        """Add what was found further on in the array."""
        for name in _ADDED:
            setattr(self, name, getattr(self, name) + getattr(later, name))
        if self.first_difference < 0:
            self.first_difference = later.first_difference
        self.note_beyond(later.beyond, later.first_beyond)
        self.worst_abs.merge(later.worst_abs)
        self.worst_rel.merge(later.worst_rel)
        self.worst_ulp.merge(later.worst_ulp)
        self.specials = add_specials(self.specials, later.specials)

    def note_beyond(self, count: int, first: int) -> None:
        """Add elements beyond tolerance, the first of them at flat index ``first``."""
        self.beyond += count
        if first >= 0 and (self.first_beyond < 0 or first < self.first_beyond):
            self.first_beyond = first

    def count_ulps(self, ulps: np.ndarray, weight: int = 1) -> None:
        """Add distances in ULP, each as often as ``weight`` says."""
        buckets = (ulps.astype(np.float32).view(np.uint32) >> 16).astype(np.intp)
        np.maximum(buckets, _BUCKET_OFFSET, out=buckets)
        buckets -= _BUCKET_OFFSET
        self.buckets += np.bincount(buckets, minlength=_BUCKETS) * weight

    @property
    def rms(self) -> float:
        """Return the root mean square of the expected side's finite elements."""
        if not self.finite_expected:
            return 0.0
        return math.sqrt(self.expected_all_squared / self.finite_expected)

    @property
    def cosine(self) -> float | None:
        """Return the cosine similarity; None where a side is all zero."""
        norms = math.sqrt(self.expected_squared) * math.sqrt(max(0.0, self.actual_squared))
        if not norms or not math.isfinite(norms):
            return None
        return max(-1.0, min(1.0, self.product / norms))

    def percentile_ulp(self, share: float) -> int:
        """Return the distance that ``share`` (0 to 1) of the finite pairs do not exceed."""
        cumulated = np.cumsum(self.buckets)
        if not cumulated[-1]:
            return 0
        bucket = int(np.searchsorted(cumulated, math.ceil(share * int(cumulated[-1]))))
        bits = np.uint32((bucket + _BUCKET_OFFSET) << 16) if bucket else np.uint32(0)
        return int(np.asarray(bits).view(np.float32))

    def ulp_octaves(self) -> tuple[int, ...]:
        """Return the number of finite pairs 0, 1, 2-3, 4-7, ... ULP apart."""
        octaves = [int(self.buckets[0])]
        octaves += [int(octave.sum()) for octave in self.buckets[128:-1].reshape(-1, 128)]
        octaves[-1] += int(self.buckets[-1])
        while octaves and not octaves[-1]:
            octaves.pop()
        return tuple(octaves)


_ADDED = (
    *("differing", "buckets", "expected_squared", "actual_squared", "product"),
    *("expected_all_squared", "finite_expected", "open_chunks", "open_blocks"),
)


_counts = operator.attrgetter(*(field.name for field in dataclasses.fields(SpecialCounts)))


def add_specials(left: SpecialCounts, right: SpecialCounts) -> SpecialCounts:
    """Add two counts field by field."""
    return SpecialCounts(*map(operator.add, _counts(left), _counts(right)))
