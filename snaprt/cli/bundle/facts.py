"""Finds out what a bundle says of the machine, of the program's Python and of its packages."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import snaprt
from snaprt.cli.bundle import probe

_PROBE_SECONDS: Final = 120
_GPU_SECONDS: Final = 20
_SHEBANG: Final = re.compile(rb"#!\s*(?:\S*/env\s+(?:-S\s+)?)?(\S*python[\d.]*)\s")
_GPU_QUERY: Final = (
    "--query-gpu=name,driver_version,memory.total",
    "--format=csv,noheader",
)


def machine() -> dict[str, Any]:
    """Return the operating system, the processor, the memory, and GPUs with their driver."""
    from snaprt.snapshot.recorder import describe

    return {
        "system": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "processor": describe.processor("cpu"),
        "cpus": os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "gpu_driver": describe.driver("gpu"),
        "gpus": _gpus(),
    }


def software(command: str) -> dict[str, Any]:
    """Return what the Python that runs a command has installed, and the devices of its JAX.

    Args:
        command: A Python, or a script whose first line names one; else our Python is asked.
    """
    python = _python_of(command)
    answer = _ask(python or sys.executable)
    return {"snaprt": snaprt.__version__, "is_of_the_program": python is not None, **answer}


def _ask(python: str) -> dict[str, Any]:
    try:
        process = subprocess.run(
            # Not as a file: modules beside it would be found in the place of others.
            [python, "-c", Path(probe.__file__).read_text(encoding="utf-8")],
            # Not the program's, with which more would be written. Let others have a GPU's memory.
            env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": f"cannot query {python}: {error}"}
    try:
        answer: dict[str, Any] = json.loads(process.stdout.strip().rpartition("\n")[2])
    except ValueError:
        last = process.stderr.strip().rpartition("\n")[2]
        return {"error": f"{python} ended with status {process.returncode}: {last}"}
    return answer


def flags(environment: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the flags of XLA and of libtpu, one by one."""
    names = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NEURON_CC_FLAGS")
    return {name: environment[name].split() for name in names if environment.get(name)}


def _python_of(command: str) -> str | None:
    path = shutil.which(command)
    if path is None:
        return None
    if re.fullmatch(r"python[\d.]*", Path(path).name):
        return path
    try:
        with open(path, "rb") as file:
            shebang = _SHEBANG.match(file.read(1024))
    except OSError:
        return None
    return shutil.which(os.fsdecode(shebang[1])) if shebang else None


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _gpus() -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        process = subprocess.run(
            [tool, *_GPU_QUERY],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_GPU_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"cannot run nvidia-smi: {error}"]
    return (process.stdout or process.stderr).strip().splitlines()
