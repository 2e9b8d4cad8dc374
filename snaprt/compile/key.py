"""What identifies a compiled module: its key in named parts, so that a miss can be explained.

The parts that take knowledge of JAX are gathered here; how they become a key is the cache's.
"""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from blake3 import blake3
from snaprt_cache.file_digests import file_digest
from snaprt_cache.key import (
    Key,
    KeyPart,
    cpu_features,
    flags_with_file_contents,
    relevant_xla_flags,
)

from snaprt import jaxapi
from snaprt.variables import parse_flags

#: JAX settings that change what the compiler makes of a module without being part of it.
COMPILER_SETTINGS = (
    "jax_disable_most_optimizations",
    "jax_optimization_level",
    "jax_memory_fitting_level",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_use_shardy_partitioner",
    "jax_compiler_enable_remat_pass",
    "jax_enable_pgle",
)


def module_key(
    stablehlo: bytes,
    devices: Sequence[jaxapi.Device],
    *,
    kind: str,
    options: Mapping[str, Any] | None = None,
    signature: str = "",
    folder: Path,
) -> Key:
    """Return the key of a module compiled for ``devices``.

    Args:
        stablehlo: The module without source locations.
        devices: Where it will run, in the order of its partitions.
        kind: The form in which the executable is stored.
        options: Compile options by name, beside XLA's defaults and ``XLA_FLAGS``.
        signature: What is stored with the executable of how it is called, such as the types of PRNG
            keys, which are all integers to the module; see `snaprt.jaxapi.call_of_lowered`.
        folder: The cache's folder, where digests of large files are remembered.
    """
    what = [KeyPart("module", module_digest(stablehlo))]
    if signature:
        what.append(KeyPart("signature", blake3(signature.encode()).hexdigest()))
    return _key(what, devices, kind, options or {}, folder)


def program_key(digest: str, devices: Sequence[jaxapi.Device], folder: Path) -> Key:
    """Return the key of the note that says which module a recorded program becomes.

    Args:
        digest: Of the program, from `snaprt.graph.digest`.
        devices: Where it will run.
        folder: The cache's folder.
    """
    return _key([KeyPart("program", digest)], devices, "note", {}, folder)


def _key(
    what: Sequence[KeyPart],
    devices: Sequence[jaxapi.Device],
    kind: str,
    options: Mapping[str, Any],
    folder: Path,
) -> Key:
    return Key(
        (
            *what,
            KeyPart("kind", kind),
            KeyPart("options", repr(sorted(options.items()))),
            KeyPart("flags", _flags(folder)),
            KeyPart("parsed flags", _parsed_flags(devices)),
            KeyPart("settings", _settings()),
            KeyPart("topology", _topology(devices)),
            *_environment(devices[0], folder),
        )
    )


def jit_key(compilation: jaxapi.Compilation, *, kind: str, folder: Path) -> Key:
    """Return the key of what ``jax.jit`` is about to compile.

    Args:
        compilation: What JAX says of it.
        kind: The form in which the executable is stored.
        folder: The cache's folder, where digests of large files are remembered.
    """
    return Key(
        (
            KeyPart("module", module_digest(compilation.module)),
            KeyPart("kind", kind),
            KeyPart("options", blake3(compilation.options).hexdigest()),
            KeyPart("flags", _flags(folder)),
            KeyPart("topology", blake3(compilation.topology).hexdigest()),
            KeyPart("extra", compilation.extra),
            *_environment(compilation.devices[0], folder),
        )
    )


def topology_key(
    stablehlo: bytes, devices: Sequence[jaxapi.Device], *, topology: str, folder: Path
) -> Key:
    """Return the key of a module compiled for devices of a topology, none of which is here.

    Args:
        stablehlo: The module without source locations.
        devices: Those of the topology that it is compiled for.
        topology: The name by which the platform knows it, such as ``v5e:2x2``.
        folder: The cache's folder, where digests of large files are remembered.
    """
    ids = ",".join(str(device.id) for device in devices)
    return Key(
        (
            KeyPart("module", module_digest(stablehlo)),
            KeyPart("kind", "topology"),
            KeyPart("flags", _flags(folder)),
            KeyPart("parsed flags", _parsed_flags(devices)),
            KeyPart("settings", _settings()),
            KeyPart("topology", f"{topology} devices={ids}"),
            *_environment(devices[0], folder),
        )
    )


