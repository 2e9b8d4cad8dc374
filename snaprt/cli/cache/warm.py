"""``snaprt cache collect`` and ``warm``: write down what a run compiles, and compile it before."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import queue
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import click

from snaprt.cli import output, progress
from snaprt.cli.cache.words import dir_option
from snaprt.cli.run import command as run_command
from snaprt.compile.ahead.collection import collection
from snaprt.errors import UsageError
from snaprt.host.interruptions import interrupted_at_once
from snaprt.host.whole_files import named_path, writing
from snaprt.units import counted

_MODULES: Final = (".mlir", ".mlirbc", ".stablehlo", ".inputs.snap")
_PLATFORMS: Final = ("cpu", "gpu")
#: XLA may add the traceback of an operation; --json has all of it.
_ERROR_LINES: Final = 4
_WORKER: Final = "snaprt.cli.cache.warm_worker"
#: So many characters of what a process wrote before it died are shown.
_LAST_WORDS: Final = 2000


@click.command(
    "collect",
    cls=run_command.ProgramCommand,
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "--out",
    type=output.FOLDER,
    required=True,
    metavar="DIR",
    help="Directory for the programs; programs already there are kept.",
)
@click.option(
    "--steps", type=click.IntRange(min=1), metavar="N", help="Stop the run after N marked steps."
)
@click.pass_context
def collect(context: click.Context, out: Path, steps: int | None, program: tuple[str, ...]) -> None:
    """Save the programs that a Python program would compile, without compiling them.

    The program runs lazily, and every result is zero. The collected programs are right as long as
    they do not depend on computed values. If the zeros cause an error, the run ends, and the
    programs collected until then are kept. All other effects are real: the program writes its
    files, with zeros in them.

    \b
    Example:
      snaprt cache collect --out programs --steps 3 -- train.py --epochs 1
      snaprt cache warm programs --target cpu
    """
    with writing(f"write into {out}", elsewhere="choose another directory with --out"):
        folder = named_path(out)
        folder.mkdir(parents=True, exist_ok=True)
    os.environ["SNAPRT_COLLECT"] = str(folder)
    os.environ["SNAPRT_PREFETCH"] = "0"  # nothing that it would load is run
    collection.most_steps = steps
    status = run_command.run(program, lazy=True)
    if status == output.EXIT_INTERRUPTED:
        context.exit(status)
    if not collection.programs:
        raise UsageError(
            "the program compiled nothing",
            hint="collect runs the program as `snaprt run --lazy` does, so the program must run "
            "JAX operations lazily.",
        )
    programs = collection.programs - sum(collection.left_out.values()) - collection.unwritten
    output.log.print(
        f"Collected {counted(programs, 'program')} into {out}, {collection.written} of them new. "
        "None was run: every result was zero."
    )
    if status:
        output.log.print(
            f"The program ended with status {status}; the programs collected until then are kept."
        )
    if collection.over_devices:
        output.log.print(
            f"{counted(collection.over_devices, 'program')} run on several devices: the layout "
            "of their results is known only after compilation, so programs that use them may "
            "differ."
        )
    if collection.without_digest:
        output.log.print(
            f"{counted(collection.without_digest, 'program')} can be found in the cache only "
            "after lowering."
        )
    for reason, number in collection.left_out.most_common():
        output.log.print(f"skipped {counted(number, 'program')}: {reason}.")
    if collection.unwritten:
        context.exit(output.EXIT_FAILURE)


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
    help="Number of compiling processes.  [default: one per CPU core; one for a GPU]",
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

    FILE is a file written by `snaprt cache collect`, for a later run of that program, or a snapshot
    or StableHLO module, for `snaprt replay`. With a TPU topology, libtpu compiles on a machine
    without a TPU, and the cache stores the serialized executable under a key for that topology.

    \b
    Example:
      snaprt cache warm programs --target cpu -j 8
      snaprt cache warm programs --target tpu:v5e:2x2
    """
    jobs = _jobs(files, target)
    if folder is not None:
        os.environ["SNAPRT_CACHE_DIR"] = str(output.writable(folder, "--dir"))
    os.environ["SNAPRT_CACHE"] = "1"
    os.environ["SNAPRT_CACHE_MODE"] = "read-write"
    if processes is None:
        processes = 1 if target == "gpu" else os.cpu_count() or 1
    with progress.showing(f"compiling {counted(len(jobs), 'program')} for {target}"):
        results = _compile_all(jobs, target, processes)
    failed = [result for result in results if result.error]
    present = sum(result.was_there for result in results)
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
        output.emit_json("snaprt.cache.warm", {"target": target, "programs": rows})
    else:
        output.log.print(
            f"{counted(len(results) - present - len(failed), 'program')} compiled for {target}, "
            f"{present} already in the cache, {len(failed)} failed."
        )
    if failed:
        context.exit(output.EXIT_FAILURE)


def _report(count: str, result: _Result, seconds_left: float) -> None:
    number = f"{count} {result.job.name}"
    if result.error:
        lines = [line.rstrip() for line in result.error.splitlines() if line.strip()]
        output.log.print("\n".join([f"{number}: failed: {lines[0]}", *lines[1:_ERROR_LINES]]))
        if result.hint:
            output.log.print(f"  {result.hint}")
        return
    what = "already in the cache" if result.was_there else f"compiled in {result.seconds:.1f} s"
    estimate = f", about {seconds_left:.0f} s left" if seconds_left else ""
    output.log.print(f"{number}: {what}{estimate}")


