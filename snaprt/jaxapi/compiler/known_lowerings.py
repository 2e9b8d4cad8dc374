"""Lets JAX skip the lowering of a program whose module is known by its digest.

JAX then goes on with a module that stands for it: that is empty, and names that digest. It
serves to find the executable alone: what would compile it raises `NotLowered`, and what would show
it gets the module itself.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Final

import jax
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import pjit as _pjit
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import pxla as _pxla
from jaxlib.mlir import ir

from snaprt.jaxapi.settings import trace_context
from snaprt.jaxapi.tracing.traces import once

_STANDS_FOR: Final = "snaprt.stands_for"


@dataclass(frozen=True)
class Lowering:
    """What decides the module that JAX lowers a program to.

    Attributes:
        jaxpr: The program, without effects.
        arguments: How it is lowered, and where for.
        context: JAX's settings for that which are no options, as text.
        names: Of the arguments and results, which a module has as well.
    """

    jaxpr: Any
    arguments: tuple[Any, ...]
    context: str
    names: tuple[Any, ...]


Known = Callable[[Lowering], str | None]
"""Returns the digest of the module that comes out, where that need not be made."""


class NotLowered(Exception):  # noqa: N818 - caught by who let the lowering be skipped
    """A program is to be compiled, of which only the digest of its module is known."""


class _Knowing(threading.local):
    known: Known | None = None
    lowered: tuple[Any, Lowering] | None = None


_knowing = _Knowing()
_always_lowered: list[None] = []


def always_lower() -> None:
    """Skip no lowering from here on: somebody looks at each module."""
    _always_lowered.append(None)


@contextlib.contextmanager
def knowing_lowering(known: Known) -> Iterator[None]:
    """Ask ``known`` before this thread lowers a call of a jitted function; once."""
    _skip_known_lowerings()
    _knowing.known = known
    try:
        yield
    finally:
        _knowing.known = _knowing.lowered = None


def lowering_of(module: Any) -> Lowering | None:
    """Return what a module was lowered from, where that was asked about."""
    lowered = _knowing.lowered
    return None if lowered is None or lowered[0] is not module else lowered[1]


def stands_for(module: Any) -> str | None:
    """Return the digest of the module that this one stands for; None where it is one itself."""
    attributes = module.operation.attributes
    return attributes[_STANDS_FOR].value if _STANDS_FOR in attributes else None


@once
def _skip_known_lowerings() -> None:
    """Let JAX ask before it lowers.

    Checked with jax 0.10.2 and 0.12.0: all that decides the module, but for the settings of the
    thread, is handed to ``_cached_lowering_to_hlo``, and ``_pjit_lower`` keeps what it returns.
    """
    lower_program, lower_call = _pxla._cached_lowering_to_hlo, _pjit._pjit_lower
    calls = _pjit._pjit_call_impl_python.__code__

    @functools.wraps(lower_program)
    def cached_lowering_to_hlo(jaxpr: Any, *arguments: Any, **kwargs: Any) -> Any:
        known, _knowing.known = _knowing.known, None
        name, backend, const_args, avals = arguments[:4]
        if known is None or const_args or jaxpr.effects or _always_lowered or _is_shown():
            return lower_program(jaxpr, *arguments, **kwargs)
        info = jaxpr.debug_info
        lowering = Lowering(
            jaxpr,
            (
                *(name, backend.platform, tuple(kwargs.items())),
                *[getattr(argument, "shardings", argument) for argument in arguments[2:]],
            ),
            _context(),
            (info.safe_arg_names(len(avals)), info.safe_result_paths(len(jaxpr.out_avals))),
        )
        digest = known(lowering)
        if digest is None:
            lowered = lower_program(jaxpr, *arguments, **kwargs)
            module, keepalive, callbacks = lowered[:3]
            if not (keepalive or callbacks):
                _knowing.lowered = module, lowering
            return lowered
        tuple_args = _dispatch.should_tuple_args(len(avals), backend.platform)
        return _stand_in(name, digest), [], [], [], [], tuple_args, None

    @functools.wraps(lower_call)
    def pjit_lower(*arguments: Any, **kwargs: Any) -> Any:
        is_asked = _knowing.known is not None
        computation = lower_call(*arguments, **kwargs)
        if is_asked or stands_for(computation._hlo) is None:
            return computation
        if computation._executable is None or not _is_called_by(calls):
            jaxpr, *shardings, donated, mesh, name, keep_unused, _, options = arguments
            computation._hlo = _pxla.lower_sharding_computation(
                *(jaxpr, "jit", name, *shardings, tuple(donated)),
                keep_unused=keep_unused,
                context_mesh=mesh,
                compiler_options_kvs=options,
                **kwargs,
            )._hlo
        return computation

    pxla: Any = _pxla
    pjit: Any = _pjit
    pxla._cached_lowering_to_hlo = cached_lowering_to_hlo
    pjit._pjit_lower = pjit_lower


def _is_called_by(code: CodeType) -> bool:
    """Return whether what calls `_pjit_lower` is, but for what JAX has in between, that code."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(3):
        if frame is None or frame.f_code is code:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code is code


def _is_shown() -> bool:
    """Return whether modules or their locations go elsewhere than to the compiler."""
    config = jax.config
    return bool(
        getattr(config, "jax_dump_ir_to", None)
        or getattr(config, "jax_enable_pgle", False)
        or getattr(config, "jax_compilation_cache_include_metadata_in_key", False)
    )


def _context() -> str:
    values, mesh = trace_context()
    return repr(
        (mesh, [_axes(value) if isinstance(value, _core.AxisEnv) else value for value in values])
    )


def _axes(axes: Any) -> tuple[Any, ...]:  # which have no text of their own
    return axes.axis_sizes, axes.spmd_axis_names, axes.explicit_mesh_axis_names


def _stand_in(name: str, digest: str) -> Any:
    with _mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.create()
        attributes = module.operation.attributes
        attributes["sym_name"] = ir.StringAttr.get(_mlir.sanitize_name(name).rstrip("_"))
        attributes[_STANDS_FOR] = ir.StringAttr.get(digest)
    return module
