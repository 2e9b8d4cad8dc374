"""A value that is no array, and that JAX makes of two arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax._src.hijax import HiType, register_hitype


@dataclass(frozen=True)
class Pair:
    first: Any
    second: Any


class PairType(Pair, HiType):
    def lo_ty(self) -> list[Any]:
        return [self.first, self.second]

    def lower_val(self, pair: Pair) -> list[Any]:
        return [pair.first, pair.second]

    def raise_val(self, *values: Any) -> Pair:
        return Pair(*values)


register_hitype(Pair, lambda pair: PairType(jax.typeof(pair.first), jax.typeof(pair.second)))
