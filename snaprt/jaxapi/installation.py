"""Which JAX and jaxlib are installed, and the devices and clients that they have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
from jax._src import xla_bridge as _xla_bridge
from jax._src.lib import xla_client as _xla_client  # pyright: ignore[reportPrivateImportUsage]
from jaxlib import _jax as _jaxlib  # pyright: ignore[reportAttributeAccessIssue]
from jaxlib.version import __version__ as _jaxlib_version

JAXLIB_VERSION: str = _jaxlib_version


def xla_binaries() -> list[Path]:
    """Return the shared libraries that hold XLA itself in this jaxlib."""
    return sorted(Path(_jaxlib.__file__).parent.glob("libjax*.so")) or [Path(_jaxlib.__file__)]


def is_source_of_jax(source: str) -> bool:
    """Return whether ``NAME at FILE:LINE`` is a function of JAX itself; `jax.pmap` hides others."""
    place = source.partition(" at ")[2]
    return is_file_of_jax(place) and not place.startswith(_PMAP)


def is_file_of_jax(path: str) -> bool:
    """Return whether a file of Python is one of JAX itself."""
    return path.startswith(_JAX_FOLDER)


_JAX_FOLDER = str(Path(jax.__file__).parent / "_")[:-1]  # with the separator
_PMAP = str(Path(_JAX_FOLDER) / "_src" / "pmap.py")  # of jax 0.10.2 and 0.12.0


class Device(Protocol):
    """A device of JAX's, for type checkers: some of them cannot see through `jax.Device`."""

    id: int  # its number within its platform and all processes
    platform: str  # ``cpu``, ``gpu`` or ``tpu``
    device_kind: str  # the vendor's name of it
    process_index: int
    client: Any  # XLA's client that owns it

    def __hash__(self) -> int:
        """Hash by identity."""
        ...

    def memory_stats(self) -> dict[str, int] | None:
        """Return what XLA's allocator knows of its memory, if it keeps an account."""
        ...


def device_list(devices: Sequence[Device]) -> Any:
    """Return devices as XLA takes them, in their order."""
    return _jaxlib.DeviceList(tuple(devices))


def backends_are_initialized() -> bool:
    """Return whether JAX has made its devices; by then XLA has parsed its flags."""
    return _xla_bridge.backends_are_initialized()


def own_cpu() -> Device:
    """Return the device of a new CPU client, beside JAX's own, none of which is started."""
    client: Any = _xla_client.make_cpu_client()
    device: Device = client.local_devices()[0]
    return device
