"""Run a case in a process of its own, so that a failed CHECK in XLA is an error like any other.

It must not know what running means: `player` does that, in the child. The two exchange a folder:
``job.json`` with the module and the inputs, then ``result.json`` with the outputs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from snaprt import errors, jaxapi
from snaprt.errors import ExecutionError, SnaprtError
from snaprt_replay import floatbits
from snaprt_replay.compare.results import comparison_from_json, to_json
from snaprt_replay.load.case import Case, NamedArray, Signature
from snaprt_replay.load.shards import ShardedArray
from snaprt_replay.process.child import child_command, child_environment
from snaprt_replay.run import player
from snaprt_replay.run.player import PlayResult

_JOB, _MODULE, _RESULT = "job.json", "module", "result.json"
# The line that says why a process ended itself: Abseil's fatal log, LLVM's, the C++ library's.
_LOUD = re.compile(r"Check failed|^F\d{4} |LLVM ERROR|terminate called")
_LOG_PREFIX = re.compile(r"^[A-Z]\d{4} [\d:.]+\s+\d+ ")


def play(
    case: Case,
    device: str | None = None,
    repeat: int = 1,
    host_devices: int | None = None,
    timeout: float | None = None,
) -> PlayResult:
    """Do what `player.play` does, in a process of its own.

    Args:
        case: As `player.play` takes it, and the next two.
        device: See `devices.find_device`.
        repeat: How often to run it.
        host_devices: As how many devices the processor shows itself there; None: as here.
        timeout: Seconds that the process may take; None for no limit.

    Raises:
        ExecutionError: The process ended without a result; the message says by which signal and
            what XLA said last. Or it took too long.
        SnaprtError: What `player.play` raised there.
    """
    player.check_playable(case, repeat)
    with tempfile.TemporaryDirectory(prefix="snaprt-replay-") as name:
        folder = Path(name)
        _write_job(folder, case, device, repeat)
        try:
            child = subprocess.run(
                child_command("play", name),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**child_environment(), **_environment(host_devices)},
                check=False,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired as error:
            raise ExecutionError(f"{case.path}: no result within {timeout:g} s") from error
        if child.returncode or not (folder / _RESULT).exists():
            raise _how_it_ended(case, child.returncode, child.stderr.decode(errors="replace"))
        return _read_result(folder)


def _environment(host_devices: int | None) -> Mapping[str, str]:
    if host_devices is None:
        return {}
    flags = os.environ.get("XLA_FLAGS", "")
    # Of JAX's two ways to say so, it takes only one.
    return {
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={host_devices}".strip(),
        "JAX_NUM_CPU_DEVICES": "-1",
    }


def serve(name: str) -> None:
    """Play the job in the folder ``name`` and write its result: the child's part of `play`."""
    folder = Path(name)
    case, device, repeat = _read_job(folder)
    try:
        result = player.play(case, device, repeat)
    except SnaprtError as error:
        kind = type(error).__name__
        told = {"kind": kind, "message": error.message, "hint": error.hint}
        (folder / _RESULT).write_text(json.dumps({"error": told}))
        return
    data = {
        **{
            field.name: getattr(result, field.name)
            for field in dataclasses.fields(result)
            if field.name not in ("outputs", "repeats", "environment", "parts")
        },
        "environment": dict(result.environment),
        "repeats": None if result.repeats is None else to_json(result.repeats),
        "outputs": _write_arrays(folder, "out", result.outputs),
        "parts": [
            _write_sharded(folder, f"out{number}part", one)
            for number, one in enumerate(result.parts)
        ],
    }
    (folder / _RESULT).write_text(json.dumps(data))


def _write_job(folder: Path, case: Case, device: str | None, repeat: int) -> None:
    (folder / _MODULE).write_bytes(case.stablehlo)
    job = {
        "path": str(case.path),
        "format": case.format,
        "name": case.name,
        "compiler_options": dict(case.compiler_options),
        "output_names": [array.name for array in case.outputs or ()],
        "inputs": _write_arrays(folder, "in", case.inputs or ()),
        "input_parts": {
            name: _write_arrays(folder, f"in{number}part", [NamedArray(name, one) for one in parts])
            for number, (name, parts) in enumerate(case.input_parts.items())
        },
        "devices": case.devices,
        "partitioning": case.partitioning and dataclasses.asdict(case.partitioning),
        "device": device,
        "repeat": repeat,
    }
    (folder / _JOB).write_text(json.dumps(job))


