"""List the cases of which a recorder under a user's `jax.jit` leaves no files.

    python tests/breadth/recorded.py [--every N] [--when CONDITION] [TABLE ...]

Each case becomes one jitted function, which is called once. What plain `jax.jit` refuses counts
for nothing. Leaves with status 1 where something that ran was missed, or gave other results.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import breadth_families
import jax
import numpy as np
from breadth_cases import Case

import snaprt
from snaprt import metrics
from snaprt.snapshot.recorder.record import process_recorder


def missed(cases: Sequence[Case], when: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name of each case that is not recorded as it ought to be, and what is wrong."""
    for case in cases:
        called, arrays = _jitted(case)
        try:
            expected = _leaves(called(*arrays))
        except Exception:
            continue
        called, arrays = _jitted(case)
        before = _counted()
        with snaprt.record(when, folder):
            try:
                got = _leaves(called(*arrays))
            except Exception as error:
                yield case.name, f"raises {type(error).__name__}: {str(error)[:200]}"
                continue
        if not _same(expected, got):
            yield case.name, "has other results"
        process_recorder().flush()
        if when == "all" and _counted() == before:
            yield case.name, "left no files"


def _jitted(case: Case) -> tuple[Callable[..., Any], list[Any]]:
    """Return a new jitted function of the arrays that a case is applied to, and those arrays."""
    values = case.values(0)
    places = [place for place, value in enumerate(values) if isinstance(value, jax.Array)]

    def user_function(*arrays: Any) -> Any:
        given = list(values)
        for place, array in zip(places, arrays, strict=True):
            given[place] = array
        return case.call(*given)

    return jax.jit(user_function), [values[place] for place in places]


def _counted() -> float:
    return metrics.counter_value("SnapshotsWritten") or 0


def _leaves(result: Any) -> list[Any]:
    leaves = jax.tree.leaves(result)
    return [jax.random.key_data(leaf) if _is_key(leaf) else leaf for leaf in leaves]


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _same(one: Sequence[Any], two: Sequence[Any]) -> bool:
    return len(one) == len(two) and all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(one, two, strict=True)
    )


def main(arguments: Sequence[str]) -> int:
    """Print what is missed; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", default=breadth_families.TABLES)
    parser.add_argument("--every", type=int, default=1, metavar="N")
    parser.add_argument("--when", default="all", metavar="CONDITION")
    options = parser.parse_args(arguments)
    found = 0
    for table in options.tables:
        cases = list(importlib.import_module(table).cases())[:: options.every]
        with tempfile.TemporaryDirectory() as folder:
            for name, what in missed(cases, options.when, Path(folder)):
                print(f"{table}: {name} {what}", flush=True)
                found += 1
        print(f"{table}: {len(cases)} cases", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
