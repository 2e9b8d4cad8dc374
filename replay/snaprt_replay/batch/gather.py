"""Gather what a report shows of a replay or a trial; it must not know how it looks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from snaprt.errors import SnaprtError
from snaprt_replay.compare.results import Comparison
from snaprt_replay.compare.verdict import SideJudgement
from snaprt_replay.load.case import Case
from snaprt_replay.localize.findings import Localization
from snaprt_replay.localize.pipeline import read_program
from snaprt_replay.report import surroundings
from snaprt_replay.report.grid import error_grid
from snaprt_replay.report.model import (
    Command,
    ErrorGrid,
    Headline,
    Neighborhood,
    Report,
    Side,
    SourceExcerpt,
    Status,
    facts,
)
from snaprt_replay.report.saved import headline_of
from snaprt_replay.report.shown import shell_word
from snaprt_replay.run.rerun import Replay
from snaprt_replay.run.trace_errors import TraceErrorReplay
from snaprt_replay.run.trial import Trial
from snaprt_replay.run.variants.variants import parse_variant
from snaprt_replay.run.workers import Outcome

_JUDGED: Final[Mapping[str, Status]] = {
    "within rounding": "ok",
    "ill-conditioned": "caution",
    "cannot be judged": "failed",
}


def of_replay(replayed: Replay, words: Sequence[str] = ()) -> Report:
    """Return the report of a replay.

    Args:
        replayed: The replay.
        words: The options it was made with, to be repeated in the commands.
    """
    case, played = replayed.case, replayed.played
    return Report(
        path=str(case.path),
        headline=_headline(replayed),
        format=case.format,
        module=case.name,
        device=f"{played.device} ({played.environment.get('device_kind', '')})",
        seconds=(played.compile_seconds, sum(played.execute_seconds)),
        environment=facts(case.environment, played.environment),
        warnings=replayed.warnings,
        notes=case.notes,
        comparison=replayed.comparison,
        grids=_grids(
            replayed.comparison,
            [one.value for one in case.outputs or ()],
            [one.value for one in played.outputs],
        ),
        commands=_commands(case.path, words),
    )


def of_trial(trial: Trial, words: Sequence[str] = ()) -> Report:
    """Return the report of a trial of two variants; see `of_replay`."""
    case, judgement = trial.case, trial.judgement
    sides = [("A", judgement.a, trial.a), ("B", judgement.b, trial.b)]
    return Report(
        path=str(case.path),
        headline=Headline(
            _JUDGED.get(judgement.kind, "bad"),
            judgement.kind.upper(),
            judgement.sentence.removeprefix(f"{judgement.kind}: "),
        ),
        format=case.format,
        module=case.name,
        device=", ".join(dict.fromkeys(one.device for _, _, one in sides if one.device)),
        seconds=(
            sum(one.compile_seconds for _, _, one in sides),
            sum(sum(one.execute_seconds) for _, _, one in sides),
        ),
        environment=facts(case.environment, trial.b.environment or trial.a.environment),
        notes=(*case.notes, *judgement.notes),
        sides=tuple(_side(*side) for side in sides),
        comparison=judgement.comparison,
        grids=_grids(judgement.comparison, trial.a.outputs or (), trial.b.outputs or ()),
        commands=_commands(case.path, words),
    )


def of_localization(case: Case, found: Localization, root: Path) -> Report:
    """Return the report of a localization, with source lines of Python files below ``root``.

    Raises:
        SnapshotError: The module cannot be read.
    """
    around, lines = neighborhood_of(case, found, root)
    return Report(
        path=str(case.path),
        headline=headline_of(found),
        format=case.format,
        module=case.name,
        notes=case.notes,
        localization=found,
        neighborhood=around,
        sources=lines,
        commands=_commands(case.path, _sides(found), found),
    )


def with_localization(
    report: Report, case: Case, found: Localization, root: Path, words: Sequence[str] = ()
) -> Report:
    """Return the report of a replay with what localizing found.

    What it found is the headline where the replay gave what was recorded: a NaN, mostly.

    Raises:
        SnapshotError: The module cannot be read.
    """
    around, lines = neighborhood_of(case, found, root)
    return dataclasses.replace(
        report,
        headline=headline_of(found) if report.headline.status == "ok" else report.headline,
        localization=found,
        neighborhood=around,
        sources=lines,
        commands=_commands(case.path, words, found),
    )


def of_trace_error(found: TraceErrorReplay) -> Report:
    """Return the report of an error while a graph was recorded, which was raised again or not."""
    recorded = found.recorded
    file = shell_word(str(found.path))
    return Report(
        path=str(found.path),
        headline=Headline(
            *(("ok", "REPRODUCES") if found.reproduces else ("bad", "DOES NOT REPRODUCE")),
            found.summary,
        ),
        format="an error while the graph was recorded",
        module=found.name,
        warnings=found.warnings,
        notes=(
            f"recorded: {recorded.kind}: {recorded.message}",
            f"operation: {found.operation or 'none; Python code raised the error'}",
        ),
        commands=(
            Command("Replay it again", f"snaprt replay {file}"),
            Command("See what is in it", f"snaprt inspect {file}"),
        ),
    )


def of_failure(path: Path, error: SnaprtError) -> Report:
    """Return the report of a file that could not be replayed."""
    told = f"{error.message}; {error.hint}" if error.hint else error.message
    return Report(str(path), Headline("failed", "FAILED", told), commands=_commands(path, ()))


def neighborhood_of(
    case: Case, found: Localization, root: Path
) -> tuple[Neighborhood | None, tuple[SourceExcerpt, ...]]:
    """Return the program around what was found, and the lines of the user's Python below ``root``.

    Raises:
        SnapshotError: The module cannot be read.
    """
    around = surroundings.surroundings(read_program(case), found.instructions)
    locations = surroundings.locations(around, found.instructions)
    return around, surroundings.source_excerpts(locations, root)


def _headline(replayed: Replay) -> Headline:
    played, comparison = replayed.played, replayed.comparison
    if played.repeats is not None and played.agrees_with_itself is False:
        told = f"{played.repeats.actual_name} and run 1: {played.repeats.summary}"
        return Headline("bad", "NON-DETERMINISTIC", told)
    if comparison is None:
        told = "no outputs were recorded for these inputs"
        return Headline("caution", "NOTHING TO COMPARE WITH", told)
    if replayed.mismatch:
        return Headline("bad", "MISMATCH", replayed.summary)
    return Headline("ok", "MATCH", replayed.summary)


def _grids(
    comparison: Comparison | None, expected: Sequence[np.ndarray], actual: Sequence[np.ndarray]
) -> tuple[ErrorGrid | None, ...]:
    """Return a grid for each output that differs, or has NaN or Inf."""
    if comparison is None:
        return ()
    pairs = [*zip(expected, actual, strict=False)]
    return tuple(
        error_grid(*pairs[number])
        if number < len(pairs) and (output.differing or output.specials.nan_both)
        else None
        for number, output in enumerate(comparison.outputs)
    )


def _side(letter: str, judged: SideJudgement, outcome: Outcome) -> Side:
    if judged.failure:
        return Side(letter, judged.name, "failed", "failed", reason=judged.failure)
    if judged.wrong:
        return Side(letter, judged.name, "bad", "wrong", judged.score, outcome.device)
    if not judged.outputs:
        return Side(letter, judged.name, "caution", "not judged", None, outcome.device)
    return Side(letter, judged.name, "ok", "within rounding", judged.score, outcome.device)


def _sides(found: Localization) -> tuple[str, ...]:
    """Return the options that name the sides; none where one is another file's program."""
    try:
        for name in filter(None, (found.suspect, found.reference)):
            parse_variant(name)
    except SnaprtError:
        return ()
    both = (("--a", found.suspect), ("--b", found.reference))
    return tuple(word for option, name in both if name for word in (option, name))


def _commands(
    path: Path, words: Sequence[str], found: Localization | None = None
) -> tuple[Command, ...]:
    file = shell_word(str(path))
    options = _joined(words)
    sides = "" if found is None else _joined(_sides(found))
    # Where there is no reference, it was NaN and infinities that were looked for.
    localize, minify = (
        (" --find nonfinite", " --check nan") if found and not found.reference else ("", "")
    )
    return (
        Command("Replay it again", f"snaprt replay {file}{options}"),
        Command("See what is in it", f"snaprt inspect {file}"),
        Command("Find the operation where it starts", f"snaprt localize {file}{sides}{localize}"),
        Command(
            "Find the smallest program that still shows it", f"snaprt minify {file}{sides}{minify}"
        ),
    )


def _joined(words: Sequence[str]) -> str:
    return "".join(f" {shell_word(word)}" for word in words)
