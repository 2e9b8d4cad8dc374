"""Describes a held execution for a snapshot's manifest, and what surrounds it on this machine."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import operator
import os
import platform
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

from snaprt import jaxapi, settings, variables
from snaprt.processes import run_mark
from snaprt.snapshot.format import schema
from snaprt.snapshot.format.content import fetch_part, gather, to_host
from snaprt.snapshot.recorder.pending import HeldExecution, read_again

_LONGEST_ERROR = 20_000  # characters: a traceback of hundreds of frames says no more

_PACKAGES = (
    *("snaprt", "jax", "jaxlib", "numpy", "ml_dtypes", "flax", "optax", "libtpu"),
    *("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt"),
    *("jax-rocm7-plugin", "jax-rocm7-pjrt", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
    *("nvidia-cublas-cu12", "nvidia-cublas"),
)

_JAX_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
    "jax_use_shardy_partitioner",
    "jax_compiler_enable_remat_pass",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_optimization_level",
    "jax_platforms",
)


@functools.cache
def versions() -> Mapping[str, str]:
    """Return package name to version, for what a program's results can depend on."""
    packages = {"python": platform.python_version(), "system": _system()}
    for package in _PACKAGES:
        try:
            packages[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return packages


def _system() -> str:
    """Return what `platform.platform` says on Linux, without starting a program as that does.

    Starting one lets Python show the warnings of this one again.
    """
    uname, library = platform.uname(), "".join(platform.libc_ver())
    parts = (uname.system, uname.release, uname.machine, library and f"with-{library}")
    return "-".join(filter(None, parts))


def environment() -> Mapping[str, str]:
    """Return the environment variables that steer JAX and XLA, as they are now.

    Those alone that are known by name, and without what their values have of passwords. It is the
    same object until a variable changes, or JAX has more options: every execution asks.
    """
    global _seen_environment
    now, options = settings.raw_environment(), jaxapi.option_count()
    variables_before, options_before, result = _seen_environment
    if now != variables_before or options != options_before:
        before = dict(now)
        result = _read_environment()
        _seen_environment = before, options, result
    return result


_seen_environment: tuple[Any, int, Mapping[str, str]] = ({}, -1, {})


def _read_environment() -> Mapping[str, str]:
    options = jax.config.values
    return {
        name: variables.without_credentials(os.environ[name])
        for name in os.environ
        if variables.steers(name, options)
    }


def jax_config() -> Mapping[str, str]:
    """Return this thread's values of the JAX settings that change what a program computes."""
    return _named_settings(*_values_of_settings(jax.config))


_KNOWN_SETTINGS: Final = tuple([name for name in _JAX_SETTINGS if hasattr(jax.config, name)])
_values_of_settings = operator.attrgetter(*_KNOWN_SETTINGS)


@functools.lru_cache(maxsize=64, typed=True)  # True is not 1 here
def _named_settings(*values: Any) -> Mapping[str, str]:
    return dict.fromkeys(_JAX_SETTINGS, "") | dict(
        zip(_KNOWN_SETTINGS, map(str, values), strict=True)
    )


@functools.cache
def describe_device(device: jaxapi.Device) -> schema.DeviceRecord:
    """Return a device as the manifest holds it."""
    return schema.DeviceRecord(device.platform, device.device_kind, device.id, device.process_index)


_DRIVER_FILES = {
    "gpu": (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version")),
}
"""Platform to the files in which a driver tells its version."""
_PROCESSOR_FILE = Path("/proc/cpuinfo")


@functools.cache
def driver(platform_name: str) -> str:
    """Return what the driver of a platform's devices says of itself, empty where there is none."""
    for file in _DRIVER_FILES.get(platform_name, ()):
        with contextlib.suppress(OSError):
            return file.read_text().partition("\n")[0].strip()
    return ""


@functools.cache
def processor(platform_name: str) -> str:
    """Return the name of this machine's processor where it is the device, else nothing."""
    if platform_name != "cpu":
        return ""
    with contextlib.suppress(OSError):
        names = re.search(r"^model name\s*:\s*(.+)$", _PROCESSOR_FILE.read_text(), re.M)
        if names:
            return names[1]
    return platform.machine()  # not `processor`, which starts a program


@functools.cache
def platform_version(device: jaxapi.Device) -> str:
    """Return what the device's backend says of its own version."""
    return str(getattr(device.client, "platform_version", ""))


@dataclass(frozen=True)
class Cause:
    """Why an execution is recorded, and what surrounds the program when that is known."""

    reason: str  # the condition as the user wrote it, or what else asked for it
    error: str = ""  # what failed, as text
    environment: Mapping[str, str] = field(default_factory=environment)
    jax_config: Mapping[str, str] = field(default_factory=jax_config)

    @property
    def xla_flags(self) -> str:
        """XLA_FLAGS."""
        return self.environment.get("XLA_FLAGS", "")


_RECORDER: Final = str(Path(__file__).parent)


def error_text(error: BaseException) -> str:
    """Return the error's kind and words, and below them its traceback outside of the recorder."""
    words = "".join(traceback.format_exception_only(error)).strip()
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if all(file.startswith(_RECORDER) for file in files):  # the recorder waited for an execution
        return variables.without_credentials(words[:_LONGEST_ERROR])
    frames = "".join(traceback.format_exception(error))
    return variables.without_credentials(f"{words}\n\n{frames}"[:_LONGEST_ERROR])


def describe(
    execution: HeldExecution,
    role: schema.Role,
    index: int,
    device: jaxapi.Device,
    cause: Cause,
) -> schema.ExecutionRecord:
    """Return what the manifest says of an execution on one device."""
    executable = execution.executable
    return schema.ExecutionRecord(
        role=role,
        name=executable.name,
        graph_id=executable.graph_id,
        process=jax.process_index(),
        executable=executable.number,
        device_index=index,
        execution_count=execution.moment.execution,
        step=execution.moment.step,
        time=execution.time,
        device=describe_device(device),
        devices=tuple(map(describe_device, executable.devices)),
        platform_version=platform_version(device),
        versions=versions(),
        xla_flags=cause.xla_flags,
        environment=cause.environment,
        jax_config=cause.jax_config,
        input_names=_unique(executable.input_names),
        output_names=_unique(executable.output_names),
        donated=tuple(executable.donated),
        source_locations=(),
        driver=driver(device.platform),
        processor=processor(device.platform),
        run=run_mark(),
        rank=execution.moment.rank,
        reason=cause.reason,
        error=cause.error,
        host=platform.node(),
        run_number=execution.run_number if role == "outputs" else 1,
        recheck=execution.recheck,
    )


def likeness(
    execution: HeldExecution,
    role: schema.Role,
    device: jaxapi.Device,
    cause: Cause,
) -> tuple[Any, ...] | None:
    """Return what is equal for files of an executable that differ in numbers and values alone.

    Returns:
        None where each file of such an execution is described by itself.
    """
    arrays = execution.inputs if role == "inputs" else execution.outputs
    if cause.error or execution.recheck is not None or arrays is None:
        return None
    traits: list[Any] = []
    for array in arrays:
        if not jaxapi.is_single_array(array):
            return None
        traits += (array.aval, array.sharding)
    return cause, device, run_mark(), execution.moment.rank, execution.run_number, traits


def contents(
    record: schema.ExecutionRecord, execution: HeldExecution, device: jaxapi.Device
) -> schema.Contents:
    """Gather what goes into the file; in the writer's thread, so that it may take its time."""
    is_inputs = record.role == "inputs"
    places = execution.inputs if is_inputs else execution.outputs
    names = record.input_names if is_inputs else record.output_names
    assert places is not None
    fetch = functools.partial(_fetched, places, device)
    while True:
        arrays_now = list(places)
        try:
            return gather(record, execution.executable.artifacts, names, arrays_now, device, fetch)
        except RuntimeError:  # one was deleted, and copied into its place before
            if all(array is current for array, current in zip(arrays_now, places, strict=True)):
                raise


def sources(
    execution: HeldExecution, role: schema.Role
) -> tuple[Sequence[Any], Callable[[int], np.ndarray]]:
    """Return the arrays of one role, which have a `likeness`, and what returns the values of one.

    It is given the array's number.
    """
    places = execution.inputs if role == "inputs" else execution.outputs
    assert places is not None
    return list(places), functools.partial(read_again, _of_one_device, places)


def _of_one_device(array: jax.Array) -> np.ndarray:
    return to_host(jaxapi.only_part_of_array(array))


def _fetched(places: list[Any], device: jaxapi.Device, place: int) -> np.ndarray:
    return read_again(lambda whole: fetch_part(whole, device), places, place)


@functools.lru_cache(maxsize=64)
def _unique(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names, each that was there before with its number added."""
    unique: dict[str, None] = {}
    for number, name in enumerate(names):
        while name in unique:
            name = f"{name}#{number}"
        unique[name] = None
    return tuple(unique)
