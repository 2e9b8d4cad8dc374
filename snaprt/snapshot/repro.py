"""Save programs that fail, and have them minified, as SNAPRT_REPRO_AFTER asks; knows no graphs.

What TORCHDYNAMO_REPRO_AFTER and TORCHDYNAMO_REPRO_LEVEL are for PyTorch. Minifying is done by
`snaprt minify` in a process of its own: a compiler that fails may take its process with it.
"""

from __future__ import annotations

import contextlib
import functools
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
from snaprt.snapshot import layout, surroundings
from snaprt.snapshot.content import array_content
from snaprt.snapshot.held import Executable
from snaprt.snapshot.write import write_snapshot

Stage = Literal["compile", "run"]

SAVE, MINIFY, MINIFY_ASIDE, COMPARE = 1, 2, 3, 4
"""The levels: save the program; also minify it, before the program goes on; minify it while the
program goes on; and compare each new program with its operations run one by one."""

SNAPSHOT_NAME: Final = "failing.inputs.snap"
_FOUND: Final = 1  # the status with which `snaprt minify` says that there was something to minify
_CRASH: Final = ("--check", "crash")
_COMPARISON: Final = ("--check", "mismatch", "--b", "op-by-op")


_texts = settings.Texts("SNAPRT_REPRO_AFTER", "SNAPRT_REPRO_LEVEL")
_seen: tuple[list[Any], Mapping[Stage, int]] = ([], {})  # the texts, and what follows of them


def level(stage: Stage) -> int:
    """Return the level that is asked for where a program fails at a stage; 0 for nothing."""
    global _seen
    texts = _texts.now()
    if texts != _seen[0]:
        after = settings.get("SNAPRT_REPRO_AFTER")
        asked = 0 if after is None else int(settings.get("SNAPRT_REPRO_LEVEL"))
        _seen = texts, {"compile": asked, "run": asked if after == "run" else 0}
    return _seen[1][stage]


def needs_inputs() -> bool:
    """Say whether what a program is called with may be wanted after it has run."""
    return level("run") > 0 or level("compile") >= COMPARE


def after_failure(stage: Stage, program: Executable, inputs: Sequence[Any]) -> Path | None:
    """Save a program that failed and what it was called with, and have it minified if asked for.

    Returns:
        The folder, which is also told on stderr; None where nothing is asked for, or it could not
        be saved.
    """
    asked = level(stage)
    if not asked:
        return None
    snapshot = _save(program, inputs)
    if snapshot is None:
        return None
    _say(f"the program that failed is in {snapshot.parent}")
    if asked >= MINIFY_ASIDE:
        _aside().submit(repro_for, snapshot, asked, _CRASH)
    elif asked == MINIFY:
        repro_for(snapshot, asked, _CRASH)
    return snapshot.parent


def after_run(program: Executable, inputs: Sequence[Any]) -> None:
    """At level 4, compare a program that has run for the first time with its operations alone."""
    if level("compile") < COMPARE or program.number in _compared:
        return
    _compared.add(program.number)
    snapshot = _save(program, inputs)
    if snapshot is not None:
        _aside().submit(_compare, snapshot)


def repro_for(snapshot: Path, asked: int, check: Sequence[str] = _CRASH) -> Path | None:
    """Minify a snapshot in a process of its own, and tell on stderr where the result is.

    Args:
        snapshot: An ``.inputs.snap``.
        asked: The level; below 2 nothing is done.
        check: Options of ``snaprt minify`` that say what the failure is.

    Returns:
        The folder with the smallest program; None where the failure did not show again.
    """
    if asked < MINIFY:
        return None
    folder = snapshot.parent / "minified"
    environment = dict(os.environ)
    environment.pop("SNAPRT_REPRO_AFTER", None)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    words = ["-m", "snaprt", "minify", str(snapshot), *check, "--output", str(folder)]
    with (snapshot.parent / "minify.log").open("wb") as log:
        done = subprocess.run(
            [sys.executable, *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            check=False,
        )
    if done.returncode == _FOUND:
        _say(f"the smallest program that fails so is in {folder}: see {folder / 'ISSUE.md'}")
        return folder
    return None


def _compare(snapshot: Path) -> None:
    found = repro_for(snapshot, COMPARE, _COMPARISON)
    if found is None:  # it agrees, and there is nothing to keep
        with contextlib.suppress(OSError):
            for file in snapshot.parent.iterdir():
                file.unlink()
            snapshot.parent.rmdir()


_compared: set[int] = set()


@functools.cache
def _aside() -> ThreadPoolExecutor:
    """Return what runs one minification after the other; Python waits for it at its end."""
    return ThreadPoolExecutor(1, "snaprt-repro")


def _say(what: str) -> None:
    print(f"snaprt: {what}", file=sys.stderr, flush=True)


def _save(program: Executable, inputs: Sequence[Any]) -> Path | None:
    """Write the snapshot; a failure to do so must not hide the first one."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", program.name)[:80]
    folder = settings.get("SNAPRT_REPRO_DIR") / f"{name}.{program.graph_id}"
    path = folder / SNAPSHOT_NAME
    try:
        write_snapshot(path, _contents(program, inputs))
    except Exception as error:
        _say(f"the program that failed could not be saved: {error}")
        return None
    return path


def _contents(program: Executable, inputs: Sequence[Any]) -> layout.Contents:
    device = program.devices[0]
    artifacts = program.artifacts()
    execution = layout.Execution(
        role="inputs",
        name=program.name,
        graph_id=program.graph_id,
        process=jax.process_index(),
        executable=program.number,
        device_index=0,
        execution_count=0,
        step=-1,
        time=time.time(),
        device=surroundings.describe_device(device),
        devices=tuple(map(surroundings.describe_device, program.devices)),
        platform_version=surroundings.platform_version(device),
        versions=surroundings.versions(),
        xla_flags=os.environ.get("XLA_FLAGS", ""),
        environment=surroundings.environment(),
        jax_config=surroundings.jax_config(),
        input_names=program.input_names,
        output_names=program.output_names,
        donated=(),
        source_locations=(),
    )
    module = layout.ModuleBytes(artifacts.stablehlo, artifacts.hlo, artifacts.compile_options)
    arrays = [
        array_content(name, array, device)
        for name, array in zip(program.input_names, inputs, strict=True)
    ]
    return layout.Contents(execution, module, arrays)
