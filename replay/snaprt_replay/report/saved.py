"""Read the ``--json`` output of commands as reports, including the formats of earlier versions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from snaprt.errors import UsageError
from snaprt_replay.compare.results import MISMATCH, comparison_from_json
from snaprt_replay.localize import findings
from snaprt_replay.localize.findings import FindingKind
from snaprt_replay.report import model
from snaprt_replay.report.model import Headline, Report, Status

_VERSION: Final = 1

# Old spellings in saved results: a schema, and names in it.
_OLD_NAMES: Final = {
    "snaprt.localise": "snaprt.localize",
    "localisation": "localization",
    "neighbourhood": "neighborhood",
}


def read(plain: Mapping[str, Any], path: str) -> tuple[Report, ...]:
    """Return the reports in a saved result.

    Args:
        plain: The JSON data, with any schema in `_READERS`.
        path: The path to show if the data do not name the file themselves.

    Raises:
        UsageError: The schema or its version is unknown, or the data are damaged.
    """
    plain = _with_new_names(plain)
    reader = _READERS.get(str(plain.get("schema")))
    if reader is None:
        raise UsageError(
            f"{path} is not a result that snaprt can report: its schema is {plain.get('schema')!r}",
            hint=f"supported schemas: {', '.join(_READERS)}",
        )
    if plain.get("version") != _VERSION:
        raise UsageError(
            f"{path} has version {plain.get('version')} of {plain.get('schema')}; this snaprt "
            f"reads version {_VERSION}",
            hint="update snaprt",
        )
    try:
        return tuple(reader(plain, path))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"cannot read {path}: {type(error).__name__} at {error}",
            hint="it was edited, or written by another version of snaprt",
        ) from error


def _with_new_names(plain: Mapping[str, Any]) -> Mapping[str, Any]:
    renamed = {_OLD_NAMES.get(name, name): value for name, value in plain.items()}
    for name, value in renamed.items():
        if isinstance(value, dict):
            renamed[name] = _with_new_names(value)
        elif name == "schema":
            renamed[name] = _OLD_NAMES.get(str(value), value)
        elif name == "reports" and isinstance(value, list):
            renamed[name] = [
                _with_new_names(report) if isinstance(report, dict) else report for report in value
            ]
    return renamed


def headline_of(localization: findings.Localization) -> Headline:
    """Return the headline of a localization."""
    status, word = _HEADLINES[localization.kind]
    return Headline(status, word, localization.sentence)


_HEADLINES: Final[Mapping[FindingKind, tuple[Status, str]]] = {
    "instruction": ("bad", "FOUND"),
    "interaction": ("bad", "FOUND"),
    "amplification": ("bad", "ILL-CONDITIONED"),
    "candidates": ("bad", "NOT PROVEN"),
    "nothing": ("ok", "NOTHING FOUND"),
    "unfinished": ("bad", "UNFINISHED"),
}


def _read_reports(plain: Mapping[str, Any], path: str) -> Iterator[Report]:
    return map(model.from_json, plain["reports"])


def _read_localization(plain: Mapping[str, Any], path: str) -> Iterator[Report]:
    localization = findings.from_json(plain)
    yield Report(path, headline_of(localization), localization=localization)


def _read_comparison(plain: Mapping[str, Any], path: str) -> Iterator[Report]:
    comparison = comparison_from_json(plain)
    status: Status = "bad" if comparison.verdict == MISMATCH else "ok"
    word = "MISMATCH" if status == "bad" else "MATCH"
    yield Report(path, Headline(status, word, comparison.summary), comparison=comparison)


# --- what `snaprt replay` printed before all of its results became reports ---

_STATUSES: Final[tuple[Status, ...]] = ("ok", "bad", "failed")
_WORDS: Final = {
    "identical": "MATCH",
    "within tolerance": "MATCH",
    "does not agree with itself": "NON-DETERMINISTIC",
}


def _read_files(plain: Mapping[str, Any], path: str) -> Iterator[Report]:
    for file in plain["files"]:
        if "error" in file:
            headline = Headline("failed", model.FAILED, file["error"])
            yield Report(file["path"], headline, file["hint"])
        else:
            fields = _of_verdict(file) if "judgement" in file else _of_replay(file)
            yield model.from_json({**file, "module": file["name"], **fields})


def _of_replay(file: Mapping[str, Any]) -> Mapping[str, Any]:
    status = _STATUSES[file["status"]]
    verdict = _WORDS.get(file["verdict"], file["verdict"].upper())
    sentence = "no outputs were recorded for these inputs"
    if file["comparison"]:
        sentence = file["comparison"]["summary"]
    elif status == "ok":
        status = "caution"
    repeats = file["repeats"]
    if repeats and verdict == "NON-DETERMINISTIC":
        sentence = f"{repeats['actual_name']} and run 1: {repeats['summary']}"
    return {
        "headline": {"status": status, "word": verdict, "sentence": sentence},
        "runs": {"replay": file},
        "environment": _facts(file["recorded_environment"], file["environment"]),
    }


def _of_verdict(file: Mapping[str, Any]) -> Mapping[str, Any]:
    judged = file["judgement"]
    kind = judged["kind"]
    status = "caution" if kind == "ill-conditioned" else _STATUSES[file["status"]]
    sentence = judged["sentence"].removeprefix(f"{kind}: ")
    return {
        "headline": {"status": status, "word": model.verdict_word(kind), "sentence": sentence},
        "environment": _facts({}, file["runs"]["b"]["environment"]),
        "notes": judged["notes"],
        "sides": [
            _side(letter, judged[key], file["runs"][key]["device"])
            for letter, key in (("A", "a"), ("B", "b"))
        ],
        "comparison": judged["comparison"],
    }


def _side(letter: str, judged: Mapping[str, Any], device: str) -> Mapping[str, Any]:
    side = {"letter": letter, "name": judged["name"], "device": device}
    if judged["failure"]:
        return {**side, "status": "failed", "word": "failed", "reason": judged["failure"]}
    status, word = ("bad", "wrong") if judged["wrong"] else ("ok", "within rounding")
    return {**side, "status": status, "word": word, "score": judged["score"]}


def _facts(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> Any:
    return [dataclasses.asdict(fact) for fact in model.facts(recorded, here)]


_READERS: Final[Mapping[str, Callable[[Mapping[str, Any], str], Iterator[Report]]]] = {
    model.SCHEMA: _read_reports,
    findings.SCHEMA: _read_localization,
    "snaprt.comparison": _read_comparison,
    "snaprt.replay": _read_files,
    "snaprt.verdict": _read_files,
}
