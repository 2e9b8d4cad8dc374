"""``snaprt replay``: run recorded executions again and compare.

It knows options and how results are shown; the work is `snaprt_replay.rerun`'s.
"""

from __future__ import annotations

import dataclasses
import itertools
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
from rich.text import Text
from snaprt_replay import devices
from snaprt_replay.array_statistics import describe
from snaprt_replay.case import CompilerOption
from snaprt_replay.rerun import Replay, replay
from snaprt_replay.results import MISMATCH, Comparison, to_json, worst_verdict
from snaprt_replay.tolerance import ToleranceRequest
from snaprt_replay.trace_errors import TraceErrorReplay, replay_trace_error

from snaprt.cli import output, tables
from snaprt.errors import SnaprtError, UsageError
from snaprt.snapshot import places
from snaprt.snapshot.executions import executions_in
from snaprt.snapshot.read import sibling_inputs

SCHEMA: Final = "snaprt.replay"
SCHEMA_VERSION: Final = 1

_PATH: Final = click.Path(path_type=Path)


def _compiler_options(
    context: click.Context, parameter: click.Parameter, values: Sequence[str]
) -> dict[str, CompilerOption]:
    options: dict[str, CompilerOption] = {}
    for text in values:
        name, equals, value = text.lstrip("-").partition("=")
        if not name or not equals:
            raise click.BadParameter(f"{text!r} is not NAME=VALUE", context, parameter)
        options[name] = _option_value(value)
    return options


def _option_value(text: str) -> CompilerOption:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@click.command("replay")
@click.argument(
    "files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path)
)
@click.option("--device", metavar="cpu|gpu|tpu[:N]", help="Where to run.  [default: JAX's choice]")
@click.option("--rtol", type=float, help="Allow this error relative to the recorded element.")
@click.option("--atol", type=float, help="Allow this absolute error.")
@click.option("--max-ulp", type=int, help="Allow this distance in representable numbers.")
@click.option(
    "--repeat",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Run N times: does it agree with itself?",
)
@click.option("--save", type=_PATH, metavar="FILE.npz", help="Save the outputs.")
@click.option("--inputs", type=_PATH, metavar="FILE.npz", help="Run on these inputs.")
@click.option("--random", "seed", type=click.IntRange(min=0), help="Run on random inputs: a seed.")
@click.option(
    "--xla-flag",
    "compiler_options",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_compiler_options,
    help="Compile with this XLA option; may be given several times.",
)
@click.option(
    "--isolate/--no-isolate",
    "isolated",
    default=None,
    help="Run in a process of its own, so that a crash of XLA is reported like any other error."
    "  [default: unless snaprt wrote the module]",
)
@output.json_option
@click.pass_context
def command(
    context: click.Context,
    files: tuple[Path, ...],
    device: str | None,
    rtol: float | None,
    atol: float | None,
    max_ulp: int | None,
    repeat: int,
    save: Path | None,
    inputs: Path | None,
    seed: int | None,
    compiler_options: Mapping[str, CompilerOption],
    isolated: bool | None,
    as_json: bool,
) -> None:
    """Run recorded executions again and compare their outputs with the recorded ones.

    FILE is a snapshot of snaprt's (*.inputs.snap) or of XLA's (*.snapshot.*.pb,
    *.hlo_unoptimized_snapshot.pb), or a module without inputs: StableHLO or HLO, text or binary.

    An element passes if its error is at most atol + rtol * |recorded|, or at most max-ulp. As soon
    as one of the three is given, the others are 0; without any, defaults by dtype hold, which are
    printed.

    Of a program on several devices, name the file of one of them: the others are found beside it,
    and host devices take their place where there are too few. Of an error that was raised while
    a graph was recorded, the operation that failed is evaluated again, and its errors compared.

    The status is 0 if all match, 1 if one differs, 2 if one cannot be replayed.

    \b
    Example:
      snaprt replay dump/*.inputs.snap
      snaprt replay step.inputs.snap --device gpu --max-ulp 4 --repeat 3
      snaprt replay module.mlir --random 0 --save out.npz
    """
    if device is not None:
        devices.check_device_name(device)
    if save is not None:
        _check_save(save, files)
    options: dict[str, Any] = {
        "device": device,
        "repeat": repeat,
        "tolerance": ToleranceRequest(rtol, atol, max_ulp),
        "inputs": inputs,
        "random_seed": seed,
        "compiler_options": compiler_options,
        "isolated": isolated,
    }
    outcomes: list[_Outcome] = []
    for outcome in _replay_all(_distinct(files), options):
        outcomes.append(outcome)
        if save is not None and outcome.replay is not None:
            _save(save, outcome.replay)
        if not as_json:
            _show(outcome, is_first=len(outcomes) == 1)
    status = max(outcome.status for outcome in outcomes)
    if as_json:
        files_data = [_outcome_json(outcome) for outcome in outcomes]
        output.emit_json(SCHEMA, SCHEMA_VERSION, {"status": status, "files": files_data})
    elif len(outcomes) > 1:
        _show_summary(outcomes)
    context.exit(status)


