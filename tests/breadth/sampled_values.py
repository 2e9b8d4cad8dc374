"""The values that cases are applied to: what a case calls its arguments says what they are.

The same name, kind and sample give the same values in every process. It must not know snaprt.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

KINDS: dict[str, Any] = {
    "b": np.bool_,
    "s": np.int8,
    "u": np.uint8,
    "i": np.int32,
    "l": np.int64,
    "e": np.float16,
    "h": jnp.bfloat16,
    "f": np.float32,
    "d": np.float64,
    "c": np.complex64,
    "z": np.complex128,
}
"""The letters of the dtypes that cases are sampled at."""


@dataclass(frozen=True)
class Sampled:
    """An array of sampled values.

    Args:
        shape: Its shape.
        kind: The letter of its dtype; empty for the one that the case is sampled at.
        low: The smallest value.
        high: The largest value.
    """

    shape: tuple[int, ...]
    kind: str = ""
    low: float = -2.5
    high: float = 2.5

    def __call__(self, rng: np.random.Generator, kind: str) -> Any:
        return jnp.asarray(_sample(rng, self, self.kind or kind))


def _sample(rng: np.random.Generator, what: Sampled, kind: str) -> np.ndarray:
    dtype = np.dtype(KINDS[kind])
    if kind == "b":
        return rng.random(what.shape) < 0.5
    if kind in "sil":
        return rng.integers(int(what.low), int(what.high), what.shape, dtype, endpoint=True)
    if kind == "u":
        return rng.integers(max(int(what.low), 0), int(what.high) + 4, what.shape, dtype)
    values = rng.uniform(what.low, what.high, what.shape)
    if kind in "cz":
        values = values + 1j * rng.uniform(what.low, what.high, what.shape)
    return np.asarray(values).astype(dtype)


def _positive_definite(rng: np.random.Generator, kind: str) -> jax.Array:
    matrix = _sample(rng, Sampled((4, 4)), kind).astype(KINDS[kind])
    return jnp.asarray((matrix @ matrix.conj().T + 4 * np.eye(4)).astype(KINDS[kind]))


def _lower_triangular(rng: np.random.Generator, kind: str) -> jax.Array:
    return jnp.asarray(np.tril(_sample(rng, Sampled((4, 4), low=0.5), kind)))


def _seed(rng: np.random.Generator) -> int:
    return int(rng.integers(1 << 30))


ARGUMENTS: dict[str, Callable[[np.random.Generator, str], Any]] = {
    # of the kind that the case is sampled at
    "x": Sampled((3, 4)),
    "y": Sampled((3, 4)),
    "row": Sampled((4,)),
    "col": Sampled((3, 1)),
    "vec": Sampled((6,)),
    "other": Sampled((6,)),
    "three": Sampled((3,)),
    "scalar": Sampled(()),
    "cube": Sampled((2, 3, 4)),
    "square": Sampled((4, 4)),
    "tall": Sampled((5, 3)),
    "rhs": Sampled((4, 2)),
    "empty": Sampled((0, 3)),
    "unit": Sampled((3, 4), low=0.05, high=0.95),
    "positive": Sampled((3, 4), low=0.5, high=4.0),
    "above": Sampled((3, 4), low=1.5, high=5.0),
    "rates": Sampled((4,), low=0.5, high=4.0),
    "samples": Sampled((64,), low=-1.0, high=1.0),
    "batch": Sampled((8, 6)),
    "sequence": Sampled((2, 5, 8)),
    "image": Sampled((2, 8, 8, 3), low=0.0, high=1.0),
    "filters": Sampled((3, 3, 3, 4)),
    "heads": Sampled((2, 5, 2, 4)),
    "spd": _positive_definite,
    "lower": _lower_triangular,
    # of a kind of their own
    "mask": Sampled((3, 4), "b"),
    "flag": Sampled((), "b"),
    "index": Sampled((3,), "i", 0, 2),
    "at": Sampled((), "i", 0, 2),
    "counts": Sampled((3, 4), "i", 1, 5),
    "shifts": Sampled((3, 4), "i", 0, 6),
    "labels": Sampled((8,), "i", 0, 3),
    "tokens": Sampled((2, 5), "i", 0, 9),
    "bits": Sampled((3, 4), "u", 0, 250),
    "real": Sampled((3, 4), "f"),
    "key": lambda rng, kind: jax.random.key(_seed(rng)),
    "raw_key": lambda rng, kind: jax.random.PRNGKey(_seed(rng)),
    "keys": lambda rng, kind: jax.random.split(jax.random.key(_seed(rng)), 3),
    # on the host
    "number": lambda rng, kind: float(np.round(rng.uniform(0.25, 2.0), 3)),
    "host": lambda rng, kind: _sample(rng, Sampled((3, 4)), kind),
    "host_scalar": lambda rng, kind: _sample(rng, Sampled(()), kind)[()],
    "tree": lambda rng, kind: {
        "a": jnp.asarray(_sample(rng, Sampled((3, 4)), kind)),
        "b": [jnp.asarray(_sample(rng, Sampled((4,)), kind)), None],
        "c": (jnp.asarray(_sample(rng, Sampled(()), kind)),),
    },
}


def values(names: tuple[str, ...], kind: str, sample: int) -> list[Any]:
    """Return a value for each name: those of one sample are the same every time.

    Args:
        names: Of `ARGUMENTS`.
        kind: The letter of a dtype, see `KINDS`.
        sample: Which values; those of two samples have the same shapes and dtypes.
    """
    found = []
    for name in names:
        seed = [zlib.crc32(name.encode()), sample]
        found.append(ARGUMENTS[name](np.random.default_rng(seed), kind))
    return found
