"""``snaprt demo``: the main job on real examples, from a cold start to the line of a NaN."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
from rich.table import Table
from rich.text import Text
from snaprt_replay.compare.results import to_json

from snaprt.cli import output, progress
from snaprt.cli.replay import formats
from snaprt.errors import ExecutionError, UsageError
from snaprt.host.whole_files import writing

_NEEDED: Final = ("flax", "optax", "sklearn")
_STARTS: Final = ("cold", "warm")


@click.command("demo")
@click.option(
    "--out",
    type=output.FOLDER,
    default=Path("snaprt-demo"),
    show_default=True,
    help="Directory for the cache and the snapshots; files of an earlier demo are replaced.",
)
@formats.verbose_option
@output.json_option
@click.pass_context
def command(context: click.Context, out: Path, as_json: bool) -> None:
    """Train lazily with a cold and a warm cache; then find a NaN in a plain JAX program.

    A small network learns the handwritten digits that scikit-learn ships, with plain flax and
    optax. The first run compiles; the second finds the executables in the cache. One step is
    recorded, replayed in this process, and its outputs are compared.

    Then a program of plain `jax.jit`, whose loss becomes NaN, is recorded without changing it. The
    recorded execution leads to the operation and its line, and to a program of one instruction that
    reproduces the NaN.

    \b
    Example:
      snaprt demo
      snaprt demo --out /tmp/demo --json
    """
    _check_installed()
    folders = _prepare(out)
    with _Commands(folders.cache, is_shown=not as_json) as commands:
        _demonstrate(context, folders, commands, as_json=as_json)


def _demonstrate(
    context: click.Context, folders: _Folders, commands: _Commands, *, as_json: bool
) -> None:
    finding = _find_nan(folders, commands)
    reports = _train_twice(folders)
    snapshot = _recorded(folders.dump / "warm")
    output.log.print(f"replaying {snapshot.name} ...")
    os.environ["SNAPRT_CACHE_DIR"] = str(folders.cache)
    from snaprt_replay.run.rerun import replay  # imports JAX, for which no training should wait

    replayed = replay(snapshot)
    comparison = replayed.comparison
    if comparison is None:
        raise ExecutionError(
            f"{snapshot} has no recorded outputs", hint="run the demo again with another --out"
        )
    if not as_json:
        _show(reports)
        formats.show_comparison(comparison)
        output.console.print(f"replayed on {replayed.played.device}: {comparison.summary}")
        output.console.print()
        output.console.print("A plain JAX program goes wrong. Record it, unchanged:")
    for future in finding:
        commands.show(future)
    nan_snapshot = _recorded(folders.nan_dump)
    if as_json:
        output.emit_json(
            "snaprt.demo",
            {
                "training": reports,
                "cache": str(folders.cache),
                "snapshot": str(snapshot),
                "from_cache": replayed.played.from_cache,
                "comparison": to_json(comparison),
                "nan": {
                    "program": str(folders.program),
                    "snapshot": str(nan_snapshot),
                    "page": str(folders.page),
                    "repro": str(folders.repro),
                },
            },
        )
    else:
        output.console.print()
        output.console.print(f"open the page       {folders.page}")
        output.console.print(f"report it           {folders.repro}/ISSUE.md")
        output.console.print(f"look at a snapshot  snaprt inspect {nan_snapshot}")
    context.exit(output.EXIT_MISMATCH if replayed.mismatch else output.EXIT_OK)


def _check_installed() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"the demo needs packages that are not installed: {', '.join(missing)}",
            hint="install them: python3 -m pip install 'snaprt[demo]'",
        )


@dataclass(frozen=True)
class _Folders:
    cache: Path
    dump: Path  # of the training
    nan: Path  # of the program that goes wrong

    @property
    def program(self) -> Path:
        """The program that goes wrong."""
        return self.nan / "train.py"

    @property
    def nan_dump(self) -> Path:
        """What is recorded of it."""
        return self.nan / "dump"

    @property
    def page(self) -> Path:
        """The report on its NaN."""
        return self.nan / "nan.html"

    @property
    def repro(self) -> Path:
        """The minified program."""
        return self.nan / "repro"


def _prepare(out: Path) -> _Folders:
    """Return the folders of the demo, empty."""
    folders = _Folders(out / "cache", out / "dump", out / "nan")
    with writing(f"write the demo to {out}", elsewhere="choose another directory with --out"):
        for folder in (folders.cache, folders.dump, folders.nan):
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(parents=True, mode=0o700)
    return folders


def _train_twice(folders: _Folders) -> dict[str, dict[str, Any]]:
    reports = {}
    for start in _STARTS:
        output.log.print(f"training on digits, {start} cache ...")
        reports[start] = _train(folders.cache.absolute(), folders.dump.absolute() / start)
    return reports


def _train(cache: Path, dump: Path) -> dict[str, Any]:
    environment = {
        **os.environ,
        "SNAPRT_CACHE": "1",
        "SNAPRT_CACHE_DIR": str(cache),
        "SNAPRT_DUMP_DIR": str(dump),
    }
    process = subprocess.run(
        [sys.executable, "-m", "snaprt.cli.demo.training"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if process.returncode != 0:
        raise ExecutionError(
            f"the training process ended with status {process.returncode}",
            hint="its error message is above; `snaprt doctor` checks the installation",
        )
    report: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return report


def _recorded(dump: Path) -> Path:
    """Return the largest of the inputs recorded at the step: the graph of the step itself."""
    snapshots = sorted(dump.glob("*.inputs.snap"), key=lambda path: path.stat().st_size)
    if not snapshots:
        raise ExecutionError(
            f"no snapshot was written to {dump}",
            hint="see the messages above; check that the disk is not full",
        )
    return snapshots[-1]


@dataclass(frozen=True)
class _Ran:
    """A command that a user would type, and what came of it."""

    words: str
    printed: str
    status: int


class _Commands:
    """Runs commands in the background, one after the other; leaving it stops them.

    Args:
        cache: The demo's compile cache.
        is_shown: Whether to print them and their output.
    """

    def __init__(self, cache: Path, *, is_shown: bool) -> None:
        self._environment = {**os.environ, "SNAPRT_CACHE_DIR": str(cache.absolute())}
        self._is_shown = is_shown
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self._lock = threading.Lock()
        self._running: subprocess.Popen[str] | None = None
        self._stopped = False

    def __enter__(self) -> _Commands:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._stopped = True
            if self._running is not None:
                self._running.kill()
        self._pool.shutdown(cancel_futures=True)

    def start(self, words: Callable[[], Sequence[str | Path]]) -> Future[_Ran]:
        """Run a command when those before it have ended.

        Args:
            words: Returns the command without ``snaprt``; called when its turn has come.
        """
        return self._pool.submit(lambda: self._run(list(map(str, words()))))

    def _run(self, words: Sequence[str]) -> _Ran:
        with self._lock:
            if self._stopped:
                raise concurrent.futures.CancelledError
            self._running = subprocess.Popen(
                [sys.executable, "-m", "snaprt", *words],
                env=self._environment,
                stdout=subprocess.PIPE if self._is_shown else subprocess.DEVNULL,
                stderr=subprocess.STDOUT if self._is_shown else None,
                text=True,
            )
        printed, _ = self._running.communicate()
        return _Ran(shlex.join(["snaprt", *words]), printed or "", self._running.returncode)

    def show(self, future: Future[_Ran]) -> None:
        """Wait for a command, and print it with its output.

        Raises:
            ExecutionError: It failed.
        """
        with progress.showing("running"):
            ran = future.result()
        if self._is_shown:
            output.console.print(Text(f"\n$ {ran.words}", "bold"))
            output.console.print(Text(ran.printed.rstrip("\n")), soft_wrap=True)
        if ran.status not in (output.EXIT_OK, output.EXIT_MISMATCH):
            raise ExecutionError(
                f"`{' '.join(ran.words.split()[:2])}` ended with status {ran.status}",
                hint="its error message is above; `snaprt doctor` checks the installation",
            )


def _find_nan(folders: _Folders, commands: _Commands) -> list[Future[_Ran]]:
    """Begin to record the program that goes wrong, to localize its NaN and to minify it."""
    with writing(f"write {folders.program}"):
        shutil.copyfile(Path(__file__).with_name("nan_at_step_23.py"), folders.program)
    record = ("run", "--record", "--when", "nan, first=1", "--dump", folders.nan_dump)
    return [
        commands.start(lambda: (*record, "--", folders.program)),
        commands.start(lambda: ("localize", _recorded(folders.nan_dump), "--html", folders.page)),
        commands.start(
            lambda: ("minify", _recorded(folders.nan_dump), "--check", "nan", "-o", folders.repro)
        ),
    ]


def _show(reports: dict[str, dict[str, Any]]) -> None:
    table = Table(title="Training on the handwritten digits, 40 steps", title_justify="left")
    table.add_column("")
    for start in _STARTS:
        table.add_column(f"{start} cache", justify="right")
    rows = {
        "accuracy on unseen digits": lambda r: f"{r['accuracy']:.1%}",
        "seconds until the end of step 1": lambda r: f"{r['first_step_seconds']:.2f}",
        "seconds compiling": lambda r: f"{r['compile_seconds']:.2f}",
        "programs compiled": lambda r: str(r["counters"]["UncachedCompile"]),
        "programs from the cache on disk": lambda r: str(r["counters"]["PersistentCacheHit"]),
    }
    for name, text in rows.items():
        table.add_row(name, *[text(reports[start]) for start in _STARTS])
    output.console.print(table)
