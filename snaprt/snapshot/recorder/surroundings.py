"""Describes what surrounds an execution: versions, devices, flags, settings; reads, never sets."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

import jax

from snaprt import jaxapi, variables
from snaprt.snapshot.format.schema import DeviceRecord

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
    found = {"python": platform.python_version(), "system": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def environment() -> Mapping[str, str]:
    """Return the environment variables that steer JAX and XLA, as they are now.

    Those alone that are known by name, and without what their values have of passwords.
    """
    options = jax.config.values
    return {
        name: variables.without_credentials(os.environ[name])
        for name in os.environ
        if variables.steers(name, options)
    }


def xla_flags() -> str:
    """Return XLA_FLAGS as they are now."""
    return variables.without_credentials(os.environ.get("XLA_FLAGS", ""))


def jax_config() -> Mapping[str, str]:
    """Return this thread's values of the JAX settings that change what a program computes."""
    return {name: str(getattr(jax.config, name, "")) for name in _JAX_SETTINGS}


def describe_device(device: jaxapi.Device) -> DeviceRecord:
    """Return a device as the manifest holds it."""
    return DeviceRecord(device.platform, device.device_kind, device.id, device.process_index)


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
    return platform.processor() or platform.machine()


def platform_version(device: jaxapi.Device) -> str:
    """Return what the device's backend says of its own version."""
    return str(getattr(device.client, "platform_version", ""))
