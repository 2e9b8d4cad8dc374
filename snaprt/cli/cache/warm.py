"""``snaprt cache collect`` and ``warm``: write down what a run compiles, and compile it before."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from snaprt.cli import output, progress
from snaprt.cli.cache import warming
from snaprt.cli.cache.warming import Job, Progress, Result
from snaprt.cli.cache.words import SCHEMA_VERSION, counted, dir_option
from snaprt.cli.run import command as run_command
from snaprt.compile.ahead.collection import collection
from snaprt.errors import UsageError

_MODULES: Final = (".mlir", ".mlirbc", ".stablehlo", ".inputs.snap")
_PLATFORMS: Final = ("cpu", "gpu")
#: XLA may add the traceback of an operation; --json has all of it.
_ERROR_LINES: Final = 4


@click.command(
    "collect",
    cls=run_command.ProgramCommand,
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    metavar="DIR",
    help="Write the programs here; those that are there stay.",
)
@click.option(
    "--steps", type=click.IntRange(min=1), metavar="N", help="End the run after N marked steps."
)
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="-- SCRIPT.py [ARGS]...")
@click.pass_context
def collect(context: click.Context, out: Path, steps: int | None, program: tuple[str, ...]) -> None:
    """Write down the programs that a Python program would compile, without compiling them.

    It runs lazily, with zeros in the place of every result. What it wants next is right as long as
    that does not depend on values; an error that the zeros cause ends it, and what it wanted until
    then is kept. It does everything else for real: files that it writes are written, from zeros.

    \b
    Example:
      snaprt cache collect --out programs --steps 3 -- train.py --epochs 1
      snaprt cache warm programs --target cpu
    """
    if not program:
        raise click.UsageError("there is no program to run", context)
    with output.writing(f"write into {out}", hint="name a folder of yours with --out"):
        out.expanduser().mkdir(parents=True, exist_ok=True)
    os.environ["SNAPRT_COLLECT"] = str(out.expanduser().absolute())
    os.environ["SNAPRT_PREFETCH"] = "0"  # nothing that it would load is run
    collection.most_steps = steps
    status = run_command.run(program, lazy=True)
    if status == output.EXIT_INTERRUPTED:
        context.exit(status)
    if not collection.programs:
        raise UsageError(
            "the program wanted nothing compiled",
            hint="collect runs it as `snaprt run --lazy` does: that must record operations.",
        )
    written = collection.programs - sum(collection.left_out.values())
    output.log.print(
        f"Collected {counted(written, 'program')}, {collection.written} of them new, into {out}. "
        "None was run: every result was zero."
    )
    if status:
        output.log.print(
            f"The program ended with status {status}; what it wanted until then is kept."
        )
    if collection.over_devices:
        output.log.print(
            f"{counted(collection.over_devices, 'program')} run over several devices: how their "
            "results are laid out is known once they are compiled, and what uses them may differ."
        )
    if collection.without_digest:
        output.log.print(
            f"{counted(collection.without_digest, 'program')} will be found only after lowering."
        )
    for reason, number in collection.left_out.most_common():
        output.log.print(f"{counted(number, 'program')} left out: {reason}.")


class _Target(click.ParamType):
    """``cpu``, ``gpu`` or ``tpu:`` and a topology."""

    name = "target"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the target as it was given."""
        platform, _, topology = value.partition(":")
        if value in _PLATFORMS or (platform == "tpu" and topology):
            return value
        return self.fail(f"{value!r} is neither cpu nor gpu nor a TPU topology such as tpu:v5e:2x2")