def start_key(program: str, folder: Path) -> Key:
    """Return the key of what is remembered about the starts of a program in this environment.

    What was compiled by another XLA, for another CPU or under other flags is not for this process
    to load.

    Args:
        program: The path of the script.
        folder: The cache's folder, where digests of large files are remembered.
    """
    return Key(
        (
            KeyPart("start of", program),
            KeyPart("flags", _flags(folder)),
            KeyPart("jax", jax.__version__),
            KeyPart("jaxlib", jaxapi.JAXLIB_VERSION),
            *_libraries(folder),
            KeyPart("cpu_features", cpu_features()),
        )
    )


def module_digest(stablehlo: bytes) -> str:
    """Return the digest of a module, by which a graph is known: 64 hexadecimal digits."""
    return blake3(stablehlo).hexdigest()


def _parsed_flags(devices: Sequence[jaxapi.Device]) -> str:
    """Return a digest of XLA's options as they are in effect, wherever they came from.

    XLA reads ``XLA_FLAGS`` once, which may have changed since.
    """
    return blake3(jaxapi.options_in_effect(devices)).hexdigest()


def _flags(folder: Path) -> str:
    flags = environment_flags() + shlex.split(os.environ.get("LIBTPU_INIT_ARGS", ""))
    return " ".join(flags_with_file_contents(relevant_xla_flags(flags), folder))


def environment_flags() -> list[str]:
    """Return the flags in ``XLA_FLAGS``, or in the file it names, as XLA reads them."""
    return [flag.plain() for flag in parse_flags(os.environ.get("XLA_FLAGS", ""))]


def compiler_settings() -> dict[str, Any]:
    """Return the values of ``COMPILER_SETTINGS``; None where this JAX has no such setting."""
    return {name: getattr(jax.config, name, None) for name in COMPILER_SETTINGS}


def _settings() -> str:
    return " ".join(f"{name}={value}" for name, value in compiler_settings().items())


def _topology(devices: Sequence[jaxapi.Device]) -> str:
    ids = ",".join(str(device.id) for device in devices)
    return f"devices={ids} of {devices[0].client.device_count()} process={jax.process_count()}"


@functools.lru_cache(maxsize=64)
def _environment(device: jaxapi.Device, folder: Path) -> tuple[KeyPart, ...]:
    """Return the parts that stay the same while the process lives."""
    parts = [
        KeyPart("jax", jax.__version__),
        KeyPart("jaxlib", jaxapi.JAXLIB_VERSION),
        KeyPart("platform", device.platform),
        KeyPart("platform_version", device.client.platform_version),
        KeyPart("device_kind", device.device_kind),
    ]
    parts += _libraries(folder)
    if device.platform == "cpu":
        parts.append(KeyPart("cpu_features", cpu_features()))
    return tuple(parts)


@functools.lru_cache(maxsize=8)
def _libraries(folder: Path) -> tuple[KeyPart, ...]:
    binaries = jaxapi.xla_binaries()
    return (
        *(KeyPart(f"binary {path.name}", file_digest(path, folder)) for path in binaries),
        *(KeyPart(f"plugin {name}", version) for name, version in _plugins()),
    )


def _plugins() -> list[tuple[str, str]]:
    """Return the installed distributions that register a PJRT plugin, with their versions."""
    points = metadata.entry_points(group="jax_plugins")
    found = {p.dist.name: p.dist.version for p in points if p.dist is not None}
    found.pop("snaprt", None)  # `snaprt.autoload`: no device of its own
    return sorted(found.items())
