"""``snaprt replay``: run recorded executions again and compare.

It knows options and how results are shown; the work is `snaprt_replay.run.rerun`'s.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
from snaprt_replay.batch.many import ReplayRequest
from snaprt_replay.compare.tolerance import ToleranceRequest
from snaprt_replay.load.case import CompilerOption
from snaprt_replay.load.trace_errors import replay_trace_error
from snaprt_replay.run import devices
from snaprt_replay.run.rerun import Replay, replay
from snaprt_replay.run.variants import variants
from snaprt_replay.run.variants.variants import option_value, parse_variant, with_options

from snaprt.cli import output, tables
from snaprt.cli.replay import compiling, many, result_view, verdict
from snaprt.cli.replay.result_view import Outcome
from snaprt.errors import SnaprtError, UsageError
from snaprt.snapshot.format import places
from snaprt.snapshot.format.read import sibling_inputs
from snaprt.snapshot.share.executions import executions_in

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
        options[name] = option_value(value)
    return options


@click.command("replay")
@click.argument(
    "files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path)
)
@click.option("--device", metavar="cpu|gpu|tpu[:N]", help="Where to run.  [default: JAX's choice]")
@click.option("--a", "a", metavar="VARIANT", help="One side: judge it.  [default: recorded]")
@click.option("--b", "b", metavar="VARIANT", help="The other side: judge it.  [default: --device]")
@click.option(
    "--reference", metavar="VARIANT", help="What both sides are measured against.  [default: f64]"
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    metavar="SECONDS",
    help="Time for one variant with --a, --b, --reference or --compile-only, and for one file of "
    "a folder or with -j, --html or --junit.  [default: 120]",
)
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
    "--disable-hlo-pass",
    "disabled_passes",
    multiple=True,
    metavar="NAME",
    help="Compile without this pass of XLA's; may be given several times.",
)
@click.option(
    "--compile-only",
    is_flag=True,
    help="Compile for --device, a TPU's topology such as tpu:v5e:2x2 too, and run nothing.",
)
@click.option(
    "--save-hlo",
    type=_PATH,
    metavar="FILE",
    help="Where --compile-only saves the optimized HLO.  [default: named after FILE and device]",
)
@click.option(
    "--isolate/--no-isolate",
    "isolated",
    default=None,
    help="Run in a process of its own, so that a crash of XLA is reported like any other error."
    "  [default: unless snaprt wrote the module]",
)
@click.option(
    "-j",
    "processes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Replay N files at a time, each in a process of its own.",
)
@click.option(
    "--cluster",
    "address",
    metavar="ADDRESS",
    help="Replay on a Dask cluster: its scheduler's tcp://HOST:PORT, or a scheduler file.",
)
@click.option("--html", type=_PATH, metavar="FILE", help="Write what was found as a page.")
@click.option("--junit", type=_PATH, metavar="FILE", help="Write JUnit XML, for CI.")
@output.json_option
@click.pass_context
def command(
    context: click.Context,
    files: tuple[Path, ...],
    device: str | None,
    a: str | None,
    b: str | None,
    reference: str | None,
    timeout: float,
    rtol: float | None,
    atol: float | None,
    max_ulp: int | None,
    repeat: int,
    save: Path | None,
    inputs: Path | None,
    seed: int | None,
    compiler_options: Mapping[str, CompilerOption],
    disabled_passes: tuple[str, ...],
    compile_only: bool,
    save_hlo: Path | None,
    isolated: bool | None,
    processes: int | None,
    address: str | None,
    html: Path | None,
    junit: Path | None,
    as_json: bool,
) -> None:
    """Run recorded executions again and compare their outputs with the recorded ones.

    FILE is a snapshot of snaprt's (*.inputs.snap) or of XLA's (*.snapshot.*.pb,
    *.hlo_unoptimized_snapshot.pb), or a module without inputs: StableHLO or HLO, text or binary. A
    folder stands for all recorded executions in it.

    An element passes if its error is at most atol + rtol * |recorded|, or at most max-ulp. As soon
    as one of the three is given, the others are 0; without any, defaults by dtype hold, which are
    printed.

    Of a program on several devices, name the file of one of them: the others are found beside it,
    and host devices take their place where there are too few. Of an error that was raised while
    a graph was recorded, the operation that failed is evaluated again, and its errors compared.

    The status is 0 if all match, 1 if one differs, 2 if one cannot be replayed.

    With --a, --b or --reference, two variants run in processes of their own, and the verdict says
    which of them is wrong: neither, if rounding explains how far they are from the reference.
    A VARIANT is recorded, a device (cpu, gpu:0, tpu), f64, op-by-op, interpreter,
    tpu-precision=default|high|highest or python=PATH, then additions after commas:
    disable-hlo-pass=NAME, xla-flags=--xla_..., optimization=0, matmul-precision=highest, fast-math.

    \b
    Example:
      snaprt replay dump/*.inputs.snap
      snaprt replay step.inputs.snap --device gpu --max-ulp 4 --repeat 3
      snaprt replay module.mlir --random 0 --save out.npz
      snaprt replay step.inputs.snap --a recorded --b cpu,optimization=0 --reference f64
      snaprt replay step.inputs.snap --device tpu:v5e:2x2 --compile-only
      snaprt replay dump -j 4 --junit replay.xml --html replay.html
    """
    batch = many.Batch(processes, address, html, junit)
    judges = a is not None or b is not None or reference is not None
    batch.check(saves=save is not None, judges=judges, compiles_only=compile_only)
    is_batch = batch.is_asked_for(files)
    files = tuple(many.expand(files))
    if disabled_passes:
        compiler_options = {**compiler_options, "xla_disable_hlo_passes": ",".join(disabled_passes)}
    if compile_only:
        chosen = variants.compile_only(device, compiler_options)
        context.exit(
            compiling.compile_all(_distinct(files), chosen, timeout, save_hlo, as_json=as_json)
        )
    if device is not None:
        devices.check_device_name(device)
    if judges:
        judging = verdict.Judging(
            a=parse_variant(a or "recorded"),
            b=with_options(parse_variant(b or device or "default"), compiler_options),
            reference=parse_variant(reference or "f64"),
            repeat=repeat,
            timeout=timeout,
            inputs=inputs,
            random_seed=seed,
            words=many.words(context),
        )
        context.exit(
            verdict.judge_all(_distinct(files), judging, as_json=as_json, html=html, junit=junit)
        )
    if save is not None:
        _check_save(save, files)
    tolerance = ToleranceRequest(rtol, atol, max_ulp)
    if is_batch:
        request = ReplayRequest(
            variant=with_options(parse_variant(device or "default"), compiler_options),
            repeat=repeat,
            tolerance=tolerance,
            inputs=inputs,
            random_seed=seed,
            timeout=timeout,
            words=many.words(context),
        )
        context.exit(many.replay_many(_distinct(files), request, batch, as_json=as_json))
    options: dict[str, Any] = {
        "device": device,
        "repeat": repeat,
        "tolerance": tolerance,
        "inputs": inputs,
        "random_seed": seed,
        "compiler_options": compiler_options,
        "isolated": isolated,
    }
    outcomes: list[Outcome] = []
    for outcome in _replay_all(_distinct(files), options):
        outcomes.append(outcome)
        if save is not None and outcome.replay is not None:
            _save(save, outcome.replay)
        if not as_json:
            result_view.show(outcome, is_first=len(outcomes) == 1)
    status = max(outcome.status for outcome in outcomes)
    if as_json:
        files_data = [result_view.to_json(outcome) for outcome in outcomes]
        output.emit_json(SCHEMA, SCHEMA_VERSION, {"status": status, "files": files_data})
    elif len(outcomes) > 1:
        result_view.show_summary(outcomes)
    context.exit(status)


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


def _replay_all(files: Sequence[Path], options: Mapping[str, Any]) -> Iterator[Outcome]:
    joined: set[Path] = set()  # files of other devices, which their first one brought along
    for path in files:
        if path.absolute() in joined:
            continue
        try:
            trace_error = replay_trace_error(path)
            if trace_error is not None:
                yield Outcome(path, None, trace_error=trace_error)
                continue
            done = replay(path, **options)
            joined.update(one.absolute() for one in done.case.files)
            yield Outcome(path, done)
        except SnaprtError as error:
            output.error(tables.printable(error.message), tables.printable(error.hint))
            yield Outcome(path, None, error)


def _check_save(save: Path, files: Sequence[Path]) -> None:
    if save.suffix != ".npz":
        raise UsageError(f"outputs are saved as .npz, not as {save}", hint="--save outputs.npz")
    if len(_distinct(files)) > 1:
        raise UsageError("--save takes the outputs of one FILE", hint="replay them one by one")


def _save(path: Path, result: Replay) -> None:
    arrays = result.played.outputs
    # As numpy.savez does, which takes no array called "file", a name that a file may bring.
    with output.writing(f"save outputs to {path}"), zipfile.ZipFile(path, "w") as archive:
        for array in arrays:
            with archive.open(f"{array.name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array.value, allow_pickle=False)
    output.log.print(f"saved {len(arrays)} outputs to {path}")
