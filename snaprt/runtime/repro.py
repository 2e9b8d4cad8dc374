"""Save programs that fail, and have them minified, as SNAPRT_REPRO_AFTER asks.

What TORCHDYNAMO_REPRO_AFTER and TORCHDYNAMO_REPRO_LEVEL are for PyTorch. Minifying is done by
`snaprt minify` in a process of its own: a compiler that fails may take its process with it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Literal

import jax

from snaprt import settings
from snaprt.snapshot.format import schema
from snaprt.snapshot.format.write import write_snapshot
from snaprt.snapshot.recorder.conditions import Moment
from snaprt.snapshot.recorder.describe import Cause, contents, describe, error_text
from snaprt.snapshot.recorder.pending import HeldExecution, RecordedExecutable
from snaprt.snapshot.recorder.plan import Plan, steps_ended

Stage = Literal["compile", "run"]

SAVE, MINIFY, MINIFY_ASIDE, COMPARE = 1, 2, 3, 4
"""The levels: save the program; also minify it, before the program goes on; minify it while the
program goes on; and compare each new program with its operations run one by one."""

SNAPSHOT_NAME: Final = "failing.inputs.snap"
_FOUND: Final = 1  # the status with which `snaprt minify` says that there was something to minify
_WAITS: Final = 300  # seconds that a program waits for a smaller one
_CRASH: Final = ("--check", "crash")
_COMPARISON: Final = ("--check", "mismatch", "--b", "op-by-op")


_texts = settings.Texts("SNAPRT_REPRO_AFTER", "SNAPRT_REPRO_LEVEL")
_last: tuple[list[Any], Mapping[Stage, int]] = ([], {})  # the texts, and what follows of them


def level(stage: Stage) -> int:
    """Return the level that is asked for where a program fails at a stage; 0 for nothing."""
    global _last
    texts = _texts.now()
    if texts != _last[0]:
        after = settings.get("SNAPRT_REPRO_AFTER")
        repro_level = 0 if after is None else int(settings.get("SNAPRT_REPRO_LEVEL"))
        _last = texts, {"compile": repro_level, "run": repro_level if after == "run" else 0}
    return _last[1][stage]


def is_asked_for() -> bool:
    """Return whether anything is asked for."""
    return level("compile") > 0


def needs_inputs() -> bool:
    """Return whether what a program is called with may be wanted after it has run."""
    return level("run") > 0 or level("compile") >= COMPARE


def wait_for_failure(results: Any) -> None:
    """Wait until an execution has ended, and raise its error, where that is to be seen.

    XLA tells of many errors only when somebody reads the results.
    """
    if level("run"):
        jax.block_until_ready(results)


def after_failure(
    stage: Stage,
    program: RecordedExecutable,
    inputs: Sequence[Any],
    error: BaseException | None = None,
) -> Path | None:
    """Save a program that failed and what it was called with, and have it minified if asked for.

    Returns:
        The folder, which is also told on stderr; None where nothing is asked for, the program
        failed before, or it could not be saved.
    """
    repro_level = level(stage)
    if not repro_level:
        return None
    snapshot = _save(program, inputs, error)
    if snapshot is None:
        return None
    _say(f"saved the failing program in {snapshot.parent}")
    if repro_level >= MINIFY_ASIDE:
        _aside().submit(repro_for, snapshot, repro_level, _CRASH)
    elif repro_level == MINIFY:
        _say(f"minifying it before the program continues, for at most {_WAITS} s")
        repro_for(snapshot, repro_level, _CRASH)
    return snapshot.parent


def after_run(program: RecordedExecutable, inputs: Sequence[Any]) -> None:
    """At level 4, compare a program that has run for the first time with its operations alone."""
    if level("compile") < COMPARE or program.number in _compared:
        return
    _compared.add(program.number)
    snapshot = _save(program, inputs, None)
    if snapshot is not None:
        _aside().submit(_compare, snapshot)


def repro_for(snapshot: Path, repro_level: int, check: Sequence[str] = _CRASH) -> Path | None:
    """Minify a snapshot in a process of its own, and tell on stderr where the result is.

    Args:
        snapshot: An ``.inputs.snap``.
        repro_level: The level; below 2 nothing is done.
        check: Options of ``snaprt minify`` that say what the failure is.

    Returns:
        The folder with the smallest program; None where the failure did not show again.
    """
    if repro_level < MINIFY:
        return None
    folder = snapshot.parent / "minified"
    environment = dict(os.environ)
    environment.pop("SNAPRT_REPRO_AFTER", None)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    words = ["-m", "snaprt", "minify", str(snapshot), *check, "--output", str(folder)]
    if repro_level == MINIFY:
        words += ["--budget", str(_WAITS)]
    log_path = snapshot.parent / "minify.log"
    with log_path.open("wb") as log:
        process = subprocess.run(
            [sys.executable, *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            check=False,
        )
    if process.returncode == _FOUND:
        _say(f"the smallest program with this failure is in {folder}: see {folder / 'ISSUE.md'}")
        return folder
    if check == _CRASH:
        _say(f"found no smaller program with this failure: see {log_path}")
    return None


def _compare(snapshot: Path) -> None:
    folder = repro_for(snapshot, COMPARE, _COMPARISON)
    if folder is None:  # it agrees, and there is nothing to keep
        with contextlib.suppress(OSError):
            for file in snapshot.parent.iterdir():
                file.unlink()
            snapshot.parent.rmdir()


_compared: set[int] = set()  # the numbers of programs
_saved: set[Path] = set()


@functools.cache
def _aside() -> ThreadPoolExecutor:
    """Return what runs one minification after the other; Python waits for it at its end."""
    return ThreadPoolExecutor(1, "snaprt-repro")


def _say(what: str) -> None:
    print(f"snaprt: {what}", file=sys.stderr, flush=True)


def _save(
    program: RecordedExecutable, inputs: Sequence[Any], error: BaseException | None
) -> Path | None:
    """Write the snapshot, once for each graph; a failure to do so must not hide the first one."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", program.name)[:80]
    path = settings.get("SNAPRT_REPRO_DIR") / f"{name}.{program.graph_id}" / SNAPSHOT_NAME
    if path in _saved:
        return None
    try:
        contents = _contents(path.parent, program, inputs, error)
        write_snapshot(path, contents, elsewhere="set SNAPRT_REPRO_DIR to another folder")
    except Exception as raised:
        _say(f"cannot save the failing program: {raised}")
        return None
    _saved.add(path)
    return path


def _contents(
    folder: Path, program: RecordedExecutable, inputs: Sequence[Any], error: BaseException | None
) -> schema.Contents:
    device = program.devices[0]
    rank = jax.process_index()
    execution = HeldExecution(
        executable=program,
        plan=Plan(folder, (), keep_last=0, keep_bytes=0, hold="device", stops=False),
        moment=Moment(program.name, program.graph_id, 0, steps_ended(), 0.0, rank),
        devices=((0, device, frozenset(("inputs",))),),
        inputs=list(inputs),
        watching=(),
        limit=math.inf,
        began=time.perf_counter_ns(),
        time=time.time(),
    )
    cause = Cause("SNAPRT_REPRO_AFTER", "" if error is None else error_text(error))
    return contents(describe(execution, "inputs", 0, device, cause), execution, device)