def _jobs(files: Sequence[Path], target: str) -> list[_Job]:
    with interrupted_at_once():
        from snaprt.compile.ahead.collect import SUFFIX, read_program

    names = (SUFFIX, *_MODULES)
    paths = [path for file in files for path in (_inside(file, names) if file.is_dir() else [file])]
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
            jobs.append(_Job(path, f"{program.name} {program.graph_id}", environment, size))
        else:
            jobs.append(_Job(path, path.name, _environment(target), path.stat().st_size))
    return [job for job in jobs if job.file not in modules]


def _inside(folder: Path, names: tuple[str, ...]) -> list[Path]:
    programs = sorted(path for path in folder.iterdir() if path.name.endswith(names))
    if not programs:
        raise UsageError(
            f"nothing to compile in {folder}",
            hint="`snaprt cache collect --out DIR -- SCRIPT.py` writes programs into a directory.",
        )
    return programs


def _environment(target: str) -> dict[str, str]:
    """Return what a process finds in the environment that compiles for ``target``."""
    common = {"SNAPRT_COLLECT": "", "SNAPRT_DUMP_DIR": "", "SNAPRT_METRICS_FILE": ""}
    if target == "gpu":
        # Several processes share its memory.
        return common | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    # A topology is there without its platform; a machine's own accelerator is left alone.
    return common | {"JAX_PLATFORMS": "cpu"}


# Processes that compile.


@dataclass(frozen=True)
class _Job:
    """A file to compile."""

    file: Path
    name: str  # what its program is called
    environment: Mapping[str, str]  # what its process must find in the environment
    size: int  # bytes of its module, from which the time left is estimated


@dataclass(frozen=True)
class _Result:
    """What became of a job."""

    job: _Job
    key: str = ""  # the key's digest; empty where it is not told
    was_there: bool = False  # whether the cache had it before
    seconds: float = 0.0  # seconds that the compiler took
    error: str = ""  # what went wrong; empty if nothing did
    hint: str = ""  # what to do about it


def _compile_all(jobs: Iterable[_Job], target: str, processes: int) -> list[_Result]:
    """Compile every job's file for ``target`` in so many processes at a time.

    Jobs of one environment share processes. A process that dies at a file costs that file alone:
    another takes its place. Returns the results in the order of their end.
    """
    # The largest first: a large one at the end would keep one process busy and the others not.
    ordered = sorted(jobs, key=lambda job: (sorted(job.environment.items()), -job.size))
    workers = [_Worker() for _ in range(max(1, min(processes, len(ordered))))]
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def answer(job: _Job) -> _Result:
        worker = idle.get()
        try:
            return worker.answer(job, target)
        finally:
            idle.put(worker)

    results: list[_Result] = []
    started = time.monotonic()
    pool = concurrent.futures.ThreadPoolExecutor(len(workers))
    try:
        for future in concurrent.futures.as_completed(
            [pool.submit(answer, job) for job in ordered]
        ):
            results.append(future.result())
            remaining = _seconds_left(ordered, results, time.monotonic() - started)
            _report(f"[{len(results)}/{len(ordered)}]", results[-1], remaining)
        list(pool.map(_Worker.stop, workers))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.kill()
    return results


def _seconds_left(jobs: Sequence[_Job], results: Sequence[_Result], elapsed: float) -> float:
    """Return an estimate by the bytes of the modules; 0 where nothing is known, or left."""
    compiled = sum(r.job.size for r in results if not r.was_there and not r.error)
    remaining = sum(job.size for job in jobs) - sum(r.job.size for r in results)
    return elapsed * remaining / compiled if compiled else 0.0


class _Worker:
    """One process, started when a job comes and again when a job needs another environment."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._environment: Mapping[str, str] = {}
        self._stderr: IO[bytes] | None = None

    def answer(self, job: _Job, target: str) -> _Result:
        """Have the process compile the job."""
        if self._process is not None and self._environment != job.environment:
            self.stop()
        line = ""
        try:
            process = self._running(job.environment)
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps({"file": str(job.file), "target": target}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            answer: dict[str, Any] = json.loads(line)
            return _Result(job, **answer)
        except (OSError, ValueError) as error:
            if self._process is None:
                return _Result(job, error=f"cannot start {sys.executable}: {error}")
            status, words = self._end()
            return _Result(
                job, error=f"the process that compiled it ended with status {status}", hint=words
            )

    def _running(self, environment: Mapping[str, str]) -> subprocess.Popen[str]:
        if self._process is None:
            self._environment = environment
            self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by _end
            self._process = subprocess.Popen(
                [sys.executable, "-m", _WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                env={**os.environ, **environment},
                process_group=0,  # Ctrl-C is for us: we end them
            )
        return self._process

    def stop(self) -> None:
        """Let the process end, once it has sent what is still on its way to a remote cache."""
        self._end()

    def kill(self) -> None:
        """End the process now, if it runs."""
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()

    def _end(self) -> tuple[int, str]:
        process, self._process = self._process, None
        if process is None:
            return 0, ""
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):  # it is gone already
            process.stdin.close()
        status = process.wait()
        process.stdout.close()
        words = ""
        if self._stderr is not None:
            size = self._stderr.seek(0, os.SEEK_END)
            self._stderr.seek(max(0, size - _LAST_WORDS))
            words = self._stderr.read().decode("utf-8", "replace").strip()
            self._stderr.close()
        return status, words
