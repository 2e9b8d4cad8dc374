"""Find how two recorded executions differ: environment, arrays, module; run nothing.

Facts that only identify an execution (its number, step, time, process), and where and why it was
recorded, do not count as differences.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from snaprt import jaxapi
from snaprt.errors import SnapshotError
from snaprt.snapshot.format.read import open_snapshot
from snaprt.snapshot.format.schema import ExecutionRecord
from snaprt_replay.compare.compare import compare_arrays
from snaprt_replay.compare.results import IDENTICAL, OutputComparison
from snaprt_replay.compare.tolerance import EXACTLY
from snaprt_replay.load import sniff
from snaprt_replay.load.case import Case, NamedArray
from snaprt_replay.load.load import load

_OF_THE_RECORDING = ("SNAPRT_DUMP_DIR", "SNAPRT_RECORD")
_LARGEST_CONSTANT = 16  # elements; compare larger constants by digest, not as text


@dataclass(frozen=True)
class FactDifference:
    """A recorded fact that differs; empty text where an execution does not have it."""

    what: str
    first: str
    second: str


@dataclass(frozen=True)
class ArrayDifference:
    """An input or output that differs."""

    role: str  # ``input`` or ``output``
    name: str  # its name in the first execution, or in the only one that has it
    reason: str  # in words, where values cannot be compared individually; else empty
    comparison: OutputComparison | None  # of the values; None where only one side has the array

    @property
    def differs(self) -> bool:
        """Return whether anything about the array differs."""
        identical = self.comparison is not None and self.comparison.verdict == IDENTICAL
        return bool(self.reason) or not identical


@dataclass(frozen=True)
class Differences:
    """How two executions differ."""

    facts: tuple[FactDifference, ...]  # versions, flags, environment, devices
    arrays: tuple[ArrayDifference, ...]  # inputs and outputs
    # A unified diff of the modules as StableHLO without source locations.
    instructions: tuple[str, ...]
    same_arrays: int  # how many arrays are identical
    notes: tuple[str, ...]  # what could not be compared

    @property
    def any(self) -> bool:
        """Return whether there is any difference."""
        return bool(self.facts or self.arrays or self.instructions)


def find_differences(first: Path, second: Path) -> Differences:
    """Compare two recorded executions, including inputs and outputs.

    Args:
        first: Any file that can be replayed; the execution's other files are found next to it.
        second: The same for the second execution.

    Raises:
        SnapshotError: A file cannot be read.
    """
    first_case, second_case = load(first), load(second)
    compared, notes = [], []
    for role, left, right in (
        ("input", first_case.inputs, second_case.inputs),
        ("output", first_case.outputs, second_case.outputs),
    ):
        if left is None or right is None:
            if left is not None or right is not None:
                lacking = first if left is None else second
                notes.append(f"{lacking} has no {role}s to compare")
            continue
        compared += _compare_sides(role, left, right)
    different = [array for array in compared if array.differs]
    return Differences(
        facts=_facts_that_differ(_facts(first_case), _facts(second_case)),
        arrays=tuple(different),
        instructions=tuple(
            difflib.unified_diff(
                _lines(first_case), _lines(second_case), str(first), str(second), lineterm="", n=2
            )
        ),
        same_arrays=len(compared) - len(different),
        notes=tuple(notes),
    )


def _compare_sides(
    role: str, left: Sequence[NamedArray], right: Sequence[NamedArray]
) -> list[ArrayDifference]:
    """Compare arrays by position, as a module takes and returns them."""
    differences = []
    for array, counterpart in zip(left, right, strict=False):
        comparison = compare_arrays(array.name, array.value, counterpart.value, EXACTLY)
        renamed = f"is named {counterpart.name} in B" if array.name != counterpart.name else ""
        reason = renamed or (comparison.reason if not comparison.differing else "")
        differences.append(ArrayDifference(role, array.name, reason, comparison))
    count = len(differences)
    for side, unmatched in (("A", left[count:]), ("B", right[count:])):
        differences += [
            ArrayDifference(role, array.name, f"is only in {side}", None) for array in unmatched
        ]
    return differences


def _facts(case: Case) -> Mapping[str, str]:
    if case.format not in (sniff.SNAPSHOT, sniff.PACK):
        return dict(case.environment)
    return _facts_of_execution(open_snapshot(case.path).manifest.execution)


def _facts_of_execution(execution: ExecutionRecord) -> Mapping[str, str]:
    kinds = [device.kind for device in execution.devices]
    return {
        "graph": execution.graph_id,
        "name": execution.name,
        "devices": ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)),
        "platform": execution.device.platform,
        "platform version": execution.platform_version,
        "driver": execution.driver,
        "processor": execution.processor,
        "donated": ", ".join(map(str, execution.donated)),
        "redacted": ", ".join(execution.redacted),
        **{f"version of {name}": text for name, text in execution.versions.items()},
        **{
            f"XLA flag {name}": text
            for name, text in _flags(execution.xla_flags).items()
            if not name.startswith("xla_dump")
        },
        **{
            f"environment {name}": text
            for name, text in execution.environment.items()
            if name != "XLA_FLAGS" and not name.startswith(_OF_THE_RECORDING)
        },
        **{f"config {name}": text for name, text in execution.jax_config.items()},
    }


def _flags(text: str) -> Mapping[str, str]:
    pairs = (flag.lstrip("-").partition("=") for flag in text.split())
    return {name: value or "set" for name, _, value in pairs}


def _facts_that_differ(
    first: Mapping[str, str], second: Mapping[str, str]
) -> tuple[FactDifference, ...]:
    return tuple(
        FactDifference(what, first.get(what, ""), second.get(what, ""))
        for what in dict.fromkeys([*first, *second])
        if first.get(what, "") != second.get(what, "")
    )


def _lines(case: Case) -> list[str]:
    try:
        module = jaxapi.parse_module(case.stablehlo)
    except ValueError as error:
        raise SnapshotError(f"cannot read the module in {case.path}: {error}") from error
    return jaxapi.stablehlo_to_compare(module, _LARGEST_CONSTANT).splitlines()
