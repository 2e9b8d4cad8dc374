"""Asks others before JAX makes a call of a jitted function, or indexes an array."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

from jax._src import api as _api
from jax._src import api_util as _api_util
from jax._src import pjit as _pjit
from jax._src import tree_util as _tree_util
from jax._src import util as _util
from jax._src.lib import jax_jit as _jax_jit
from jax._src.numpy import indexing as _indexing

from snaprt.jaxapi.installation import is_file_of_jax, is_source_of_jax
from snaprt.jaxapi.tracing.arrays import ArrayImpl
from snaprt.jaxapi.tracing.traces import (
    current_trace_setting,
    evaluating,
    once,
    read_as_constants,
    staging,
    staging_for_constants,
)

#: Infers the types of a call of a jitted function: JAX's own, before anybody asks.
infer_jit: Any = _pjit._infer_params

_run_jit: Any = _pjit._run_python_pjit

#: Makes a call of the primitive ``jit``.
run_jit_primitive: Any = _pjit.jit_p.impl

_ASKED_BY_CPP = next(
    constant
    for constant in _pjit._cpp_pjit.__code__.co_consts
    if isinstance(constant, CodeType) and constant.co_name == "cache_miss"
)

_NOTHING = SimpleNamespace(effects=(), consts=())

#: Stands beside what a call returns where C++ is to ask at the next one, too, and ever after.
NO_FAST_PATH = (None, None, None, _NOTHING, None, None, None)

#: The same where a later answer may be another: C++ forgets the call. To JAX, its program is to be
#: compiled again for what a profile has shown.
ASK_AGAIN = (
    *(None, None, None, _NOTHING, None),
    SimpleNamespace(is_enabled=lambda: True, is_fdo_consumed=lambda: False),
    None,
)

MakeCall = Callable[[], tuple[Any, ...]]
_AskBeforeJit = Callable[[Any, Any, Any, Any], MakeCall | None]
_asked_before_jit: Mapping[Any, _AskBeforeJit] = {}  # replaced, for threads that look at it
_asked_before_jit_lock = threading.Lock()
_MADE_ELSEWHERE = object()


def run_jit(inferred: Any, flat: Any, fun: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Make the call whose types `infer_jit` inferred, and return what C++ takes."""
    done = _run_jit(inferred, flat, fun, args, kwargs)
    if any(type(constant) in read_as_constants for constant in inferred.consts):
        # It was traced as an operand, without which C++ would make the next call.
        done = (*done[:5], None, *done[6:])
    return done


def ask_before_jit(owner: Any, ask: _AskBeforeJit) -> None:
    """Ask before JAX's Python makes a call of a jitted function for C++; once for each owner.

    C++ hands what it does not know to ``cache_miss``, which calls two functions of its module in
    turn: one infers the types of the call, one makes it. Those are replaced, once for all who ask.

    Args:
        owner: Who asks.
        ask: Takes the function, what JAX knows of the jit, and the arguments. Returns ``None``
            where it leaves the call to others, else what makes it and returns what JAX's does.
    """
    global _asked_before_jit
    with _asked_before_jit_lock:
        is_asked_already = bool(_asked_before_jit)
        _asked_before_jit = {**_asked_before_jit, owner: ask}
    if is_asked_already:
        return
    _count_clearings()

    # By the names of those whose place they take, what has them in its globals is pickled.
    @functools.wraps(infer_jit)
    def infer(fun: Any, info: Any, args: Any, kwargs: Any) -> Any:
        if sys._getframe(1).f_code is _ASKED_BY_CPP:  # and not to lower it, say
            for ask in _asked_before_jit.values():
                make = ask(fun, info, args, kwargs)
                if make is not None:
                    return make, _MADE_ELSEWHERE
            return infer_jit(fun, info, args, kwargs)
        if staging.only_shapes:
            return infer_jit(fun, info, args, kwargs)
        with staging_for_constants("ahead_of_time"):
            inferred = infer_jit(fun, info, args, kwargs)
            if any(type(constant) in read_as_constants for constant in inferred[0].consts):
                # As a call of before traced it. The same function in another object is traced anew.
                inferred = infer_jit(functools.partial(fun), info, args, kwargs)
            return inferred

    @functools.wraps(_run_jit)
    def run(inferred: Any, flat: Any, fun: Any, args: Any, kwargs: Any) -> Any:
        if flat is _MADE_ELSEWHERE:
            return inferred()
        return run_jit(inferred, flat, fun, args, kwargs)

    module: Any = _pjit
    module._run_python_pjit = run  # first, for what the other returns is its alone
    module._infer_params = infer


class UsersSource(str):
    """Where a function of JAX's own stands, such as `jax.numpy.dot`, that the user has jitted."""

    __slots__ = ()


@functools.cache
def know_users_jits() -> None:
    """Let JAX note of each function that is jitted from here on whether the user did that.

    Where a function stands says so of all but JAX's own: of `jax.jit(jax.numpy.dot)`, or of what
    `checkify` and `vjp` return. Checked with jax 0.10.2 and 0.12.0: JAX asks where it stands when
    it is jitted, and goes by that in its own messages alone.
    """
    source_of = _api_util.fun_sourceinfo
    parse = _pjit._parse_jit_arguments.__code__

    @functools.wraps(source_of)
    def fun_sourceinfo(fun: Any) -> str:
        source = source_of(fun)
        frame: FrameType | None = sys._getframe(1)
        if frame and frame.f_code is parse and is_source_of_jax(source):
            while frame and frame.f_globals.get("__name__") in _JIT_ITSELF:
                frame = frame.f_back
            if frame and not is_file_of_jax(frame.f_code.co_filename):
                return UsersSource(source)
        return source

    module: Any = _api_util
    module.fun_sourceinfo = fun_sourceinfo


