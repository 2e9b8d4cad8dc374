"""``snaprt demo``: the main job on real examples, from a cold start to the line of a NaN."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
from rich.table import Table
from rich.text import Text
from snaprt_replay.compare.results import to_json
from snaprt_replay.run.rerun import replay

from snaprt.cli import output, progress
from snaprt.cli.replay import formats
from snaprt.errors import ExecutionError, UsageError

SCHEMA: Final = "snaprt.demo"
SCHEMA_VERSION: Final = 1

_NEEDED: Final = ("flax", "optax", "sklearn")
_STARTS: Final = ("cold", "warm")


@click.command("demo")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
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
    with contextlib.ExitStack() as running:
        _demonstrate(context, folders, running, as_json=as_json)


def _demonstrate(
    context: click.Context, folders: _Folders, running: contextlib.ExitStack, *, as_json: bool
) -> None:
    recording = _record_nan(folders, running, is_shown=not as_json)
    reports = _train_twice(folders)
    snapshot = _recorded(folders.dump / "warm")
    output.log.print(f"replaying {snapshot.name} ...")
    os.environ["SNAPRT_CACHE_DIR"] = str(folders.cache)
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
    found = _find_nan(folders, recording, running, is_shown=not as_json)
    if as_json:
        output.emit_json(
            SCHEMA,
            SCHEMA_VERSION,
            {
                "training": reports,
                "cache": str(folders.cache),
                "snapshot": str(snapshot),
                "from_cache": replayed.played.from_cache,
                "comparison": to_json(comparison),
                "nan": found,
            },
        )
    else:
        output.console.print()
        output.console.print(f"open the page       {found['page']}")
        output.console.print(f"report it           {found['repro']}/ISSUE.md")
        output.console.print(f"look at a snapshot  snaprt inspect {found['snapshot']}")
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


def _prepare(out: Path) -> _Folders:
    """Return the folders of the demo, empty."""
    folders = _Folders(out / "cache", out / "dump", out / "nan")
    with output.writing(
        f"write the demo to {out}", elsewhere="choose another directory with --out"
    ):
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
    done = subprocess.run(
        [sys.executable, "-m", "snaprt.cli.demo.training"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ExecutionError(
            f"the training process ended with status {done.returncode}",
            hint="its error message is above; `snaprt doctor` checks the installation",
        )
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
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


class _Command:
    """A command that a user would type, which runs in the background until it is waited for.

    Args:
        folders: The demo's.
        words: The command without ``snaprt``.
        running: Where to stop it if the demo ends before it does.
        is_shown: Whether to print it and its output, at the end.
    """

    def __init__(
        self,
        folders: _Folders,
        words: Sequence[str | Path],
        running: contextlib.ExitStack,
        *,
        is_shown: bool,
    ) -> None:
        self._words = list(map(str, words))
        self._process = running.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "snaprt", *self._words],
                env={**os.environ, "SNAPRT_CACHE_DIR": str(folders.cache.absolute())},
                stdout=subprocess.PIPE if is_shown else subprocess.DEVNULL,
                stderr=subprocess.STDOUT if is_shown else None,
                text=True,
            )
        )
        running.callback(self._process.kill)

    def finish(self) -> None:
        """Wait for it, and print it with its output.

        Raises:
            ExecutionError: It failed.
        """
        if self._process.stdout is not None:
            words = shlex.join(["snaprt", *self._words])
            output.console.print(Text(f"\n$ {words}", "bold"))
        with progress.showing("running"):
            printed, _ = self._process.communicate()
        if printed:
            output.console.print(Text(printed.rstrip("\n")), soft_wrap=True)
        if self._process.returncode not in (output.EXIT_OK, output.EXIT_MISMATCH):
            raise ExecutionError(
                f"`snaprt {self._words[0]}` ended with status {self._process.returncode}",
                hint="its error message is above; `snaprt doctor` checks the installation",
            )


def _record_nan(folders: _Folders, running: contextlib.ExitStack, *, is_shown: bool) -> _Command:
    """Begin to run the program that goes wrong, while the training goes on."""
    with output.writing(f"write {folders.program}"):
        shutil.copyfile(Path(__file__).with_name("nan_at_step_23.py"), folders.program)
    dump = folders.nan / "dump"
    words = ("run", "--record", "--when", "nan, first=1", "--dump", dump, "--", folders.program)
    return _Command(folders, words, running, is_shown=is_shown)


def _find_nan(
    folders: _Folders, recording: _Command, running: contextlib.ExitStack, *, is_shown: bool
) -> dict[str, str]:
    """Localize and minify the NaN, both at the same time."""
    recording.finish()
    snapshot = _recorded(folders.nan / "dump")
    page, repro = folders.nan / "nan.html", folders.nan / "repro"
    commands = [
        _Command(folders, words, running, is_shown=is_shown)
        for words in (
            ("localize", snapshot, "--html", page),
            ("minify", snapshot, "--check", "nan", "-o", repro),
        )
    ]
    for started in commands:
        started.finish()
    paths = {"program": folders.program, "snapshot": snapshot, "page": page, "repro": repro}
    return {name: str(path) for name, path in paths.items()}


def _show(reports: dict[str, dict[str, Any]]) -> None:
    table = Table(title="Training on the handwritten digits, 60 steps", title_justify="left")
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
