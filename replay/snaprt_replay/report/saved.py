"""Read what commands printed with ``--json`` as reports; it must not know files or JAX."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from snaprt.errors import UsageError
from snaprt_replay.compare.results import MISMATCH, comparison_from_json
from snaprt_replay.localize import findings
from snaprt_replay.localize.findings import Kind
from snaprt_replay.report import model
from snaprt_replay.report.model import Headline, Report, Side, Status

_VERSION: Final = 1


def read(plain: Mapping[str, Any], path: str) -> tuple[Report, ...]:
    """Return the reports that a saved result stands for.

    Args:
        plain: The JSON data of any of `SCHEMAS`.
        path: What to call it where it does not say itself which file it is of.

    Raises:
        UsageError: It is none of these, of another version, or damaged.
    """
    reader = _READERS.get(str(plain.get("schema")))
    if reader is None:
        raise UsageError(
            f"{path} is no result that can be reported: its schema is {plain.get('schema')!r}",
            hint=f"these can: {', '.join(_READERS)}",
        )
    if plain.get("version") != _VERSION:
        raise UsageError(
            f"{path} has version {plain.get('version')} of {plain.get('schema')}, "
            f"this snaprt reads version {_VERSION}",
            hint="update snaprt",
        )
    try:
        return reader(plain, path)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be read: {type(error).__name__} at {error}",
            hint="it was edited, or written by another version of snaprt",
        ) from error


def headline_of(found: findings.Localization) -> Headline:
    """Return the headline of what localizing found."""
    status, word = _FOUND[found.kind]
    return Headline(status, word, found.sentence)


_FOUND: Final[Mapping[Kind, tuple[Status, str]]] = {
    "instruction": ("bad", "FOUND"),
    "interaction": ("bad", "FOUND"),
    "amplification": ("bad", "ILL-CONDITIONED"),
    "candidates": ("bad", "NOT PROVEN"),
    "nothing": ("ok", "AGREE"),
    "unfinished": ("bad", "UNFINISHED"),
}


def _read_reports(plain: Mapping[str, Any], path: str) -> tuple[Report, ...]:
    return tuple(model.from_json(one) for one in plain["reports"])


def _read_localization(plain: Mapping[str, Any], path: str) -> tuple[Report, ...]:
    found = findings.from_json(plain)
    return (Report(path, headline_of(found), localization=found),)


def _read_comparison(plain: Mapping[str, Any], path: str) -> tuple[Report, ...]:
    comparison = comparison_from_json(plain)
    differs = comparison.verdict == MISMATCH
    headline = Headline(
        "bad" if differs else "ok", "MISMATCH" if differs else "MATCH", comparison.summary
    )
    return (Report(path, headline, comparison=comparison),)


def _read_replays(plain: Mapping[str, Any], path: str) -> tuple[Report, ...]:
    return tuple(_replay(one) for one in plain["files"])


def _replay(plain: Mapping[str, Any]) -> Report:
    if "error" in plain:
        return _failed(plain)
    comparison = plain["comparison"] and comparison_from_json(plain["comparison"])
    repeats = plain["repeats"] and comparison_from_json(plain["repeats"])
    status = _STATUSES[plain["status"]]
    if status == "ok" and not comparison:
        status = "caution"
    sentence = comparison.summary if comparison else "no outputs were recorded for these inputs"
    if repeats and plain["verdict"] == "does not agree with itself":
        sentence = f"{repeats.actual_name} and run 1: {repeats.summary}"
    return Report(
        path=plain["path"],
        headline=Headline(status, _word(plain["verdict"]), sentence),
        format=plain["format"],
        module=plain["name"],
        device=plain["device"],
        seconds=(float(plain["compile_seconds"]), math.fsum(plain["execute_seconds"])),
        environment=model.facts(plain["recorded_environment"], plain["environment"]),
        warnings=tuple(plain["warnings"]),
        notes=tuple(plain["notes"]),
        comparison=comparison,
    )


def _read_verdicts(plain: Mapping[str, Any], path: str) -> tuple[Report, ...]:
    return tuple(_verdict(one) for one in plain["files"])


def _verdict(plain: Mapping[str, Any]) -> Report:
    if "error" in plain:
        return _failed(plain)
    judged, runs = plain["judgement"], plain["runs"]
    comparison = judged["comparison"] and comparison_from_json(judged["comparison"])
    status: Status = (
        "caution" if judged["kind"] == "ill-conditioned" else _STATUSES[plain["status"]]
    )
    return Report(
        path=plain["path"],
        headline=Headline(
            status,
            judged["kind"].upper(),
            judged["sentence"].removeprefix(f"{judged['kind']}: "),
        ),
        format=plain["format"],
        module=plain["name"],
        environment=model.facts({}, runs["b"]["environment"]),
        notes=tuple(judged["notes"]),
        sides=tuple(
            _side(letter, judged[key], runs[key]["device"])
            for letter, key in (("A", "a"), ("B", "b"))
        ),
        comparison=comparison,
    )


def _side(letter: str, judged: Mapping[str, Any], device: str) -> Side:
    if judged["failure"]:
        return Side(letter, judged["name"], "failed", "failed", reason=judged["failure"])
    status: Status = "bad" if judged["wrong"] else "ok"
    word = "wrong" if judged["wrong"] else "within rounding"
    return Side(letter, judged["name"], status, word, float(judged["score"]), device)


def _failed(plain: Mapping[str, Any]) -> Report:
    told = f"{plain['error']}; {plain['hint']}" if plain["hint"] else plain["error"]
    return Report(plain["path"], Headline("failed", "FAILED", told))


_STATUSES: Final[tuple[Status, ...]] = ("ok", "bad", "failed")
_WORDS: Final = {"identical": "MATCH", "within tolerance": "MATCH"}


def _word(verdict: str) -> str:
    return _WORDS.get(verdict, verdict.upper())


_READERS: Final[Mapping[str, Callable[[Mapping[str, Any], str], tuple[Report, ...]]]] = {
    model.SCHEMA: _read_reports,
    findings.SCHEMA: _read_localization,
    "snaprt.comparison": _read_comparison,
    "snaprt.replay": _read_replays,
    "snaprt.verdict": _read_verdicts,
}
