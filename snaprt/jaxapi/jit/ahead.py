"""Sees calls of what `lower(...).compile()` returns; must not know who looks at them.

Checked with jax 0.10.2 and 0.12.0. What a `jax.stages.Compiled` was lowered from, JAX forgets: it
is kept beside it from `watch_compiled` on.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Protocol

import jax
from jax._src import core as _core
from jax._src import tree_util as _tree_util

from snaprt.jaxapi.jit.calls import FlatCall, named_call


@dataclass(eq=False)
class CompiledAhead:
    """What was compiled before it is called.

    Attributes:
        lowered: The program, which holds the executable.
        like: A call of it, without the arguments.
        known: What whoever looks at its calls wants to keep.
    """

    lowered: jax.stages.Lowered
    like: FlatCall
    known: Any = None


class CompiledWatcher(Protocol):
    """Makes calls of compiled programs."""

    def __call__(
        self, name: str, ahead: CompiledAhead | None, args: Any, run: Callable[[], Any]
    ) -> Any:
        """Make a call.

        Args:
            name: Of the program, as far as it is known.
            ahead: What it is; None where it was compiled before anybody looked.
            args: The leaves of its arguments.
            run: Makes the call as JAX does.
        """


def watch_compiled(is_watched: Callable[[], bool], watcher: CompiledWatcher) -> None:
    """Let ``watcher`` make the calls of compiled programs where ``is_watched``; once a process."""
    compile_lowered, call_compiled = jax.stages.Lowered.compile, jax.stages.Compiled.__call__

    @functools.wraps(compile_lowered)
    def compile_and_keep(lowered: Any, *args: Any, **kwargs: Any) -> Any:
        compiled: Any = compile_lowered(lowered, *args, **kwargs)
        options = args[0] if args else kwargs.get("compiler_options")
        # Made at the first call: few are called while somebody looks.
        compiled.snaprt_ahead = functools.cache(lambda: _ahead(lowered, compiled, options))
        return compiled

    @functools.wraps(call_compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Our own calls of our own programs are looked at elsewhere.
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith(("snaprt.", "snaprt_")) or not (
            is_watched() and _core.trace_state_clean()
        ):
            return call_compiled(*args, **kwargs)
        compiled: Any = args[0]
        leaves = _tree_util.tracing_registry.flatten((args[1:], kwargs))[0]
        make = getattr(compiled, "snaprt_ahead", None)
        ahead = None if make is None else make()
        name = "a compiled program" if ahead is None else ahead.like.params["name"]
        return watcher(name, ahead, leaves, lambda: call_compiled(*args, **kwargs))

    stages: Any = jax.stages
    stages.Lowered.compile = compile_and_keep
    stages.Compiled.__call__ = call


def _ahead(lowered: Any, compiled: Any, options: Any) -> CompiledAhead | None:
    lowering = copy.copy(lowered._lowering)
    arguments: dict[str, Any] = getattr(lowering, "compile_args", {})
    described = arguments.get("all_args_info")
    if described is None:
        return None
    lowering._executable = compiled._executable
    lowering._compiler_options_kvs += tuple((options or {}).items())
    effects = (*arguments["ordered_effects"], *arguments["unordered_effects"])
    debug_info = described.debug_info
    params = {
        "name": debug_info.func_src_info.partition(" at ")[0],
        "jaxpr": SimpleNamespace(effects=effects),
    }
    like = named_call(
        (), debug_info.arg_names, len(described.in_avals), debug_info.result_paths,
        len(arguments["global_out_avals"]), params,
    )  # fmt: skip
    return CompiledAhead(jax.stages.Lowered(lowering, lowered.args_info, lowered.out_tree), like)


def called_with(ahead: CompiledAhead, args: Any) -> FlatCall:
    """Return a call with the leaves of its arguments."""
    return replace(ahead.like, args=tuple(map(_core.full_lower, args)))
