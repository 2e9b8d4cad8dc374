"""``snaprt replay --a --b --reference``: run variants of a file and show who is wrong.

It knows how a judgement is shown; running and judging are `snaprt_replay.run.trial`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.text import Text
from snaprt_replay.batch import gather
from snaprt_replay.compare.verdict import Judgement, SideJudgement
from snaprt_replay.run.trial import PROCESSES, Trial, hold_trial
from snaprt_replay.run.variants.variants import Variant
from snaprt_replay.run.workers import Outcome, Workers

from snaprt.cli import output, tables
from snaprt.cli.replay import report_files
from snaprt.errors import SnaprtError
from snaprt.units import format_duration

SCHEMA: Final = "snaprt.verdict"
SCHEMA_VERSION: Final = 1

_STYLES: Final = {"within rounding": "green", "ill-conditioned": "yellow"}


@dataclasses.dataclass(frozen=True)
class Judging:
    """What the user asked for; see `snaprt_replay.run.trial.hold_trial`."""

    a: Variant
    b: Variant
    reference: Variant
    repeat: int
    timeout: float
    inputs: Path | None
    random_seed: int | None
    words: tuple[str, ...] = ()


def judge_all(
    files: Sequence[Path],
    judging: Judging,
    *,
    as_json: bool,
    html: Path | None = None,
    junit: Path | None = None,
) -> int:
    """Judge each file, show what was found, and return the command's status."""
    status, told = output.EXIT_OK, []
    reports = []
    with Workers(PROCESSES, judging.timeout) as workers:
        for path in files:
            try:
                trial = _hold(path, judging, workers)
            except SnaprtError as error:
                output.error(tables.printable(error.message), tables.printable(error.hint))
                status = output.EXIT_FAILURE
                reports.append(gather.of_failure(path, error))
                told.append(
                    {"path": path, "status": status, "error": error.message, "hint": error.hint}
                )
                continue
            own = _status(trial.judgement)
            if html is not None or junit is not None:
                reports.append(gather.of_trial(trial, judging.words))
            status = max(status, own)
            told.append({"path": path, "status": own, **_to_json(trial)})
            if not as_json:
                _show(path, trial, is_first=len(told) == 1)
    report_files.write_reports(reports, html, junit)
    if as_json:
        output.emit_json(SCHEMA, SCHEMA_VERSION, {"status": status, "files": told})
    return status


def _hold(path: Path, judging: Judging, workers: Workers) -> Trial:
    return hold_trial(
        path,
        judging.a,
        judging.b,
        judging.reference,
        workers=workers,
        repeat=judging.repeat,
        inputs=judging.inputs,
        random_seed=judging.random_seed,
    )


def _status(judgement: Judgement) -> int:
    if judgement.kind == "cannot be judged":
        return output.EXIT_FAILURE
    return output.EXIT_MISMATCH if judgement.found_something else output.EXIT_OK


def _show(path: Path, trial: Trial, *, is_first: bool) -> None:
    if not is_first:
        output.console.print()
    case, judgement = trial.case, trial.judgement
    output.console.print(f"{path}: {case.format}, module {tables.printable(case.name)}")
    for letter, side, outcome in (("A", judgement.a, trial.a), ("B", judgement.b, trial.b)):
        output.console.print(f"{letter}: {tables.printable(_side_text(side, outcome))}")
    if judgement.reference:
        moved = judgement.amplification
        told = "" if moved is None else f"; rounding moves its outputs by about {moved:.3g} ulp"
        output.console.print(f"reference: {judgement.reference}{told}")
    for note in (*case.notes, *judgement.notes):
        output.console.print(f"note: {tables.printable(note)}")
    if judgement.comparison is not None:
        output.console.print()
        output.console.print(tables.comparison_table(judgement.comparison))
    output.console.print()
    style = _STYLES.get(judgement.kind, "bold red")
    sentence = judgement.sentence
    told = "" if judgement.comparison is None else judgement.comparison.nonfinite_in_words()
    if told:
        sentence += f"; but {told}"
    output.console.print(
        Text.assemble((judgement.kind.upper(), style), f": {tables.printable(sentence)}")
    )


def _side_text(side: SideJudgement, outcome: Outcome) -> str:
    if side.failure:
        return f"{side.name}: {side.failure}"
    where = f" on {outcome.device}" if outcome.device else ""
    if not outcome.execute_seconds:
        return side.name + where
    source = "loaded from the cache" if outcome.from_cache else "compiled"
    times = ", ".join(map(format_duration, outcome.execute_seconds[:3]))
    agrees = {None: "", True: "; all runs gave the same bits", False: "; its runs differ"}
    return (
        f"{side.name}{where}: {source} in {format_duration(outcome.compile_seconds)}, "
        f"ran in {times}{agrees[outcome.agrees_with_itself]}"
    )


def _to_json(trial: Trial) -> dict[str, Any]:
    return {
        "format": trial.case.format,
        "name": trial.case.name,
        "verdict": trial.judgement.kind,
        "judgement": trial.judgement.to_json(),
        "runs": {
            side: _outcome_json(outcome)
            for side, outcome in (("a", trial.a), ("b", trial.b), ("reference", trial.reference))
        },
    }


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "device": outcome.device,
        "failure": outcome.failure,
        "compile_seconds": outcome.compile_seconds,
        "execute_seconds": outcome.execute_seconds,
        "from_cache": outcome.from_cache,
        "agrees_with_itself": outcome.agrees_with_itself,
        "environment": outcome.environment,
        "notes": outcome.notes,
    }
