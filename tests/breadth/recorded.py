"""List the cases of which a recorder under a user's `jax.jit` leaves no files.

    python tests/breadth/recorded.py [--every N] [--when CONDITION]... [TABLE ...]

Each case becomes one jitted function, which is called once under each condition; `keep-last` is
the flight recorder. What plain `jax.jit` refuses counts for nothing. Leaves with status 1 where
something that ran was missed without a line, or gave other results.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
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

KEEP_LAST = "keep-last"


def missed(cases: Sequence[Case], whens: Sequence[str], folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name of each case that is not recorded as it ought to be, and what is wrong.

    Args:
        cases: What is called.
        whens: The conditions under which each is, one after the other; `KEEP_LAST` is the flight
            recorder.
        folder: Where the files go.
    """
    for case in cases:
        called, arrays = _jitted(case)
        try:
            expected = _leaves(called(*arrays))
        except Exception:
            continue
        called, arrays = _jitted(case)
        for when in whens:
            told = _counted("SnapshotMissed")
            try:
                got, left = _recorded(when, lambda: _leaves(called(*arrays)), folder)  # noqa: B023
            except Exception as error:
                yield case.name, f"raises {type(error).__name__}: {str(error)[:200]} ({when})"
                continue
            if not _same(expected, got):
                yield case.name, f"has other results ({when})"
            if not left and _counted("SnapshotMissed") == told:
                yield case.name, f"left nothing ({when})"


def _recorded(when: str, call: Callable[[], list[Any]], folder: Path) -> tuple[list[Any], bool]:
    """Return what a call returns under a condition, and whether the recorder has seen it."""
    recorder = process_recorder()
    if when == KEEP_LAST:
        os.environ["SNAPRT_RECORD_KEEP_LAST"] = "1"
        try:
            with snaprt.record(folder=folder):
                got = call()
                return got, bool(snaprt.dump_now())
        finally:
            del os.environ["SNAPRT_RECORD_KEEP_LAST"]
    before = _counted("SnapshotsWritten")
    watched = sum(history.watched for history in recorder._histories.values())
    got = []
    with contextlib.suppress(_FailedError), snaprt.record(when, folder):
        got = call()
        if when == "error":
            raise _FailedError
    recorder.flush()
    if when == "nan":
        return got, sum(history.watched for history in recorder._histories.values()) > watched
    return got, _counted("SnapshotsWritten") > before


class _FailedError(Exception):
    """Fails a program, so that what ran last is written."""


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


def _counted(name: str) -> float:
    return metrics.counter_value(name) or 0


def _leaves(result: Any) -> list[Any]:
    leaves = [leaf for leaf in jax.tree.leaves(result) if hasattr(leaf, "dtype")]  # no tokens
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
    parser.add_argument("--when", action="append", metavar="CONDITION")
    options = parser.parse_args(arguments)
    found = 0
    for table in options.tables:
        cases = list(importlib.import_module(table).cases())[:: options.every]
        with tempfile.TemporaryDirectory() as folder:
            for name, what in missed(cases, options.when or ["all"], Path(folder)):
                print(f"{table}: {name} {what}", flush=True)
                found += 1
        print(f"{table}: {len(cases)} cases", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
