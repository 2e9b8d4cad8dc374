"""Gather what a report shows of a replay, a trial, a compilation or a localization."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from snaprt.errors import SnaprtError
from snaprt.shown import shell_word
from snaprt.snapshot.format.read import open_snapshot
from snaprt.snapshot.format.trace_errors import operation_text, raise_again
from snaprt.snapshot.share.executions import only_execution
from snaprt_replay.compare.array_statistics import describe
from snaprt_replay.compare.results import Comparison
from snaprt_replay.compare.verdict import SideJudgement
from snaprt_replay.load import sniff
from snaprt_replay.load.case import Case
from snaprt_replay.load.snapshots import recorded_environment
from snaprt_replay.localize.findings import Localization
from snaprt_replay.localize.pipeline import read_program
from snaprt_replay.minify.simpler import with_text
from snaprt_replay.report import surroundings
from snaprt_replay.report.grid import error_grid
from snaprt_replay.report.model import (
    FAILED,
    Command,
    Compiled,
    DeviceRow,
    ErrorGrid,
    Headline,
    Report,
    RunRecord,
    Status,
    TrialSide,
    facts,
    verdict_word,
)
from snaprt_replay.report.saved import headline_of
from snaprt_replay.run import devices
from snaprt_replay.run.player import PlayResult
from snaprt_replay.run.rerun import DeviceReplays, Replay
from snaprt_replay.run.trial import Trial
from snaprt_replay.run.variants.variants import Variant, option_value, parse_variant, with_options
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
        files=tuple(map(str, case.files or (case.path,))),
        runs={"replay": _run(played, played.isolated)},
        compiler_options=case.compiler_options,
        environment=facts(case.environment, played.environment),
        warnings=replayed.warnings,
        notes=case.notes,
        comparison=replayed.comparison,
        by_device=replayed.by_device,
        repeats=played.repeats,
        agrees_with_run=replayed.agrees_with_run,
        statistics=() if replayed.comparison else tuple(map(describe, played.outputs)),
        grids=_grids(
            replayed.comparison,
            [array.value for array in case.outputs or ()],
            [output.value for output in played.outputs],
        ),
        commands=_commands(case.path, words, _for_search(words)),
    )


def on_devices(report: Report, replays: DeviceReplays) -> Report:
    """Return the report of a replay with what other devices gave, and which of them differ."""
    rows = tuple(
        DeviceRow(
            device=replay.played.device,
            device_kind=replay.played.environment.get("device_kind", ""),
            result=result,
            execute_seconds=replay.played.execute_seconds,
            agrees_with_itself=replay.played.agrees_with_itself,
            agrees_with_run=replay.agrees_with_run,
            verdict="" if replay.comparison is None else replay.comparison.verdict,
        )
        for replay, result in zip(replays.replays, replays.results, strict=True)
    )
    headline = report.headline
    if replays.unsteady:
        text = f"the runs on {_listed(replays.unsteady)} differ"
        headline = Headline("bad", "NON-DETERMINISTIC", text)
    elif replays.deviating:
        remaining = len(rows) - len(replays.deviating)
        verb = "gives" if len(replays.deviating) == 1 else "give"
        text = f"{_listed(replays.deviating)} {verb} different bits than the other {remaining}"
        headline = Headline("bad", "DEVICES DIFFER", text)
    elif len(set(replays.results)) > 1:
        text = f"{max(replays.results)} results on {len(rows)} devices, none of them on a majority"
        headline = Headline("bad", "DEVICES DIFFER", text)
    return dataclasses.replace(report, headline=headline, all_devices=rows)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def of_trial(trial: Trial, words: Sequence[str] = ()) -> Report:
    """Return the report of a trial of two variants; see `of_replay`."""
    case, judgement = trial.case, trial.judgement
    judged = judgement.to_json()
    del judged["comparison"]
    return Report(
        path=str(case.path),
        headline=Headline(
            _JUDGED.get(judgement.kind, "bad"),
            verdict_word(judgement.kind),
            judgement.sentence.removeprefix(f"{judgement.kind}: "),
        ),
        format=case.format,
        module=case.name,
        runs={"a": _run(trial.a), "b": _run(trial.b), "reference": _run(trial.reference)},
        compiler_options=case.compiler_options,
        environment=facts(case.environment, trial.b.environment or trial.a.environment),
        notes=(*case.notes, *judgement.notes),
        sides=(_side("A", judgement.a, trial.a), _side("B", judgement.b, trial.b)),
        judgement=judged,
        comparison=judgement.comparison,
        grids=_grids(judgement.comparison, trial.a.outputs or (), trial.b.outputs or ()),
        commands=_commands(case.path, words, _for_search(words)),
    )


def of_localization(
    case: Case, localization: Localization, root: Path, words: Sequence[str] = ()
) -> Report:
    """Return the report of a localization; see `with_localization`.

    Args:
        case: What was searched.
        localization: The localization.
        root: See `with_localization`.
        words: The options it was made with, to be repeated in the commands.
    """
    report = Report(
        path=str(case.path),
        headline=headline_of(localization),
        format=case.format,
        module=case.name,
        notes=case.notes,
    )
    report = with_localization(report, case, localization, root)
    sides, inputs = _sides(localization), _given(words, *_INPUTS)
    search = [*(sides or _given(words, "--a", "--b")), *_given(words, "--against"), *inputs]
    commands = _commands(case.path, [*sides, *inputs], search, localization)
    return dataclasses.replace(report, commands=commands)


def with_localization(
    report: Report, case: Case, localization: Localization, root: Path, words: Sequence[str] = ()
) -> Report:
    """Return a report with what localizing found, and source lines of Python files below ``root``.

    What was found is the headline where the replay gave what was recorded: a NaN, mostly.

    Raises:
        SnapshotError: The module cannot be read.
    """
    around = surroundings.surroundings(read_program(case), localization.instructions)
    locations = surroundings.locations(around, localization.instructions)
    return dataclasses.replace(
        report,
        headline=headline_of(localization) if report.headline.status == "ok" else report.headline,
        localization=localization,
        neighborhood=around,
        sources=surroundings.source_excerpts(locations, root),
        commands=_commands(
            case.path, words, [*_sides(localization), *_given(words, *_INPUTS)], localization
        ),
    )


def of_compilation(case: Case, variant: Variant, outcome: Outcome, saved: Path) -> Report:
    """Return the report of a program that was compiled only, for the device of a variant.

    Args:
        case: What was compiled.
        variant: See `variants.compile_only`.
        outcome: What came of it.
        saved: Where the optimized HLO is.

    Raises:
        SnaprtError: There is nothing to compile for.
    """
    failure = outcome.failure
    if failure is not None and failure.cannot_run:
        raise failure.as_error(case.path)
    report = Report(
        path=str(case.path),
        headline=Headline("ok", "COMPILES", f"for {outcome.device or variant.text}"),
        format=case.format,
        module=case.name,
        runs={"compilation": dataclasses.replace(_run(outcome), execute_seconds=())},
        compiler_options=case.compiler_options,
        notes=case.notes,
    )
    if failure is not None:
        sentence = f"for {variant.text}: {failure}: {failure.message}"
        return dataclasses.replace(report, headline=Headline("bad", "DOES NOT COMPILE", sentence))
    memory, cost = outcome.report["memory"], outcome.report["cost"]
    compiled = Compiled(memory, cost, str(saved), outcome.report["largest"])
    return dataclasses.replace(report, compiled=compiled)


# What may change what an operation accepts; it never reaches a device or a compiler.
_MATTERS_TO_OPERATIONS: Final = ("jax", "jaxlib", "snaprt")


def of_trace_error(path: Path) -> Report | None:
    """Raise an error again that was raised while a graph was recorded, and report what came of it.

    Returns:
        None where the file is of another kind.

    Raises:
        SnapshotError: The file cannot be read.
    """
    form = sniff.sniff(path)
    if form not in (sniff.SNAPSHOT, sniff.PACK):
        return None
    snapshot = open_snapshot(only_execution(path) if form == sniff.PACK else path)
    recorded = snapshot.manifest.trace_error
    if recorded is None:
        return None
    raised = raise_again(recorded)
    here = devices.environment(devices.find_device(None))
    then = recorded_environment(snapshot)
    notes = [
        f"recorded: {recorded.kind}: {recorded.message}",
        f"operation: {operation_text(recorded) or 'none; Python code raised the error'}",
        *(f"  at {frame}" for frame in recorded.stack),
        f"graph so far: {recorded.pending} operations",
    ]
    if recorded.left_out:
        notes.append(f"{recorded.left_out} of them, on other devices, are not in the file")
    notes += [f"not in the file: {value}" for value in recorded.unencodable]
    reproduces = (raised.kind, raised.message) == (recorded.kind, recorded.message)
    if reproduces:
        headline = Headline("ok", "REPRODUCES", "the same operation raises the same error")
    else:
        what = recorded.primitive or recorded.function
        other = f"the operation raises a different error, {raised.kind}: {raised.message}"
        none = f"{what} raises no error with these operands and parameters"
        sentence = raised.obstacle or (other if raised.kind else none)
        headline = Headline("bad", "DOES NOT REPRODUCE", sentence)
    file = shell_word(str(path))
    return Report(
        path=str(path),
        headline=headline,
        format="an error while the graph was recorded",
        module=snapshot.manifest.execution.name,
        environment=facts(then, here),
        warnings=devices.differences(
            {name: value for name, value in then.items() if name in _MATTERS_TO_OPERATIONS}, here
        ),
        notes=tuple(notes),
        trace_error=dataclasses.asdict(recorded),
        raised=dataclasses.asdict(raised),
        commands=(
            Command("Replay it again", f"snaprt replay {file}"),
            Command("Show what it contains", f"snaprt inspect {file}"),
        ),
    )


def of_failure(path: Path, error: SnaprtError) -> Report:
    """Return the report of a file that could not be replayed."""
    headline = Headline("failed", FAILED, error.message)
    return Report(str(path), headline, error.hint, commands=_commands(path, (), ()))


def _run(ran: PlayResult | Outcome, isolated: bool = True) -> RunRecord:
    failure = ran.failure if isinstance(ran, Outcome) else None
    return RunRecord(
        device=ran.device,
        device_kind=ran.environment.get("device_kind", ""),
        compile_seconds=ran.compile_seconds,
        execute_seconds=ran.execute_seconds,
        from_cache=ran.from_cache,
        isolated=isolated,
        agrees_with_itself=ran.agrees_with_itself,
        failure=None if failure is None else dataclasses.asdict(failure),
    )


def _headline(replayed: Replay) -> Headline:
    played, comparison = replayed.played, replayed.comparison
    if played.repeats is not None and played.agrees_with_itself is False:
        text = f"{played.repeats.actual_name} and run 1: {played.repeats.summary}"
        return Headline("bad", "NON-DETERMINISTIC", text)
    if comparison is None:
        text = "no outputs were recorded for these inputs"
        return Headline("caution", "NOTHING TO COMPARE WITH", text)
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


def _side(letter: str, judged: SideJudgement, outcome: Outcome) -> TrialSide:
    if judged.failure:
        return TrialSide(letter, judged.name, "failed", "failed", reason=judged.failure)
    if judged.wrong:
        return TrialSide(letter, judged.name, "bad", "wrong", judged.score, outcome.device)
    if not judged.outputs:
        return TrialSide(letter, judged.name, "caution", "not judged", None, outcome.device)
    return TrialSide(letter, judged.name, "ok", "within rounding", judged.score, outcome.device)


def _sides(localization: Localization) -> tuple[str, ...]:
    """Return the options that name the sides; none where one is another file's program."""
    try:
        for name in filter(None, (localization.suspect, localization.reference)):
            parse_variant(name)
    except SnaprtError:
        return ()
    both = (("--a", localization.suspect), ("--b", localization.reference))
    return tuple(word for option, name in both if name for word in (option, name))


