"""The process that `snaprt cache warm` starts to compile in: jobs in, what became of them out.

A job is a line of JSON on stdin, a result a line on stdout; what libraries print goes to stderr.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
from snaprt_cache import Cache, CacheError
from snaprt_cache.errors import LOGGER
from snaprt_cache.reports import PUT
from snaprt_replay.load.load import load

from snaprt import metrics
from snaprt.compile.ahead.ahead_of_time import (
    Warmed,
    check_versions,
    warm_collected,
    warm_for_topology,
)
from snaprt.compile.ahead.collect import SUFFIX, read_program
from snaprt.compile.cached.store import persistent_cache
from snaprt.compile.module import compile_module
from snaprt.errors import CompileError, SnaprtError, UsageError
from snaprt.host.regular_files import read_file


def main() -> None:
    """Answer jobs until stdin ends."""
    warning = _LastWarning()
    LOGGER.addHandler(warning)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        job = json.loads(line)
        stored = _count_stored()
        try:
            result = _warm(Path(job["file"]), job["target"])
            if not result.was_there and _count_stored() == stored:
                raise CompileError("it was compiled, but the cache could not store it")
            answer = {"key": result.key, "was_there": result.was_there, "seconds": result.seconds}
        except (SnaprtError, CacheError) as error:
            answer = {"error": error.message, "hint": error.hint or warning.text}
        except Exception as error:  # of JAX's or XLA's: the next job may go better
            answer = {"error": f"{type(error).__name__}: {error}", "hint": ""}
        print(json.dumps(answer), file=answers, flush=True)


class _LastWarning(logging.Handler):
    """Keeps what the cache last warned of: once for each cause, on a stderr that nobody reads."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


def _count_stored() -> int:
    return metrics.counter_value(PUT) or 0


def _warm(path: Path, target: str) -> Warmed:
    cache = persistent_cache()
    if cache is None:
        raise UsageError("no compile cache to warm", hint="run `snaprt doctor` to find the cause")
    platform, _, topology = target.partition(":")
    if path.name.endswith(SUFFIX):
        program = read_program(path)
        module = _read(path.parent / program.module)
        if topology:
            check_versions(program)
            return warm_for_topology(module, topology, program.name, cache)
        if program.platform != platform:
            raise UsageError(
                f"the program was collected for {program.platform}, and lowers differently for "
                f"{platform}",
                hint=f"collect it where JAX runs on {platform}",
            )
        return warm_collected(program, module, cache)
    case = load(path)
    if topology:
        return warm_for_topology(case.stablehlo, topology, case.name, cache)
    return _warm_for_replay(path, case, platform, cache)


def _warm_for_replay(path: Path, case: Any, platform: str, cache: Cache) -> Warmed:
    if case.devices > 1:
        raise UsageError(
            f"{path.name} runs on {case.devices} devices", hint="collect the program instead"
        )
    device = jax.local_devices(backend=platform)[0]
    started = time.perf_counter()
    loaded = compile_module(case.stablehlo, device=device, name=case.name)
    seconds = 0.0 if loaded.from_cache else time.perf_counter() - started
    return Warmed("", loaded.from_cache, seconds)


def _read(path: Path) -> bytes:
    try:
        return read_file(path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error


if __name__ == "__main__":
    main()