_JIT_ITSELF = frozenset({"jax._src.api", "jax._src.pjit", "jax._src.traceback_util"})


def jit_calls_under_way() -> list[tuple[str, str]]:
    """Return the name of each jitted function that this thread is in, and where that stands."""
    calls = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _ASKED_BY_CPP:
            fun, info = frame.f_locals["fun"], frame.f_locals["jit_info"]
            calls.append((getattr(fun, "__name__", "a function"), info.fun_sourceinfo))
        frame = frame.f_back
    return calls


def parse_jit_call(info: Any, args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
    """Return what identifies a call of a jitted function, and its leaves that are traced."""
    return _jax_jit.parse_arguments(
        args,
        tuple(kwargs.values()),
        tuple(kwargs),
        info.static_argnums,
        info.static_argnames,
        _tree_util.tracing_registry,
    )


def jit_again(fun: Any, info: Any) -> Any:
    """Return another function as `jax.jit` made of ``fun``: both use the same compiled programs."""
    return _pjit._cpp_pjit(fun, info)


@functools.lru_cache(maxsize=4096)
def _is_users(source: str) -> bool:
    return not is_source_of_jax(source)


def is_users_jit(info: Any) -> bool:
    """Return whether a jitted function, of which JAX knows ``info``, is none of JAX's own."""
    return _is_users(info.fun_sourceinfo)


class _Clearings:
    """Counts how often JAX's caches of traced functions were cleared: it takes this for one.

    Attributes:
        count: How often, since anybody asks before calls of jitted functions.
    """

    def __init__(self) -> None:
        self.count = 0

    def cache_clear(self) -> None:
        """Count once more; `jax.clear_caches` calls it."""
        self.count += 1


clearings = _Clearings()


def _count_clearings() -> None:
    """Count each `jax.clear_caches`, and each ``clear_cache`` of a jitted function.

    Checked with jax 0.10.2, 0.11.2 and 0.12.0: whoever jits a function sets the latter for all.
    """
    _util.register_cache(clearings, "snaprt")
    module: Any = _pjit
    clear_one = module.jit_evict_fn

    @functools.wraps(clear_one)
    def clear_cache(function: Any) -> None:
        clearings.cache_clear()
        clear_one(function)

    module.jit_evict_fn = clear_cache
    jitted: Any = type(_api.jit(clear_cache))
    jitted.clear_cache = clear_cache


NOT_KNOWN = object()

#: A call that JAX is to make; in a thread that rests, C++ makes the next ones of its kind.
LEFT = object()

_FollowJit = Callable[
    [Any, Callable[..., Any], Any, Any, Any],
    tuple[Any, Callable[[Any], None] | None, tuple[Any, Any]],
]


def intercept_jit(kind: type, follow: _FollowJit) -> None:
    """Ask ``follow`` first whenever a jitted function is called under a trace of type ``kind``.

    Args:
        kind: The type of the trace.
        follow: Takes the trace, the function, what JAX knows of the jit, and the arguments. Returns
            what the call returns, `LEFT`, or ``NOT_KNOWN``; what to tell what JAX then returned,
            which is for the last; and the arguments to call it with.
    """

    def ask(fun: Any, info: Any, args: Any, kwargs: Any) -> MakeCall | None:
        trace = current_trace_setting.value
        if type(trace) is not kind:
            return None
        returned, learn, sent = follow(trace, fun, info, args, kwargs)
        if returned is LEFT:
            return lambda: run_eagerly(fun, info, *sent)
        if returned is not NOT_KNOWN:
            return lambda: (returned, *NO_FAST_PATH)
        if learn is None:
            return None

        def make() -> tuple[Any, ...]:
            inferred, flat = infer_jit(fun, info, *sent)
            result = run_jit(inferred, flat, fun, *sent)
            learn(result[0])
            return result

        return make

    def run_eagerly(fun: Any, info: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
        with evaluating():
            inferred, flat = infer_jit(fun, info, args, kwargs)
            return run_jit(inferred, flat, fun, args, kwargs)

    ask_before_jit(kind, ask)


@once
def intercept_indexing(
    kind: Any, follow: Callable[[Any, Any, Any, Callable[[], Any]], Any]
) -> None:
    """Ask ``follow`` whenever an ordinary array is indexed under a trace of type ``kind``.

    Checked with jax 0.10.2 and 0.12.0: ``__getitem__`` of an array calls this function by its name.
    """
    module: Any = _indexing
    take = module.rewriting_take

    @functools.wraps(take)
    def rewriting_take(arr: Any, idx: Any, **options: Any) -> Any:
        trace = current_trace_setting.value
        if type(trace) is kind and type(arr) is ArrayImpl and not options:
            return follow(trace, arr, idx, lambda: take(arr, idx))
        return take(arr, idx, **options)

    module.rewriting_take = rewriting_take


def parse_call(
    function: Callable[..., Any], info: Any, args: Any, kwargs: Any
) -> tuple[Any, Sequence[Any]] | None:
    """Return what identifies a call of a jitted function, and its flat arguments that are traced.

    The first can be hashed and compared; it does not hold the function. ``None`` where arguments
    cannot be hashed.
    """
    try:
        signature, operands = parse_jit_call(info, args, kwargs)
        key = (weakref.ref(function), info, signature, clearings.count)
        hash(key)
    except (TypeError, ValueError):
        return None
    return key, operands