@click.command("warm")
@click.argument(
    "files",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path, exists=True),
    metavar="FILE|DIR...",
)
@click.option(
    "--target", type=_Target(), required=True, metavar="TARGET", help="cpu, gpu or tpu:TOPOLOGY."
)
@click.option(
    "-j",
    "processes",
    type=click.IntRange(min=1),
    metavar="N",
    help="How many processes compile; by default one for each CPU core, and one for a GPU.",
)
@dir_option
@output.json_option
@click.pass_context
def warm(
    context: click.Context,
    files: tuple[Path, ...],
    target: str,
    processes: int | None,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Compile programs into the cache before they are run.

    FILE is what `snaprt cache collect` wrote, for its run; or a snapshot or a StableHLO module, for
    `snaprt replay`. With a TPU topology, libtpu compiles on a machine that has no TPU, and the
    cache keeps the serialized executable under a key of that topology.

    \b
    Example:
      snaprt cache warm programs --target cpu -j 8
      snaprt cache warm programs --target tpu:v5e:2x2
    """
    jobs = _jobs(files, target)
    if folder is not None:
        os.environ["SNAPRT_CACHE_DIR"] = str(folder.expanduser().absolute())
    os.environ["SNAPRT_CACHE"] = "1"
    os.environ["SNAPRT_CACHE_MODE"] = "read-write"
    if processes is None:
        processes = 1 if target == "gpu" else os.cpu_count() or 1
    with progress.showing(f"compiling {counted(len(jobs), 'program')} for {target}"):
        results = warming.warm(jobs, target, processes, _report)
    failed = [result for result in results if result.error]
    there = sum(result.was_there for result in results)
    if as_json:
        rows = [
            {
                "file": r.job.file,
                "key": r.key or None,
                "was_there": r.was_there,
                "compile_seconds": r.seconds,
                "error": r.error or None,
            }
            for r in results
        ]
        output.emit_json("snaprt.cache.warm", SCHEMA_VERSION, {"target": target, "programs": rows})
    else:
        output.log.print(
            f"{counted(len(results) - there - len(failed), 'program')} compiled for {target}, "
            f"{there} there before, {len(failed)} failed."
        )
    if failed:
        context.exit(output.EXIT_FAILURE)


def _report(progress: Progress, result: Result) -> None:
    number = f"[{len(progress.done)}/{len(progress.jobs)}] {result.job.name}"
    if result.error:
        lines = [line.rstrip() for line in result.error.splitlines() if line.strip()]
        output.log.print("\n".join([f"{number}: failed: {lines[0]}", *lines[1:_ERROR_LINES]]))
        if result.hint:
            output.log.print(f"  {result.hint}")
        return
    what = "there before" if result.was_there else f"compiled in {result.seconds:.1f} s"
    left = progress.seconds_left()
    estimate = f", about {left:.0f} s left" if left else ""
    output.log.print(f"{number}: {what}{estimate}")


def _jobs(files: Sequence[Path], target: str) -> list[Job]:
    from snaprt.compile.ahead.collect import SUFFIX, read_program

    paths = [path for file in files for path in (_inside(file) if file.is_dir() else [file])]
    jobs = []
    modules = set()
    for path in dict.fromkeys(path.absolute() for path in paths):
        if path.name.endswith(SUFFIX):
            program = read_program(path)
            module = path.parent / program.module
            modules.add(module)
            flags = list(program.xla_flags)
            if program.platform == "cpu":
                flags.append(f"--xla_force_host_platform_device_count={program.device_count}")
            environment = _environment(target) | {"XLA_FLAGS": shlex.join(flags)}
            size = module.stat().st_size if module.exists() else 1
            jobs.append(Job(path, f"{program.name} {program.graph_id}", environment, size))
        else:
            jobs.append(Job(path, path.name, _environment(target), path.stat().st_size))
    return [job for job in jobs if job.file not in modules]


def _inside(folder: Path) -> list[Path]:
    from snaprt.compile.ahead.collect import SUFFIX

    found = sorted(path for path in folder.iterdir() if path.name.endswith((SUFFIX, *_MODULES)))
    if not found:
        raise UsageError(
            f"there is nothing to compile in {folder}",
            hint="`snaprt cache collect --out DIR -- SCRIPT.py` writes programs into a directory.",
        )
    return found


def _environment(target: str) -> dict[str, str]:
    """Return what a process finds in the environment that compiles for ``target``."""
    common = {"SNAPRT_COLLECT": "", "SNAPRT_DUMP_DIR": "", "SNAPRT_METRICS_FILE": ""}
    if target == "gpu":
        # Several processes share its memory.
        return common | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    # A topology is there without its platform; a machine's own accelerator is left alone.
    return common | {"JAX_PLATFORMS": "cpu"}
