"""Hands the calls of jitted functions, and of what was compiled ahead of them, to a watcher.

A jitted function is called in C++, which finds the executable by the arguments and by what of JAX's
configuration counts. A setting of our own counts here: while a thread has it, C++ finds nothing and
asks JAX's Python, which asks us. Nothing else of JAX looks at it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, Protocol

import jax
from jax._src import api as _api
from jax._src import callback as _callback
from jax._src import core as _core
from jax._src import pjit as _pjit
from jax._src import tree_util as _tree_util
from jaxlib import _jax as _jaxlib  # pyright: ignore[reportAttributeAccessIssue]

from snaprt.jaxapi.installation import device_list
from snaprt.jaxapi.jit.calls import FlatCall, named_call
from snaprt.jaxapi.jit.entry import (
    ASK_AGAIN,
    NO_FAST_PATH,
    MakeCall,
    UsersSource,
    ask_before_jit,
    infer_jit,
    run_jit,
    run_jit_primitive,
)
from snaprt.jaxapi.tracing.operations import RUN_FUNCTIONS
from snaprt.jaxapi.tracing.traces import once


@dataclass(eq=False)
class CompiledAhead:
    """What was compiled before it is called."""

    lowered: jax.stages.Lowered  # the program, which holds the executable
    like: FlatCall  # a call of it, without the arguments
    kinds: list[tuple[Any, Any]]  # the shape and dtype of each argument
    known: Any = None  # what whoever looks at its calls wants to keep


CompiledWatcher = Callable[[str, CompiledAhead | None, Any, Callable[..., Any], Any, Any], Any]
"""Makes a call of a compiled program: takes its name, as far as it is known; what it is, None where
it was compiled before anybody looked; the leaves of its arguments; and what makes the call, with
its arguments."""


def watch_compiled(is_watched: Callable[[], bool], watcher: CompiledWatcher) -> None:
    """Let ``watcher`` make the calls of compiled programs where ``is_watched``; once a process."""
    compile_lowered, call_compiled = jax.stages.Lowered.compile, jax.stages.Compiled.__call__

    @functools.wraps(compile_lowered)
    def compile_and_keep(lowered: Any, *args: Any, **kwargs: Any) -> Any:
        compiled: Any = compile_lowered(lowered, *args, **kwargs)
        options = args[0] if args else kwargs.get("compiler_options")
        devices = kwargs.get("device_assignment")
        # Made at the first call: few are called while somebody looks.
        compiled.snaprt_ahead = functools.cache(lambda: _ahead(lowered, compiled, options, devices))
        return compiled

    @functools.wraps(call_compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Our own calls of our own programs are looked at elsewhere.
        frame = sys._getframe(1)
        if frame.f_code.co_name == "give_away_and_call" and frame.f_back is not None:
            frame = frame.f_back  # `snaprt.jaxapi.tracing.teaching` asks before us
        caller = frame.f_globals.get("__name__", "")
        if caller.startswith(("snaprt.", "snaprt_")) or not (
            is_watched() and _core.trace_state_clean()
        ):
            return call_compiled(*args, **kwargs)
        compiled: Any = args[0]
        make = getattr(compiled, "snaprt_ahead", None)
        ahead = None if make is None else make()
        name = "a compiled program" if ahead is None else ahead.like.params["name"]
        if compiled._params.is_high:
            # JAX takes values apart into arrays, and makes others of those that come out.
            params, run = compiled._params, compiled._params.executable.call

            def call_with_arrays(*arrays: Any) -> Any:
                leaves = arrays[len(params.const_args) :]
                if ahead is not None and not _is_taken(ahead, leaves):
                    return run(*arrays)
                return watcher(name, ahead, leaves, run, arrays, {})

            executable = SimpleNamespace(call=call_with_arrays)
            return compiled.call(params._replace(executable=executable), *args[1:], **kwargs)[0]
        leaves, tree = _tree_util.tracing_registry.flatten((args[1:], kwargs))
        if ahead is not None and not (tree == ahead.lowered.in_tree and _is_taken(ahead, leaves)):
            return call_compiled(*args, **kwargs)  # which raises, in JAX's words
        return watcher(name, ahead, leaves, call_compiled, args, kwargs)

    stages: Any = jax.stages
    stages.Lowered.compile = compile_and_keep
    stages.Compiled.__call__ = call


def _is_taken(ahead: CompiledAhead, leaves: Any) -> bool:
    """Return whether these are arguments of shapes and dtypes that it takes."""
    try:
        _core.check_eval_args(map(_core.full_lower, leaves))
        actual = [(kind.shape, kind.dtype) for kind in map(jax.typeof, leaves)]
    except (TypeError, ValueError, OverflowError, jax.errors.UnexpectedTracerError):
        return False
    return actual == ahead.kinds


def _ahead(lowered: Any, compiled: Any, options: Any, devices: Any) -> CompiledAhead | None:
    lowering = copy.copy(lowered._lowering)
    if devices is not None:  # it was lowered for an abstract mesh
        lowering._device_list = device_list(devices)
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
    kinds = [(info.shape, info.dtype) for info in jax.tree.leaves(lowered.args_info)]
    lowered = jax.stages.Lowered(lowering, lowered.args_info, lowered.out_tree)
    return CompiledAhead(lowered, like, kinds)


def called_with(ahead: CompiledAhead, args: Any) -> FlatCall:
    """Return a call with the leaves of its arguments."""
    return replace(ahead.like, args=tuple(map(_core.full_lower, args)))


_watch: Any = _jaxlib.config.Config(
    "snaprt_watch", None, include_in_jit_key=True, include_in_trace_context=False
)

#: The same for a thread that records calls rather than makes them: what was left to C++ there.
_rest: Any = _jaxlib.config.Config(
    "snaprt_rest", None, include_in_jit_key=True, include_in_trace_context=False
)

#: Changes for all threads at once, so that C++ finds nothing that was left to it anywhere.
_rests_ended: Any = _jaxlib.config.Config(
    "snaprt_rests_ended", 0, include_in_jit_key=True, include_in_trace_context=False
)

#: After so many changes threads rest no more: each has Python make every call once.
_MOST_ENDS: Final = 64


class _Relaxed(NamedTuple):
    """The setting of a thread in which C++ may make calls that the watcher leaves to it.

    C++ finds there only what was left to it in the same generation.
    """

    words: tuple[str, ...]
    generation: int


class JitWatcher(Protocol):
    """Makes the calls of jitted functions in threads that are watched."""

    def leaves_call(self, info: Any, args: Any, kwargs: Any) -> bool:
        """Return whether JAX makes this call and those like it, until `watch_closely`.

        Asked where the thread is relaxed, of functions that are watched. Of each such call, `left`
        is told after it.
        """
        ...

    def left(self, info: Any, args: Any, kwargs: Any, results: Any) -> None:
        """Learn that JAX has made a call of a function; none that failed."""

    def leaves_to_jax(self, source: str) -> bool:
        """Return whether a function is not watched; ``source`` is ``NAME at FILE:LINE``."""
        ...

    def call(self, fun: Any, info: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``jax.jit(fun)``, of which JAX knows ``info``, as the user does."""

    def bind(self, args: tuple[Any, ...], params: dict[str, Any]) -> list[Any]:
        """Run what `grad`, `vmap` and the like have made of a jitted function."""
        ...

    def call_compiled(
        self,
        name: str,
        ahead: CompiledAhead | None,
        leaves: Any,
        run: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Call what was compiled ahead of time; see `snaprt.jaxapi.jit.watch`."""


def use_jit_watcher(watcher: JitWatcher) -> None:
    """Let ``watcher`` make the calls of jitted functions wherever `set_watch` says so."""
    clean, source_of = _core.trace_state_clean, _source_of_jaxpr

    def ask(fun: Any, info: Any, args: Any, kwargs: Any) -> MakeCall | None:
        setting = _watch.value
        if (
            setting is None
            or not clean()  # it is traced or recorded: a part of another program
            or watcher.leaves_to_jax(_source_of_function(fun, info))
        ):
            return None
        if type(setting) is _Relaxed:
            if watcher.leaves_call(info, args, kwargs):
                return lambda: make_and_tell(fun, info, args, kwargs)
            return lambda: (watcher.call(fun, info, args, kwargs), *ASK_AGAIN)
        return lambda: (watcher.call(fun, info, args, kwargs), *NO_FAST_PATH)

    def make_and_tell(fun: Any, info: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
        inferred, flat = infer_jit(fun, info, args, kwargs)
        made = run_jit(inferred, flat, fun, args, kwargs)
        watcher.left(info, args, kwargs, made[0])
        return made

    def run_primitive(*args: Any, **params: Any) -> Any:
        if _watch.value is None or watcher.leaves_to_jax(source_of(params["jaxpr"])):
            return run_jit_primitive(*args, **params)
        return watcher.bind(args, params)

    ask_before_jit(use_jit_watcher, ask)
    _watch_callbacks()
    watch_compiled(lambda: _watch.value is not None, watcher.call_compiled)
    jit_primitive: Any = _pjit.jit_p
    jit_primitive.def_impl(run_primitive)
    _left[:] = [watcher.left]
    _keep_hook()


_left: list[Callable[[Any, Any, Any, Any], None]] = []

#: What C++ calls after each call that it makes: JAX's own, which looks for NaN if it is asked to.
_call_hook: Any = _api._post_hook_state


class _Thread(threading.local):
    """What a thread that is relaxed, or rests, had before."""

    before: tuple[Any, Any, Any] | None = None  # which setting it is, its value, and the hook
    goes_on: Callable[[Any], bool] = bool  # whether it rests after a call that C++ has made


_thread = _Thread()


@functools.cache
def _keep_hook() -> None:
    module: Any = _api
    module._post_hook_state = _CallHook()


class _CallHook:
    """Stands in the place of that state where JAX's Python sets it."""

    def set_local(self, hook: Any) -> None:
        watch_closely()
        _call_hook.set_local(hook)

    def set_global(self, hook: Any) -> None:
        watch_closely()
        _call_hook.set_global(hook)


def relax_watch(generation: int) -> bool:
    """Let C++ make the calls of this thread that the watcher leaves to it, until `watch_closely`.

    Checked with jax 0.10.2 and 0.12.0: C++ tells Python of each call that it has made, but not of
    one for which it asked Python, and not of one that failed.

    Args:
        generation: C++ makes the calls that were left to it in this one; no other thread's.

    Returns:
        Whether it does; not where JAX looks for NaN after each call.
    """
    words = _watch.value
    if type(words) is _Relaxed:
        return True
    if words is None or _call_hook.value is not None:
        return False
    _leave(_watch, _Relaxed(words, generation), _after_call)
    return True


def _leave(setting: Any, value: Any, hook: Callable[..., None]) -> None:
    _thread.before = setting, setting.swap_local(value), _call_hook.swap_local(hook)


def watch_closely() -> None:
    """Have each call of this thread asked about again, if it is relaxed or rests."""
    if _thread.before is None:
        return
    setting, value, hook = _thread.before
    _thread.before = None
    setting.set_local(value)
    _call_hook.set_local(hook)


def rest(generation: int, goes_on: Callable[[Any], bool]) -> None:
    """Let C++ make the calls of this thread that were left to JAX, until `watch_closely`.

    For a thread whose trace `intercept_jit` asks about each call: from the second call of its kind
    on, C++ makes one that was left while the thread rests. It does not where JAX looks for NaN
    after each call, nor where the thread is relaxed.

    Args:
        generation: C++ makes the calls that were left to it in this one.
        goes_on: Returns whether the thread still rests; asked after each call that C++ has made, of
            the function that it has called.
    """
    global _has_rested
    ends = _rests_ended.get_global()
    if _rest.value == (generation, ends):
        return
    if _rest.value is not None:
        watch_closely()
    if _thread.before is None and _call_hook.value is None and ends < _MOST_ENDS:
        _keep_hook()
        _has_rested = True
        _thread.goes_on = goes_on
        _leave(_rest, (generation, ends), _after_call_at_rest)


def rests() -> bool:
    """Return whether C++ makes the calls of this thread that are left to JAX from now on."""
    resting = _rest.value
    return resting is not None and resting[1] == _rests_ended.get_global()


_has_rested = False  # a thread, since they all were ended

_UNKNOWN_TO_CPP: Final = object()


@once
def take_values_at_rest(kind: type, value: Callable[[Any], Any]) -> None:
    """Let C++ take the values of instances of ``kind``, in threads that rest.

    JAX takes arrays of keys apart by the same registry, which C++ alone asks. Elsewhere C++ finds
    in an instance what it does not know, and asks Python.

    Args:
        kind: A type that C++ does not know.
        value: Returns the value of an instance, None where there is none yet.
    """

    def flatten(array: Any) -> tuple[tuple[Any], None]:
        found = value(array) if rests() else None
        return (_UNKNOWN_TO_CPP if found is None else found,), None

    def unflatten(_: None, values: tuple[Any]) -> Any:
        return values[0]

    _tree_util.dispatch_registry.register_node(kind, flatten, unflatten)


def end_all_rests() -> None:
    """Have each call asked about again in every thread that rests."""
    global _has_rested
    if _has_rested:
        _has_rested = False
        watch_closely()
        _rests_ended.set_global(_rests_ended.get_global() + 1)


def _after_call_at_rest(function: Any, args: Any, kwargs: Any, results: Any) -> None:
    if not _thread.goes_on(function):
        watch_closely()
    look = _call_hook.get_global()
    if look is not None:  # since the thread rests
        watch_closely()
        look(function, args, kwargs, results)


def _after_call(function: Any, args: Any, kwargs: Any, results: Any) -> None:
    info = getattr(function, "_jit_info", None)  # none of what C++ calls for JAX's Python
    if info is not None:
        _left[0](info, args, kwargs, results)
    look = _call_hook.get_global()
    if look is not None:  # since the thread was relaxed
        look(function, args, kwargs, results)


class _Paused(threading.local):
    """What `pause_watch` has in its place, the last one last; each thread has its own."""

    def __init__(self) -> None:
        self.before: list[Any] = []


_paused = _Paused()


def pause_watch() -> None:
    """Let JAX make this thread's calls by itself, but those of callbacks, until `resume_watch`.

    If the thread was relaxed, it will not be then.
    """
    watch_closely()
    _paused.before.append(_watch.swap_local(None))


def resume_watch() -> None:
    """Watch this thread again as it was before `pause_watch`."""
    _watch.set_local(_paused.before.pop())


@contextlib.contextmanager
def watching_meanwhile() -> Iterator[None]:
    """Watch this thread inside as it was before `pause_watch`: the user's own code runs there."""
    if not _paused.before:
        yield
        return
    paused = _watch.swap_local(None)
    _watch.set_local(_paused.before[-1])
    try:
        yield
    finally:
        _watch.set_local(paused)


def _watch_callbacks() -> None:
    """Watch what callbacks call while the program that calls them back runs in the same thread.

    Checked with jax 0.10.2 and 0.12.0: whatever calls back is lowered by this function.
    """
    module: Any = _callback
    emit = module.emit_python_callback

    @functools.wraps(emit)
    def emit_watched(ctx: Any, callback: Any, *args: Any, **kwargs: Any) -> Any:
        return emit(ctx, functools.partial(_call_watched, callback), *args, **kwargs)

    module.emit_python_callback = emit_watched


def _call_watched(callback: Callable[..., Sequence[Any]], *args: Any) -> Sequence[Any]:
    with watching_meanwhile():
        return callback(*args)


def set_watch(words: tuple[str, ...] | None) -> Any:
    """Watch this thread's jitted functions from here on; return what `restore_watch` takes.

    Args:
        words: Anything on which the watcher's `leaves_to_jax` depends; None not to watch.
    """
    watch_closely()
    return _watch.swap_local(words)


def restore_watch(before: Any) -> None:
    """Watch this thread again as it was before `set_watch`."""
    watch_closely()
    _watch.set_local(before)


def set_process_watch(words: tuple[str, ...] | None) -> None:
    """Watch the calls of every thread that has no watch of its own."""
    _watch.set_global(words)


def process_watch() -> tuple[str, ...] | None:
    """Return the words with which threads are watched that have no watch of their own."""
    return _watch.get_global()


def watch() -> tuple[str, ...] | None:
    """Return the words with which this thread is watched."""
    setting = _watch.value
    return setting.words if type(setting) is _Relaxed else setting


def _source_of_function(fun: Any, info: Any) -> str:
    if getattr(fun, "_apply_primitive", False) and fun.__name__ in RUN_FUNCTIONS:
        return UsersSource(info.fun_sourceinfo)
    return info.fun_sourceinfo


def _source_of_jaxpr(jaxpr: Any) -> str:
    source = jaxpr.debug_info.func_src_info
    return source if isinstance(source, str) else str(source)