def _read_job(folder: Path) -> tuple[Case, str | None, int]:
    job = json.loads((folder / _JOB).read_text())
    inputs = _read_arrays(folder, "in", job["inputs"])
    names = job["output_names"]
    case = Case(
        path=Path(job["path"]),
        format=job["format"],
        name=job["name"],
        stablehlo=(folder / _MODULE).read_bytes(),
        inputs=inputs,
        # The names are all that the player takes from recorded outputs.
        outputs=tuple(NamedArray(name, np.empty(0)) for name in names) if names else None,
        parameters=tuple(Signature(array.shape, array.dtype) for array in inputs),
        compiler_options=job["compiler_options"],
        devices=job["devices"],
        partitioning=job["partitioning"] and jaxapi.Partitioning(**job["partitioning"]),
        input_parts={
            name: tuple(one.value for one in _read_arrays(folder, f"in{number}part", told))
            for number, (name, told) in enumerate(job["input_parts"].items())
        },
    )
    return case, job["device"], job["repeat"]


def _read_result(folder: Path) -> PlayResult:
    data = json.loads((folder / _RESULT).read_text())
    if "error" in data:
        told = data["error"]
        raise getattr(errors, told["kind"], SnaprtError)(told["message"], hint=told["hint"])
    repeats = data["repeats"]
    return PlayResult(
        **{
            **data,
            "outputs": _read_arrays(folder, "out", data["outputs"]),
            "parts": tuple(
                _read_sharded(folder, f"out{number}part", one)
                for number, one in enumerate(data["parts"])
            ),
            "execute_seconds": tuple(data["execute_seconds"]),
            "repeats": None if repeats is None else comparison_from_json(repeats),
            "isolated": True,
        }
    )


def _write_arrays(
    folder: Path, prefix: str, arrays: Sequence[NamedArray]
) -> list[Mapping[str, str]]:
    """Write arrays as ``.npy`` of their bits, and return name and dtype of each."""
    for number, array in enumerate(arrays):
        value = np.ascontiguousarray(array.value).reshape(array.shape)
        np.save(folder / f"{prefix}{number}.npy", _plain(value), allow_pickle=False)
    return [{"name": array.name, "dtype": array.dtype.name} for array in arrays]


def _write_sharded(folder: Path, prefix: str, array: ShardedArray) -> Mapping[str, Any]:
    """Write the distinct parts of an array, and return which device holds which."""
    distinct = {id(part): part for part in array.parts}
    numbers = {key: number for number, key in enumerate(distinct)}
    return {
        "name": array.name,
        "shape": array.shape,
        "indices": array.indices,
        "distinct": _write_arrays(
            folder, prefix, [NamedArray(array.name, part) for part in distinct.values()]
        ),
        "parts": [numbers[id(part)] for part in array.parts],
    }


def _read_sharded(folder: Path, prefix: str, told: Mapping[str, Any]) -> ShardedArray:
    distinct = [one.value for one in _read_arrays(folder, prefix, told["distinct"])]
    return ShardedArray(
        name=told["name"],
        shape=tuple(told["shape"]),
        parts=tuple(distinct[number] for number in told["parts"]),
        indices=tuple(tuple(map(tuple, index)) for index in told["indices"]),
    )


def _plain(value: np.ndarray) -> np.ndarray:
    """View the types that ``.npy`` has no name for as unsigned integers."""
    named = value.dtype.kind in "biufc" and not hasattr(ml_dtypes, value.dtype.name)
    return value if named else value.view(np.dtype(f"u{value.itemsize}"))


def _read_arrays(
    folder: Path, prefix: str, told: Sequence[Mapping[str, Any]]
) -> tuple[NamedArray, ...]:
    return tuple(
        NamedArray(
            array["name"],
            np.load(folder / f"{prefix}{number}.npy", allow_pickle=False).view(
                floatbits.dtype_named(array["dtype"])
            ),
        )
        for number, array in enumerate(told)
    )


def _how_it_ended(case: Case, status: int, text: str) -> ExecutionError:
    """Return the error that says why the child left no result."""
    lines = [line for line in text.splitlines() if line.strip()]
    loud = [line for line in lines if _LOUD.search(line)]
    said = _LOG_PREFIX.sub("", (loud[:1] or lines[-1:] or ["it said nothing"])[0]).strip()
    if status < 0:
        how = signal.Signals(-status).name
        if -status == signal.SIGKILL:
            said = "no message: the system may have been out of memory"
        return ExecutionError(
            f"XLA ended the process ({how}) on {case.path}: {said}",
            hint="this is a bug of XLA's or a module it does not accept; "
            f"`snaprt inspect --hlo {case.path}` shows the module",
        )
    return ExecutionError(f"the process that ran {case.path} failed (status {status}): {said}")
