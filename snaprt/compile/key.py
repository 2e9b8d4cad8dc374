"""What identifies a compiled module: its key in named parts, so that a miss can be explained.

The parts that take knowledge of JAX are gathered here; how they become a key is the cache's.
"""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final

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


@dataclass(frozen=True)
class Subject:
    """What a key identifies.

    Attributes:
        kind_of_key: Which rows of `PARTS` its key has.
        identity: The digest of the module or program, or the path of a script.
        folder: The cache's folder, where digests of large files are remembered.
        devices: Where it will run, in the order of its partitions.
        kind: The form in which it is stored.
        options: Compile options by name, beside XLA's defaults and ``XLA_FLAGS``.
        signature: How the executable is called, where the module does not say it, as of PRNG keys,
            which are all integers to the module; see `snaprt.jaxapi.call_of_lowered`.
        topology: The name by which the platform knows devices that are not here.
        jit: What JAX says of what ``jax.jit`` is about to compile.
    """

    kind_of_key: str
    identity: str
    folder: Path
    devices: Sequence[jaxapi.Device] = ()
    kind: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    signature: str = ""
    topology: str = ""
    jit: Any = None


#: The kinds of keys: of a module; of the note that says which module a recorded program becomes; of
#: a compilation of ``jax.jit``; of a module for devices that are not here; and of what is
#: remembered about the starts of a script, and about the first calls of its functions.
MODULE, PROGRAM, JIT, TOPOLOGY = "module", "program", "jit", "topology"
START, FIRST_CALLS = "start", "first calls"
_ALL: Final = (MODULE, PROGRAM, JIT, TOPOLOGY, START, FIRST_CALLS)
_EXECUTABLES: Final = (MODULE, PROGRAM, JIT, TOPOLOGY)
_LOWERED: Final = (MODULE, PROGRAM, TOPOLOGY)
_HERE: Final = (MODULE, PROGRAM)


def module_digest(stablehlo: bytes) -> str:
    """Return the digest of a module, by which a graph is known: 64 hexadecimal digits."""
    return _digest(stablehlo)


def _digest(content: bytes) -> str:
    return blake3(content).hexdigest()


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
    count = devices[0].client.device_count()
    return f"devices={_ids(devices)} of {count} process={jax.process_count()}"


def _ids(devices: Sequence[jaxapi.Device]) -> str:
    return ",".join(str(device.id) for device in devices)


def _cpu_features(devices: Sequence[jaxapi.Device]) -> str | None:
    return cpu_features() if not devices or devices[0].platform == "cpu" else None


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
    versions = {p.dist.name: p.dist.version for p in points if p.dist is not None}
    versions.pop("snaprt", None)  # `snaprt.autoload`: no device of its own
    return sorted(versions.items())


_Value = str | Sequence[KeyPart] | None

#: The parts of all keys, in the order in which they enter them: the name of a part, the kinds of
#: keys that have it, and its value. ``None`` leaves it out, and a row may stand for several parts.
#: Values are compared as texts; what a difference means, `snaprt_cache.why` says.
PARTS: Final[Sequence[tuple[str, Sequence[str], Callable[[Subject], _Value]]]] = (
    ("start of", (START,), lambda s: s.identity),
    ("first calls of", (FIRST_CALLS,), lambda s: s.identity),
    ("module", (MODULE, JIT, TOPOLOGY), lambda s: s.identity),
    ("program", (PROGRAM,), lambda s: s.identity),
    ("signature", (MODULE,), lambda s: _digest(s.signature.encode()) if s.signature else None),
    ("kind", _EXECUTABLES, lambda s: s.kind),
    ("options", _HERE, lambda s: repr(sorted(s.options.items()))),
    ("options", (JIT,), lambda s: _digest(s.jit.options)),
    ("flags", _ALL, lambda s: _flags(s.folder)),
    # As they are in effect: XLA reads ``XLA_FLAGS`` once, and the variable may have changed since.
    ("parsed flags", _LOWERED, lambda s: _digest(jaxapi.options_in_effect(s.devices))),
    ("settings", _LOWERED, lambda s: _settings()),
    ("topology", _HERE, lambda s: _topology(s.devices)),
    ("topology", (JIT,), lambda s: _digest(s.jit.topology)),
    ("topology", (TOPOLOGY,), lambda s: f"{s.topology} devices={_ids(s.devices)}"),
    ("extra", (JIT,), lambda s: s.jit.extra),
    ("jax", _ALL, lambda s: jax.__version__),
    ("jaxlib", _ALL, lambda s: jaxapi.JAXLIB_VERSION),
    ("platform", _EXECUTABLES, lambda s: s.devices[0].platform),
    ("platform_version", _EXECUTABLES, lambda s: s.devices[0].client.platform_version),
    ("device_kind", _EXECUTABLES, lambda s: s.devices[0].device_kind),
    ("binary NAME, plugin NAME", _ALL, lambda s: _libraries(s.folder)),
    ("cpu_features", _ALL, lambda s: _cpu_features(s.devices)),
)


def key_of(subject: Subject) -> Key:
    """Return the key of a subject: its parts, row by row."""
    parts: list[KeyPart] = []
    for name, kinds, value_of in PARTS:
        if subject.kind_of_key in kinds:
            value = value_of(subject)
            if isinstance(value, str):
                parts.append(KeyPart(name, value))
            else:
                parts += value or ()
    return Key(tuple(parts))
