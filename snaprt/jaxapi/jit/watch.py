"""Hands the calls of jitted functions to a watcher; must not know what that does with them.

A jitted function is called in C++, which finds the executable by the arguments and by what of JAX's
configuration counts. A setting of our own counts here: while a thread has it, C++ finds nothing and
asks JAX's Python, which asks us. Nothing else of JAX looks at it. Checked with jax 0.10.2 and
0.12.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from jax._src import core as _core
from jax._src import pjit as _pjit
from jaxlib import _jax as _jaxlib  # pyright: ignore[reportAttributeAccessIssue]

from snaprt.jaxapi.jit.ahead import CompiledAhead, watch_compiled
from snaprt.jaxapi.jit.entry import NO_FAST_PATH, MakeCall, ask_before_jit, run_jit_primitive

_watch: Any = _jaxlib.config.Config(
    "snaprt_watch", None, include_in_jit_key=True, include_in_trace_context=False
)


class JitWatcher(Protocol):
    """Makes the calls of jitted functions in threads that are watched."""

    def leaves_to_jax(self, source: str) -> bool:
        """Say whether a function is not watched; ``source`` is ``NAME at FILE:LINE``."""
        ...

    def call(self, fun: Any, info: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``jax.jit(fun)``, of which JAX knows ``info``, as the user does."""

    def bind(self, args: tuple[Any, ...], params: dict[str, Any]) -> list[Any]:
        """Run what `grad`, `vmap` and the like have made of a jitted function."""
        ...

    def call_compiled(
        self, name: str, ahead: CompiledAhead | None, args: Any, run: Callable[[], Any]
    ) -> Any:
        """Call what was compiled ahead of time; see `snaprt.jaxapi.jit.ahead`."""


def use_jit_watcher(watcher: JitWatcher) -> None:
    """Let ``watcher`` make the calls of jitted functions wherever `set_watch` says so."""
    clean, source_of = _core.trace_state_clean, _source_of_jaxpr

    def ask(fun: Any, info: Any, args: Any, kwargs: Any) -> MakeCall | None:
        if (
            _watch.value is None
            or not clean()  # it is traced or recorded: a part of another program
            or watcher.leaves_to_jax(info.fun_sourceinfo)
        ):
            return None
        return lambda: (watcher.call(fun, info, args, kwargs), *NO_FAST_PATH)

    def run_primitive(*args: Any, **params: Any) -> Any:
        if _watch.value is None or watcher.leaves_to_jax(source_of(params["jaxpr"])):
            return run_jit_primitive(*args, **params)
        return watcher.bind(args, params)

    ask_before_jit(use_jit_watcher, ask)
    watch_compiled(lambda: _watch.value is not None, watcher.call_compiled)
    jit_primitive: Any = _pjit.jit_p
    jit_primitive.def_impl(run_primitive)


def set_watch(words: tuple[str, ...] | None) -> Any:
    """Watch this thread's jitted functions from here on; return what `restore_watch` takes.

    Args:
        words: Anything on which the watcher's `leaves_to_jax` depends; None not to watch.
    """
    return _watch.swap_local(words)


def restore_watch(before: Any) -> None:
    """Watch this thread again as it was before `set_watch`."""
    _watch.set_local(before)


def set_process_watch(words: tuple[str, ...] | None) -> None:
    """Watch the calls of every thread that has no watch of its own."""
    _watch.set_global(words)


def watch() -> tuple[str, ...] | None:
    """Return the words with which this thread is watched."""
    return _watch.value


def _source_of_jaxpr(jaxpr: Any) -> str:
    return str(jaxpr.debug_info.func_src_info)