@dataclasses.dataclass(frozen=True, eq=False)
class _Outcome:
    """What became of one file: a replay, or the error that prevented it."""

    path: Path
    replay: Replay | None
    error: SnaprtError | None = None
    trace_error: TraceErrorReplay | None = None

    @property
    def status(self) -> int:
        if self.trace_error is not None:
            return output.EXIT_OK if self.trace_error.reproduces else output.EXIT_MISMATCH
        if self.replay is None:
            return output.EXIT_FAILURE
        return output.EXIT_MISMATCH if self.replay.mismatch else output.EXIT_OK

    @property
    def verdict(self) -> str:
        if self.trace_error is not None:
            does = "reproduces" if self.trace_error.reproduces else "does not reproduce"
            return f"{does} the error"
        if self.replay is None:
            return "failed"
        if self.replay.played.agrees_with_itself is False:
            return "does not agree with itself"
        comparison = self.replay.comparison
        if comparison is None:
            return "nothing to compare with"
        return worst_verdict(one.verdict for one in (comparison, *self.replay.by_device))


def _distinct(files: Sequence[Path]) -> list[Path]:
    """Leave out each ``.outputs.snap`` whose ``.inputs.snap`` is given too, as by ``dump/*``.

    A packed file stands for the executions in it.
    """
    unpacked = [
        one
        for path in files
        for one in ((executions_in(path) if places.is_pack_file(path) else None) or [path])
    ]
    given = {path.absolute() for path in unpacked}
    kept = []
    for path in dict.fromkeys(unpacked):
        inputs = sibling_inputs(path)
        if inputs is None or inputs.absolute() not in given:
            kept.append(path)
    return kept


def _replay_all(files: Sequence[Path], options: Mapping[str, Any]) -> Iterator[_Outcome]:
    joined: set[Path] = set()  # files of other devices, which their first one brought along
    for path in files:
        if path.absolute() in joined:
            continue
        try:
            trace_error = replay_trace_error(path)
            if trace_error is not None:
                yield _Outcome(path, None, trace_error=trace_error)
                continue
            done = replay(path, **options)
            joined.update(one.absolute() for one in done.case.files)
            yield _Outcome(path, done)
        except SnaprtError as error:
            output.error(tables.printable(error.message), tables.printable(error.hint))
            yield _Outcome(path, None, error)


# --- saving ---


def _check_save(save: Path, files: Sequence[Path]) -> None:
    if save.suffix != ".npz":
        raise UsageError(f"outputs are saved as .npz, not as {save}", hint="--save outputs.npz")
    if len(_distinct(files)) > 1:
        raise UsageError("--save takes the outputs of one FILE", hint="replay them one by one")