_INPUTS: Final = ("--inputs", "--random")


def _given(words: Sequence[str], *options: str) -> list[str]:
    """Return those of a command's words that are some options, each with its value."""
    return [word for pair in itertools.pairwise(words) if pair[0] in options for word in pair]


def _for_search(words: Sequence[str]) -> list[str]:
    """Return the options of `snaprt localize` that mean what those of a replay mean."""
    try:
        sides = _sides_replayed(words)
    except SnaprtError:  # JAX has devices that no variant is called after
        sides = []
    named = zip(("--a", "--b"), (side.text for side in sides), strict=False)
    return [*itertools.chain.from_iterable(named), *_given(words, *_INPUTS)]


def _sides_replayed(words: Sequence[str]) -> list[Variant]:
    """Return the sides of a replay that run the program; none where it runs as by default."""

    def values_of(option: str) -> list[str]:
        return _given(words, option)[1::2]

    flags = (flag.partition("=") for flag in values_of("--xla-flag"))
    options = {name.lstrip("-"): option_value(value) for name, _, value in flags}
    if disabled := values_of("--disable-hlo-pass"):
        options["xla_disable_hlo_passes"] = ",".join(disabled)
    first = ["recorded", *values_of("--a")][-1]
    second = ["default", *values_of("--device"), *values_of("--b")][-1]
    if (first, second, options) == ("recorded", "default", {}):
        return []
    actual = parse_variant(second)
    if options:
        actual = with_text(with_options(actual, options))
    return [side for side in (parse_variant(first), actual) if side.kind != "recorded"]


def _commands(
    path: Path,
    words: Sequence[str],
    search: Sequence[str],
    localization: Localization | None = None,
) -> tuple[Command, ...]:
    """Return the commands to find out more about a file.

    Args:
        path: The file.
        words: The options to replay it with.
        search: The options to localize and to minify it with.
        localization: What was found so far.
    """
    file = shell_word(str(path))
    options, searching = _joined(words), _joined(search)
    # Where there is no reference, it was NaN and infinities that were looked for.
    localize, minify = (
        (" --find nonfinite", " --check nan")
        if localization and not localization.reference
        else ("", "")
    )
    return (
        Command("Replay it again", f"snaprt replay {file}{options}"),
        Command("Show what it contains", f"snaprt inspect {file}"),
        Command(
            "Find the operation where the difference starts",
            f"snaprt localize {file}{searching}{localize}",
        ),
        Command(
            "Find the smallest program that still shows it",
            f"snaprt minify {file}{searching}{minify}",
        ),
    )


def _joined(words: Sequence[str]) -> str:
    return "".join(f" {shell_word(word)}" for word in words)
