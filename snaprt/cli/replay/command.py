"""``snaprt replay``: run recorded executions again and compare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import click
from rich.text import Text
from snaprt_replay import batch
from snaprt_replay.batch import ReplayRequest
from snaprt_replay.compare.tolerance import ToleranceRequest
from snaprt_replay.load.case import CompilerOption
from snaprt_replay.report.model import FAILED, Report
from snaprt_replay.run import devices
from snaprt_replay.run.variants import variants
from snaprt_replay.run.variants.variants import Variant, option_value, parse_variant, with_options
from snaprt_replay.run.workers import forked_from_here

from snaprt import shown
from snaprt.cli import output, progress
from snaprt.cli.replay import formats
from snaprt.errors import UsageError

_SECONDS: Final = 120.0
_TOLERANCES: Final = frozenset({"rtol", "atol", "max_ulp"})
_NOT_ABOUT_THE_REPLAY: Final = frozenset(
    {"files", "processes", "address", "as_json", "profile", "save"}
)


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
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=output.PATH)
@click.option(
    "--device", metavar="cpu|gpu|tpu[:N]", help="Device to run on.  [default: JAX's choice]"
)
@click.option("--a", "a", metavar="VARIANT", help="First variant to judge.  [default: recorded]")
@click.option("--b", "b", metavar="VARIANT", help="Second variant to judge.  [default: --device]")
@click.option(
    "--reference", metavar="VARIANT", help="Variant to measure both against.  [default: f64]"
)
@click.option(
    "--timeout",
    type=output.LIMIT_OVER_0,
    metavar="SECONDS",
    help="Time limit for a run, which is then in a separate process.  [default: 120; none for a "
    "single FILE without -j, --a, --b or --reference]",
)
@click.option("--rtol", type=float, help="Allowed relative error.")
@click.option("--atol", type=float, help="Allowed absolute error.")
@click.option("--max-ulp", type=int, help="Allowed distance in ULPs.")
@click.option(
    "--repeat",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Run N times and check that the results are identical.",
)
@click.option(
    "--all-devices",
    is_flag=True,
    help="Run on every local device, and report devices whose results differ.",
)
@click.option(
    "--profile",
    type=output.PATH,
    metavar="DIR",
    help="Profile one more run, for `snaprt profile DIR`.",
)
@click.option("--save", type=output.PATH, metavar="FILE.npz", help="Save the outputs.")
@click.option("--inputs", type=output.PATH, metavar="FILE.npz", help="Run on these inputs.")
@click.option(
    "--outputs",
    type=output.PATH,
    metavar="FILE.npz",
    help="Compare with these results of --inputs.",
)
@click.option(
    "--random", "seed", type=click.IntRange(min=0), help="Run on random inputs with this seed."
)
@click.option(
    "--xla-flag",
    "compiler_options",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_compiler_options,
    help="Compile with this XLA option. Repeatable.",
)
@click.option(
    "--disable-hlo-pass",
    "disabled_passes",
    multiple=True,
    metavar="NAME",
    help="Compile without this XLA pass. Repeatable.",
)
@click.option(
    "--compile-only",
    is_flag=True,
    help="Compile for --device without running. DEVICE may be a TPU topology such as tpu:v5e:2x2.",
)
@click.option(
    "--save-hlo",
    type=output.PATH,
    metavar="FILE",
    help="File for the optimized HLO of --compile-only.  [default: named after FILE and device]",
)
@click.option(
    "--isolate/--no-isolate",
    "isolated",
    default=None,
    help="Run in a separate process, so that a crash in XLA is reported as an error.  [default: "
    "unless snaprt wrote the module]",
)
@click.option(
    "-j",
    "processes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Replay N files at a time, each in a separate process.",
)
@click.option(
    "--cluster",
    "address",
    metavar="ADDRESS",
    help="Replay on a Dask cluster: the scheduler's tcp://HOST:PORT, or a scheduler file.",
)
@formats.format_options
@formats.verbose_option
@output.json_option
@click.pass_context
def command(
    context: click.Context,
    files: tuple[Path, ...],
    device: str | None,
    a: str | None,
    b: str | None,
    reference: str | None,
    timeout: float | None,
    rtol: float | None,
    atol: float | None,
    max_ulp: int | None,
    repeat: int,
    all_devices: bool,
    profile: Path | None,
    save: Path | None,
    inputs: Path | None,
    outputs: Path | None,
    seed: int | None,
    compiler_options: Mapping[str, CompilerOption],
    disabled_passes: tuple[str, ...],
    compile_only: bool,
    save_hlo: Path | None,
    isolated: bool | None,
    processes: int | None,
    address: str | None,
    as_json: bool,
) -> None:
    """Run recorded executions again and compare the outputs with the recorded ones.

    FILE is a snaprt snapshot (*.inputs.snap), an XLA snapshot (*.snapshot.*.pb,
    *.hlo_unoptimized_snapshot.pb), or a StableHLO or HLO module, text or binary. For a folder, all
    recorded executions in it are replayed.

    An element passes if its error is at most atol + rtol * |recorded|, or at most max-ulp. If any
    of the three is given, the others default to 0. If none is given, the defaults depend on the
    dtype and are printed.

    For a program on several devices, name the file of one device; the others are found next to it.
    If there are too few devices, host devices are used. For an error raised while a graph was
    recorded, snaprt evaluates the failed operation again and compares the errors.

    The exit status is 0 if all outputs match, 1 if any differs, 2 if any file cannot be replayed.

    With --a, --b or --reference, each variant runs in a separate process, and the verdict says
    which one is wrong, or that rounding explains the difference from the reference. A VARIANT is
    recorded, a device (cpu, gpu:0, tpu), f64, op-by-op, interpreter,
    tpu-precision=default|high|highest or python=PATH, followed by optional modifiers after commas:
    disable-hlo-pass=NAME, xla-flags=--xla_..., optimization=0, matmul-precision=highest, fast-math.

    \b
    Example:
      snaprt replay dump/*.inputs.snap
      snaprt replay step.inputs.snap --device gpu --max-ulp 4 --repeat 3
      snaprt replay step.inputs.snap --repeat 20 --all-devices
      snaprt replay module.mlir --random 0 --save out.npz
      snaprt replay module.mlirbc --inputs in.npz --outputs recorded.npz
      snaprt replay step.inputs.snap --a recorded --b cpu,optimization=0 --reference f64
      snaprt replay step.inputs.snap --device gpu --profile profile
      snaprt replay step.inputs.snap --device tpu:v5e:2x2 --compile-only
      snaprt replay dump -j 4 --junit replay.xml --html replay.html
    """
    judges = a is not None or b is not None or reference is not None
    if compile_only:
        never_runs = {"repeat", *_TOLERANCES}
        why = "cannot be combined with --compile-only"
        output.refuse_options(context, never_runs, why, "run it too: leave out --compile-only")
    else:
        output.refuse_options(context, {"save_hlo"}, "needs --compile-only", "add --compile-only")
    if judges:
        why = "cannot be combined with --a, --b or --reference"
        hint = "what rounding explains takes the place of a tolerance there"
        output.refuse_options(context, _TOLERANCES, why, hint)
    if b is not None:
        hint = "--b names the device, too: --b gpu,optimization=0"
        output.refuse_options(context, {"device"}, "cannot be combined with --b", hint)
    context.with_resource(forked_from_here())
    is_batch = (
        processes is not None
        or address is not None
        or bool(formats.asked_for())
        or any(path.is_dir() for path in files)
    )
    if disabled_passes:
        compiler_options = {**compiler_options, "xla_disable_hlo_passes": ",".join(disabled_passes)}
    if isolated is False and timeout is not None:
        raise UsageError(
            "--timeout cannot be combined with --no-isolate",
            hint="only a run in a separate process can be stopped",
        )
    is_limited = is_batch or timeout is not None
    if processes is not None or address is not None or (is_limited and isolated is None):
        isolated = True
    if timeout is None and (is_batch or judges or compile_only):
        timeout = _SECONDS
    request = ReplayRequest(
        variant=_variant(device, compiler_options, compile_only),
        sides=(
            parse_variant(a or "recorded"),
            with_options(parse_variant(b or device or "default"), compiler_options),
            parse_variant(reference or "f64"),
        )
        if judges
        else None,
        repeat=repeat,
        all_devices=all_devices,
        tolerance=ToleranceRequest(rtol, atol, max_ulp),
        inputs=inputs,
        random_seed=seed,
        outputs=outputs,
        isolated=isolated,
        timeout=timeout,
        profile=None if profile is None else output.writable(profile, "--profile"),
        save=save,
        save_hlo=save_hlo,
        words=output.given_words(context, _NOT_ABOUT_THE_REPLAY),
    )
    formats.check_writable()
    executions = batch.executions(files)
    _check(request, executions, processes, address)
    reports = {}
    for number, report in _replayed(executions, request, processes, address, is_batch):
        reports[number] = report
        failed = report.headline.word == FAILED
        if not is_batch and not as_json:
            if len(reports) > 1 and not failed:
                output.console.print()
            formats.show(report)
        if save is not None and not failed:
            output.log.print(f"saved the outputs to {save}")
        if profile is not None and not failed:
            output.log.print(f"profile of one run in {profile}; see `snaprt profile {profile}`")
    in_order = [reports[number] for number in range(len(executions))]
    with formats.written(in_order):
        if as_json:
            formats.print_json(in_order)
        elif len(in_order) > 1:
            if not is_batch:
                output.console.print()
            formats.show_sum(in_order, alone=is_batch)
        elif is_batch:
            formats.show(in_order[0])
    context.exit(formats.status_of(in_order))


def _variant(
    device: str | None, options: Mapping[str, CompilerOption], compile_only: bool
) -> Variant:
    if compile_only:
        return variants.compile_only(device, options)
    variant = parse_variant("default" if device is None else devices.check_device_name(device))
    if variant.kind != "device":
        raise UsageError(
            f"--device takes cpu, gpu or tpu, and {device} is another kind of variant",
            hint=f"--b {device} compares with it",
        )
    return with_options(variant, options)


def _check(
    request: ReplayRequest, files: Sequence[Path], processes: int | None, address: str | None
) -> None:
    """Raise UsageError where options do not go together."""
    if processes is not None and address is not None:
        raise UsageError(
            "-j cannot be combined with --cluster",
            hint="a cluster runs as many processes as it has workers",
        )
    saving = {
        "--save": request.save is not None,
        "--save-hlo": request.save_hlo is not None,
        "--profile": request.profile is not None,
    }
    for option in filter(saving.__getitem__, saving):
        if address is not None:
            raise UsageError(
                f"{option} cannot be combined with --cluster",
                hint="the workers of a cluster save no files",
            )
        if len(files) > 1:
            raise UsageError(f"{option} takes a single FILE", hint="replay the files one by one")
    runs_once = not request.sides and request.variant.kind != "compile-only"
    for option, is_given, others, can_go in (
        ("--all-devices", request.all_devices, "", runs_once),
        (
            "--profile",
            saving["--profile"],
            "--all-devices, ",
            runs_once and not request.all_devices,
        ),
        ("--save", saving["--save"], "", runs_once),
    ):
        if is_given and not can_go:
            raise UsageError(
                f"{option} cannot be combined with {others}--a, --b, --reference or --compile-only",
                hint="see `snaprt replay --help`",
            )
    platform, _, number = (request.variant.device or "").partition(":")
    if request.all_devices and number:
        raise UsageError(
            f"--all-devices cannot be combined with --device {platform}:{number}, a single device",
            hint=f"name the platform: --device {platform}",
        )
    if request.save is not None and request.save.suffix != ".npz":
        raise UsageError(
            f"cannot save outputs as {request.save}: only .npz is supported",
            hint="--save outputs.npz",
        )


def _replayed(
    files: Sequence[Path],
    request: ReplayRequest,
    processes: int | None,
    address: str | None,
    shows_progress: bool,
) -> Iterator[tuple[int, Report]]:
    """Yield reports as they are made; if ``tells``, say on stderr how far it is."""
    if address is not None:
        reports = batch.replay_on_cluster(files, request, address)
    else:
        reports = batch.replay_files(files, request, processes or 1)
    if not shows_progress:
        yield from reports
        return
    with progress.showing("replaying") as line:
        if len(files) > 1:
            line.done(0, len(files))
        for count, (number, report) in enumerate(reports, 1):
            line.done(count, len(files))
            if len(files) > 1:
                name = f" {shown.name(report.path, 400)}"
                output.log.print(
                    Text.assemble(f"[{count}/{len(files)}] ", formats.word(report.headline), name)
                )
            yield number, report
