"""``snaprt demo``: the main job on a real example, from a cold start to a replay."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import click
from rich.table import Table
from snaprt_replay.compare.results import to_json
from snaprt_replay.run.rerun import replay

from snaprt.cli import output, tables
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
@output.json_option
@click.pass_context
def command(context: click.Context, out: Path, as_json: bool) -> None:
    """Train a small network lazily, twice, then record one step and replay it.

    The network learns the handwritten digits that scikit-learn ships, with plain flax and optax.
    The first run compiles; the second finds the executables in the cache. One step is recorded,
    replayed in this process, and its outputs are compared.

    \b
    Example:
      snaprt demo
      snaprt demo --out /tmp/demo --json
    """
    _check_installed()
    cache, dump = _prepare(out)
    reports: dict[str, dict[str, Any]] = {}
    for start in _STARTS:
        output.log.print(f"training on digits, {start} cache ...")
        reports[start] = _train(cache, dump / start)
    snapshot = _recorded(dump / "warm")
    output.log.print(f"replaying {snapshot.name} ...")

    os.environ["SNAPRT_CACHE_DIR"] = str(cache)
    replayed = replay(snapshot)
    comparison = replayed.comparison
    if comparison is None:
        raise ExecutionError(
            f"{snapshot} has no recorded outputs", hint="run the demo again with another --out"
        )
    if as_json:
        output.emit_json(
            SCHEMA,
            SCHEMA_VERSION,
            {
                "training": reports,
                "cache": str(cache),
                "snapshot": str(snapshot),
                "from_cache": replayed.played.from_cache,
                "comparison": to_json(comparison),
            },
        )
    else:
        _show(reports)
        output.console.print()
        output.console.print(tables.comparison_table(comparison))
        output.console.print(f"replayed on {replayed.played.device}: {comparison.summary}")
        output.console.print()
        output.console.print(f"compile cache   {cache}")
        output.console.print(f"snapshot        {snapshot}")
        output.console.print(f"look inside     snaprt inspect {snapshot}")
        output.console.print(f"replay again    snaprt replay {snapshot}")
    context.exit(output.EXIT_MISMATCH if replayed.mismatch else output.EXIT_OK)


def _check_installed() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"the demo needs packages that are not installed: {', '.join(missing)}",
            hint="install them: python3 -m pip install 'snaprt[demo]'",
        )


def _prepare(out: Path) -> tuple[Path, Path]:
    """Return the folders for the cache and the snapshots, empty."""
    out = out.absolute()
    cache, dump = out / "cache", out / "dump"
    with output.writing(f"write the demo to {out}", hint="choose another directory with --out"):
        for folder in (cache, dump):
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(parents=True, mode=0o700)
    return cache, dump


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


def _show(reports: dict[str, dict[str, Any]]) -> None:
    table = Table(title="Training on the handwritten digits, 60 steps", title_justify="left")
    table.add_column("")
    for start in _STARTS:
        table.add_column(f"{start} cache", justify="right")
    rows = {
        "loss, first and last step": lambda r: f"{r['first_loss']:.3f} {r['last_loss']:.3f}",
        "accuracy on unseen digits": lambda r: f"{r['accuracy']:.1%}",
        "seconds until the end of step 1": lambda r: f"{r['first_step_seconds']:.2f}",
        "seconds total": lambda r: f"{r['seconds']:.2f}",
        "seconds compiling": lambda r: f"{r['compile_seconds']:.2f}",
        "graphs executed": lambda r: str(
            r["counters"]["CachedCompile"] + r["counters"]["UncachedCompile"]
        ),
        "programs compiled": lambda r: str(r["counters"]["UncachedCompile"]),
        "programs from the cache on disk": lambda r: str(r["counters"]["PersistentCacheHit"]),
    }
    for name, text in rows.items():
        table.add_row(name, *[text(reports[start]) for start in _STARTS])
    output.console.print(table)
