"""Whether what was found earlier is still there: many objects compared at once, by identity."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any


def values_of(dictionaries: Iterable[dict[Any, Any]]) -> Iterator[Any]:
    """Yield the values of dictionaries, one after the other."""
    return itertools.chain.from_iterable(map(dict.values, dictionaries))


def are_the_same(now: Sequence[Any], then: Sequence[Any]) -> bool:
    """Return whether these are the same objects."""
    return len(now) == len(then) and all(map(operator.is_, now, then))