def _save(path: Path, result: Replay) -> None:
    arrays = result.played.outputs
    try:
        # As numpy.savez does, which takes no array called "file", a name that a file may bring.
        with zipfile.ZipFile(path, "w") as archive:
            for array in arrays:
                with archive.open(f"{array.name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array.value, allow_pickle=False)
    except OSError as error:
        raise UsageError(
            f"cannot save outputs to {path}: {error.strerror or error}",
            hint="is the folder there, is the disk full?",
        ) from error
    output.log.print(f"saved {len(arrays)} outputs to {path}")


# --- showing ---


def _show(outcome: _Outcome, *, is_first: bool) -> None:
    result = outcome.replay
    if not is_first and outcome.error is None:
        output.console.print()
    if outcome.trace_error is not None:
        _show_trace_error(outcome.trace_error)
    if result is None:
        return
    case, played, comparison = result.case, result.played, result.comparison
    output.console.print(f"{outcome.path}: {case.format}, module {tables.printable(case.name)}")
    source = "loaded from the cache" if played.from_cache else "compiled"
    times = ", ".join(map(tables.seconds_text, played.execute_seconds[:3]))
    more = ", ..." if len(played.execute_seconds) > 3 else ""
    alone = " in a process of its own" if played.isolated else ""
    output.console.print(
        f"replayed on {played.device} ({played.environment['device_kind']}){alone}: "
        f"{source} in {tables.seconds_text(played.compile_seconds)}, ran in {times}{more}"
    )
    for note in case.notes:
        output.console.print(f"note: {tables.printable(note)}")
    for warning in result.warnings:
        told = tables.printable(warning)
        output.console.print(Text.assemble(("warning:", "yellow"), f" {told}"))
    output.console.print()
    if comparison is None:
        output.console.print(tables.statistics_table([describe(one) for one in played.outputs]))
    else:
        output.console.print(tables.comparison_table(comparison))
        output.console.print()
        for line in tables.tolerance_lines(comparison):
            output.console.print(f"tolerance: {line}")
    for numbers, told in _rows_of_devices(result.by_device):
        output.console.print(f"{numbers}: {tables.printable(told)}")
    output.console.print()
    _show_verdict(outcome)


def _show_trace_error(found: TraceErrorReplay) -> None:
    recorded = found.recorded
    lines = [
        f"{found.path}: an error while the graph was recorded, module {found.name}",
        f"recorded: {recorded.kind}: {recorded.message}",
        f"operation: {found.operation or 'none; Python code raised the error'}",
        *(f"  at {frame}" for frame in recorded.stack),
        f"graph so far: {recorded.pending} operations",
    ]
    if recorded.left_out:
        lines.append(f"note: {recorded.left_out} of them, on other devices, are not in the file")
    lines += [f"note: not in the file: {one}" for one in recorded.unencodable]
    for line in lines:
        output.console.print(tables.printable(line))
    for warning in found.warnings:
        output.console.print(Text.assemble(("warning:", "yellow"), f" {tables.printable(warning)}"))
    output.console.print()
    word, style = (
        ("REPRODUCES", "green") if found.reproduces else ("DOES NOT REPRODUCE", "bold red")
    )
    output.console.print(Text.assemble((word, style), f": {tables.printable(found.summary)}"))


def _rows_of_devices(by_device: Sequence[Comparison]) -> Iterator[tuple[str, str]]:
    """Yield ``devices 0-3`` and what was found there, once for each row with the same findings."""
    found = enumerate(one.summary for one in by_device)
    for told, row in itertools.groupby(found, key=lambda one: one[1]):
        numbers = [number for number, _ in row]
        if len(numbers) == 1:
            yield f"device {numbers[0]}", told
        else:
            yield f"devices {numbers[0]}-{numbers[-1]}, each", told


def _show_verdict(outcome: _Outcome) -> None:
    assert outcome.replay is not None
    played, comparison = outcome.replay.played, outcome.replay.comparison
    if played.repeats is not None:
        runs = len(played.execute_seconds)
        if played.agrees_with_itself:
            output.console.print(f"{runs} runs gave the same bits")
        else:
            told = tables.printable(played.repeats.summary)
            line = Text.assemble(
                ("DOES NOT AGREE WITH ITSELF", "bold red"),
                f": {played.repeats.actual_name} and run 1: {told}",
            )
            output.console.print(line)
    if comparison is None:
        output.console.print("nothing to compare with: no outputs were recorded for these inputs")
        return
    word, style = ("MISMATCH", "bold red") if outcome.verdict == MISMATCH else ("MATCH", "green")
    told = comparison.summary
    bad = [str(n) for n, one in enumerate(outcome.replay.by_device) if one.verdict == MISMATCH]
    if bad and comparison.verdict != MISMATCH:
        told = f"the whole arrays match, but not what these devices hold: {', '.join(bad)}"
    output.console.print(Text.assemble((word, style), f": {tables.printable(told)}"))


def _show_summary(outcomes: Sequence[_Outcome]) -> None:
    output.console.print()
    for outcome in outcomes:
        output.console.print(f"{outcome.verdict:<24} {outcome.path}")
    bad = sum(outcome.status != output.EXIT_OK for outcome in outcomes)
    output.console.print(
        f"{len(outcomes)} files replayed, {bad} of them with a mismatch or failure"
    )


def _outcome_json(outcome: _Outcome) -> dict[str, Any]:
    data: dict[str, Any] = {
        "path": outcome.path,
        "verdict": outcome.verdict,
        "status": outcome.status,
    }
    if outcome.trace_error is not None:
        found = outcome.trace_error
        return {
            **data,
            "trace_error": dataclasses.asdict(found.recorded),
            "operation": found.operation,
            "raised": dataclasses.asdict(found.raised),
            "summary": found.summary,
            "warnings": found.warnings,
        }
    if outcome.replay is None:
        assert outcome.error is not None
        return {**data, "error": outcome.error.message, "hint": outcome.error.hint}
    case, played, comparison = (
        outcome.replay.case,
        outcome.replay.played,
        outcome.replay.comparison,
    )
    return {
        **data,
        "format": case.format,
        "name": case.name,
        "device": played.device,
        "isolated": played.isolated,
        "compile_seconds": played.compile_seconds,
        "from_cache": played.from_cache,
        "execute_seconds": played.execute_seconds,
        "recorded_environment": case.environment,
        "environment": played.environment,
        "compiler_options": case.compiler_options,
        "notes": case.notes,
        "warnings": outcome.replay.warnings,
        "comparison": None if comparison is None else to_json(comparison),
        "files": case.files or (case.path,),
        "by_device": [to_json(one) for one in outcome.replay.by_device],
        "repeats": None if played.repeats is None else to_json(played.repeats),
        "outputs": [describe(array) for array in played.outputs],
    }
