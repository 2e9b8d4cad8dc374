"""Transformations of functions that were traced before: in a steady scope, they are one operation.

`jax.vjp` (so `jax.grad` as well), `jax.jvp`, `jax.vmap`, `jax.checkpoint` and `jax.lax.scan` run
the Python code of their function each time. In a scope of ``snaprt.lazy(steady=True)`` the function
is traced once for each kind of call, as if it were jitted, and traced again when something that it
can be seen to depend on is another: see `snaprt.trace.captured`. What cannot be seen (what it reads
from a file, or from an attribute of an object of a library's) must stay the same, as `jax.jit`
demands too; each ``SNAPRT_STEADY_CHECK``-th call is traced anew to find out.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, Final

import jax

from snaprt import jaxapi, metrics, settings
from snaprt.trace.array import LazyArray
from snaprt.trace.captured import (
    Data,
    NotCapturedError,
    capture,
    rebuild,
    users_code,
)

_log = logging.getLogger("snaprt.lazy")

#: So many functions are remembered.
MAX_FUNCTIONS: Final = 1024

#: A function that was traced so often is no longer followed: something is another each time.
MAX_TRACES: Final = 16

jaxapi.files_of_parts.add(__file__)

_OPERANDS: Final = frozenset({LazyArray, jaxapi.ArrayImpl})


class _Function:
    """A transformation of one function, traced for each kind of call."""

    def __init__(self, transform: Callable[..., Any], data: Data, options: Any, name: str) -> None:
        self.calls = 0
        self.is_followed = True
        self._transform = transform
        self._data = data
        self._options = options
        self._name = name
        self.jitted = self.jit()

    def jit(self) -> Callable[..., Any]:
        """Return the transformation as a jitted function, not traced yet."""

        def run(arrays: Any, operands: Any) -> Any:
            metrics.counter_add("SteadyTraces")
            function = rebuild(self._data, iter(arrays))
            return self._transform(function, *operands, **dict(self._options))

        run.__name__ = run.__qualname__ = self._name
        return jax.jit(run)


#: What the pullbacks consist of that `jax.vjp` returned here, which are traced once as well.
_pullbacks: weakref.WeakSet[Any] = weakref.WeakSet()

_functions: OrderedDict[Any, _Function] = OrderedDict()
_traced: Counter[Any] = Counter()
_lock = threading.Lock()


def follow_transform(
    trace: Any,
    transform: Callable[..., Any],
    function: Any,
    operands: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    """Follow a call of a transformation, as `jaxapi.intercept_transforms` asks."""
    if not trace.steady or trace.modes.sees_each_operation or jaxapi.jit_is_disabled():
        return jaxapi.NOT_FOLLOWED
    if function is None and jaxapi.code_of_pullback(operands[0]) not in _pullbacks:
        return jaxapi.NOT_FOLLOWED
    for leaf in jax.tree.leaves(operands):
        if type(leaf) not in _OPERANDS and not _is_operand(leaf):
            return jaxapi.NOT_FOLLOWED
    arrays: list[Any] = []
    try:
        data = capture(function, arrays)
        key = (transform, data, tuple(options.items()))
        known = _functions.get(key)
    except (NotCapturedError, TypeError, ValueError):  # of what has no hash, or compares otherwise
        return jaxapi.NOT_FOLLOWED
    if known is None:
        known = _remember(key, function)
    if not known.is_followed:
        return jaxapi.NOT_FOLLOWED
    known.calls += 1
    every = settings.get("SNAPRT_STEADY_CHECK")
    try:
        if every and known.calls % every == 0:
            _check(known, function, arrays, operands)
        result = known.jitted(arrays, operands)
    except Exception as error:  # JAX's own way raises it again, unless it needs values
        known.is_followed = False
        metrics.counter_add("SteadyRefused")
        _log.info("%s is traced at every call: %s", _place(function), str(error).partition("\n")[0])
        return jaxapi.NOT_FOLLOWED
    if isinstance(result, tuple) and len(result) > 1 and isinstance(result[1], jaxapi.Pullback):
        _pullbacks.add(jaxapi.code_of_pullback(result[1]))
    return result


def _is_operand(leaf: Any) -> bool:
    if isinstance(leaf, jaxapi.Tracer):
        return False
    return jaxapi.is_array_aval(jaxapi.typeof(leaf))


def _remember(key: Any, function: Any) -> _Function:
    transform, data, options = key
    known = _Function(transform, data, options, _name(transform, function))
    root = (transform, users_code(function))
    with _lock:
        _traced[root] += 1
        if _traced[root] > MAX_TRACES:
            known.is_followed = False
            if _traced[root] == MAX_TRACES + 1:
                metrics.counter_add("SteadyRefused")
                _log.warning(
                    "%s is traced at every call: what it depends on was another in each of %d; "
                    "pass what changes as an array",
                    _place(function),
                    MAX_TRACES,
                )
        _functions[key] = known
        if len(_functions) > MAX_FUNCTIONS:
            _functions.popitem(last=False)
    return known


def _check(known: _Function, function: Any, arrays: Any, operands: Any) -> None:
    """Trace the call anew; warn if that is another program than was traced before."""
    metrics.counter_add("SteadyChecks")
    before = _signature(known.jitted(arrays, operands))
    known.jitted = known.jit()
    if _signature(known.jitted(arrays, operands)) != before:
        metrics.counter_add("SteadyChanged")
        _log.warning(
            "%s is not steady: it computes something else than when it was traced, up to %d calls "
            "ago. It depends on what snaprt does not see, such as an attribute of a library's "
            "object: pass it as an argument, or use snaprt.lazy() without steady=True",
            _place(function),
            settings.get("SNAPRT_STEADY_CHECK"),
        )


def _signature(result: Any) -> int | None:
    """Return the signature of the operation that computes ``result``; none where it has run."""
    for leaf in jax.tree.leaves(result):
        if type(leaf) is LazyArray and leaf._result is not None:
            return leaf._result.point.operation.signature
    return None


def _name(transform: Callable[..., Any], function: Any) -> str:
    code = users_code(function)
    return transform.__name__.strip("_") if code is None else code.co_name.strip("<>")


def _place(function: Any) -> str:
    code = users_code(function)
    if code is None:
        return "a function"
    return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
