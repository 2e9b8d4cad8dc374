"""Find the device that the user names, and describe the environment of this process."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Final

import jax

from snaprt import jaxapi
from snaprt.errors import DeviceError, UsageError
from snaprt.snapshot.recorder import describe
from snaprt.snapshot.recorder.flags import take_over

_NAME = re.compile(r"([a-z][a-z0-9_]*)(?::(\d+))?")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KINDS: Final = ("cpu", "gpu", "tpu")
_PACKAGES: Final = ("snaprt", "jax", "jaxlib", "numpy", "ml_dtypes")

# What the user should know if a result differs: key of the environment -> words for it.
_TELLING: Final = {
    "platform": "platform",
    "device_kind": "device",
    "jax": "jax",
    "jaxlib": "jaxlib",
    "snaprt": "snaprt",
    "libtpu": "libtpu",
    "platform_version": "platform version",
    "driver": "driver",
    "processor": "processor",
    "xla_flags": "XLA_FLAGS",
    "aliases": "aliases (result <- parameter)",
    "optimised_hlo": "optimized HLO",
}
# Flags that change no result, and those that jaxlib sets itself, which XLA's dumps also list.
_QUIET_FLAGS: Final = (
    "--xla_dump",
    "--xla_detailed_logging",
    "--xla_cpu_enable_fast_min_max=false",
    "--xla_force_host_platform_device_count",
)


def check_device_name(name: str) -> str:
    """Return ``name`` if it has the form of a device's name, such as ``cpu`` or ``gpu:1``.

    Raises:
        UsageError: It has a different form.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"unknown device {name!r}", hint="use cpu, gpu, tpu, or gpu:1")
    return name


def find_device(name: str | None) -> jaxapi.Device:
    """Return the device called ``name``: a platform, optionally with a colon and a device number.

    Args:
        name: ``cpu``, ``gpu:1``, ``tpu``, ...; None for JAX's default device.

    Raises:
        DeviceError: There is no such device; the hint lists those present.
        UsageError: It is not the name of a device, or XLA would end the process over ``XLA_FLAGS``.
    """
    take_over()
    default = default_platform()
    if name is None:
        return jax.local_devices(backend=default)[0]
    match = _NAME.fullmatch(check_device_name(name))
    assert match is not None
    kind, number = match[1], int(match[2] or 0)
    try:
        devices = jax.local_devices(backend=kind)
    except RuntimeError as error:
        raise DeviceError(f"there is no {kind} device here", hint=_present()) from error
    if number >= len(devices):
        raise DeviceError(f"there is no device {name} here", hint=_present())
    return devices[number]


def default_platform() -> str:
    """Return the platform that JAX runs on unless it is told otherwise.

    Raises:
        DeviceError: It can start none of those that it is limited to.
    """
    try:
        return jax.default_backend()
    # An assertion of JAX's own where it has been told to use a platform for which it has no code.
    except (RuntimeError, AssertionError) as error:
        limit = os.environ.get("JAX_PLATFORMS")
        limited = f" with JAX_PLATFORMS={limit}" if limit else ""
        why = f": {error}" if str(error) else ""
        raise DeviceError(
            f"JAX finds no device here{limited}{why}",
            hint="unset JAX_PLATFORMS, or set it to a platform of this machine, such as cpu",
        ) from error


def find_devices(name: str | None, count: int) -> list[jaxapi.Device]:
    """Return the device called ``name`` if ``count`` is 1, else the platform's first ``count``.

    Raises:
        DeviceError: There are too few devices.
        UsageError: As `find_device`; or ``name`` has a device number but several are needed.
    """
    if count == 1:
        return [find_device(name)]
    if name is not None and ":" in name:
        raise UsageError(
            f"the program runs on {count} devices, but {name} is a single device",
            hint=f"name only the platform: --device {name.partition(':')[0]}",
        )
    first = find_device(name)
    local = jax.local_devices(backend=first.platform)
    if len(local) < count:
        raise DeviceError(
            f"the program runs on {count} devices, but there are {len(local)} {first.platform} "
            "devices here",
            hint="replay it on host devices of the CPU: --device cpu",
        )
    return local[:count]


def needs_host_devices(name: str | None, count: int) -> bool:
    """Return whether a process with more host devices is needed for ``count`` devices."""
    if count == 1 or name not in (None, "cpu"):
        return False
    return len(jax.local_devices(backend=find_device(name).platform)) < count


def name_devices(devices: Sequence[jaxapi.Device]) -> str:
    """Return the name of one device, or of several in a row, as in ``cpu:0-7``."""
    first = device_name(devices[0])
    return first if len(devices) == 1 else f"{first}-{len(devices) - 1}"


def device_name(device: jaxapi.Device) -> str:
    """Return the name by which `find_device` finds ``device``."""
    local = jax.local_devices(backend=device.platform)
    return f"{device.platform}:{local.index(device)}"


def _present() -> str:
    names = ", ".join(f"{device_name(device)} ({device.device_kind})" for device in _devices())
    limit = os.environ.get("JAX_PLATFORMS")
    limited = f"; JAX_PLATFORMS={limit} hides others" if limit else ""
    return f"present: {names}{limited}"


def _devices() -> Iterator[jaxapi.Device]:
    seen = set()
    for kind in (default_platform(), *_KINDS):
        try:
            devices = jax.local_devices(backend=kind)
        except RuntimeError:  # JAX raises this if there are none
            continue
        for device in devices:
            if device not in seen:
                seen.add(device)
                yield device


def environment(device: jaxapi.Device) -> Mapping[str, str]:
    """Return what a snapshot records about its environment, for ``device`` in this process."""
    versions = {name: _version(name) for name in _PACKAGES}
    return {
        **{name: version for name, version in versions.items() if version},
        "python": platform.python_version(),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "platform_version": device.client.platform_version,
        "driver": describe.driver(device.platform),
        "processor": describe.processor(device.platform),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from a source tree
        return ""


def differences(recorded: Mapping[str, str], here: Mapping[str, str]) -> tuple[str, ...]:
    """Return a sentence for each difference between the recorded environment and this one.

    What was not recorded is not compared.
    """
    return tuple(
        f"recorded with {words} {_shown(recorded[key])}, replayed {_with(key, here)}"
        for key, words in _TELLING.items()
        if _is_recorded(key, recorded) and _compared(key, recorded) != _compared(key, here)
    )


def _with(key: str, here: Mapping[str, str]) -> str:
    value = here.get(key, "")
    return f"with {_shown(value)}" if value or key == "xla_flags" else "without it"


def _is_recorded(key: str, recorded: Mapping[str, str]) -> bool:
    return key in recorded if key == "xla_flags" else bool(recorded.get(key))


def _compared(key: str, environment: Mapping[str, str]) -> str:
    """Return an environment's value without the parts that do not affect results."""
    value = environment.get(key, "")
    if key == "xla_flags":
        return " ".join(flag for flag in value.split() if not flag.startswith(_QUIET_FLAGS))
    return value


def _shown(value: str) -> str:
    if _DIGEST.fullmatch(value):
        return value[:16]
    return repr(value) if not value or re.search(r"\s", value) else value
