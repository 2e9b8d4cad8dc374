"""Which JAX and jaxlib are installed, and where; must not start them."""

from __future__ import annotations

from pathlib import Path

import jax
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
