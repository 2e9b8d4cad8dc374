"""What the benchmarks share: child processes, medians, the line that names the machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Left over from the shell, any of these would let one of two peers do other work.
_STEERING = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "SNAPRT_", "NEURON_")  # beginnings


def machine() -> str:
    """Return one line that says on what the figures were measured."""
    parts = [f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"]
    parts += [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib")]
    return ", ".join(parts)


def clean_environment(bytecode: Path | None = None) -> dict[str, str]:
    """Return this process's environment without what would steer snaprt, JAX or XLA.

    Args:
        bytecode: Where children keep compiled modules, so that they start as an installed package
            does, whatever this machine's settings.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(_STEERING)
    }
    if bytecode is not None:
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["PYTHONPYCACHEPREFIX"] = str(bytecode)
    return environment


def run_child(
    script: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> dict[str, Any]:
    """Run ``script`` in a process of its own and return the JSON object that it prints last.

    Raises:
        SystemExit: It failed; what it printed goes to stderr.
    """
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def taking_turns(
    works: Mapping[str, Callable[[], Callable[[], object]]], rounds: int
) -> Mapping[str, tuple[float, float]]:
    """Return the median wall and CPU seconds of each work; a first round does not count.

    Args:
        works: Each gets ready, in its own time, and returns what is measured.
        rounds: How often each is measured.
    """
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, prepare in works.items():
            work = prepare()
            wall, processor = time.perf_counter(), time.process_time()
            work()
            if number:
                took[name].append((time.perf_counter() - wall, time.process_time() - processor))
    return {
        name: (median([wall for wall, _ in one]), median([processor for _, processor in one]))
        for name, one in took.items()
    }


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def show_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under their heads: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        cells = [
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells), flush=True)
