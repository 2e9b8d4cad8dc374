"""Passes that a program has given XLA's compiler; must not know what is compiled with them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

_registered: set[tuple[str, ...]] = set()


def registered_passes() -> tuple[str, ...]:
    """Return the names of the passes that were registered with XLA since this module is imported.

    What is compiled with them is another program, whatever its module says. XLA does not tell which
    there are. Source: jax/_src/xla_transform.py of JAX 0.12; earlier ones have no such passes.
    """
    return tuple(sorted({key[-2] for key in _registered}))


def _watch() -> None:
    try:
        library: Any = importlib.import_module("jaxlib._xla")
    except ImportError:
        return
    for suffix, arguments in (("", 2), ("_c_api", 3)):
        register = getattr(library, f"register_xla_transform{suffix}", None)
        clear = getattr(library, f"clear_xla_transform{suffix}", None)
        if register is not None and clear is not None:
            added, gone = _registered.add, _registered.discard
            setattr(library, f"register_xla_transform{suffix}", _noting(register, added, arguments))
            setattr(library, f"clear_xla_transform{suffix}", _noting(clear, gone, arguments))


def _noting(
    function: Callable[..., Any], note: Callable[[tuple[str, ...]], None], arguments: int
) -> Callable[..., Any]:
    """Return ``function``, which notes its first arguments: the last are a name and a stage."""

    @functools.wraps(function)
    def noting(*args: Any) -> Any:
        result = function(*args)
        note(tuple(map(str, args[:arguments])))
        return result

    return noting


_watch()
