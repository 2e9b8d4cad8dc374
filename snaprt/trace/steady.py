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
from snaprt.graph.operation import is_same_program
from snaprt.host.interruptions import raise_if_interrupted
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

#: A function that was traced so much more often than it was known is no longer followed.
MAX_TRACES: Final = 16

jaxapi.files_of_parts.add(__file__)

_OPERANDS: Final = frozenset({LazyArray, jaxapi.ArrayImpl})


class _Function:
    """A transformation of one function, traced for each kind of call.

    Attributes:
        data: What the function of the present call depends on. It equals what the first one did;
            but objects in that may have changed since.
        is_followed: Whether it can be jitted.
    """

    def __init__(self, transform: Callable[..., Any], options: Any, name: str) -> None:
        self.calls = 0
        self.data: Data = None
        self.is_followed = True
        self._transform = transform
        self._options = options
        self._name = name
        self.jitted = self.jit()

    def jit(self) -> Any:
        """Return the transformation as a jitted function, not traced yet."""

        def run(arrays: Any, operands: Any) -> Any:
            metrics.counter_add("SteadyTraces")
            function = rebuild(self.data, iter(arrays))
            return self._transform(function, *operands, **dict(self._options))

        run.__name__ = run.__qualname__ = self._name
        return jax.jit(run)


#: What the pullbacks consist of that `jax.vjp` returned here, which are traced once as well.
_pullbacks: weakref.WeakSet[Any] = weakref.WeakSet()

_functions: OrderedDict[Any, _Function] = OrderedDict()
_lock = threading.Lock()

# By transformation and code, how many more functions were traced than calls were of a known one.
_traced: Counter[Any] = Counter()


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
    if not all(map(_is_operand, jax.tree.leaves(operands))):
        return jaxapi.NOT_FOLLOWED
    arrays: list[Any] = []
    try:
        data = capture(function, arrays)
        followed = _known(transform, data, tuple(options.items()), function)
    except (NotCapturedError, TypeError, ValueError):  # of what has no hash, or compares otherwise
        return jaxapi.NOT_FOLLOWED
    if followed is None or not followed.is_followed:
        return jaxapi.NOT_FOLLOWED
    followed.data = data
    followed.calls += 1
    every = settings.get("SNAPRT_STEADY_CHECK")
    try:
        if every and followed.calls % every == 0:
            _check(followed, function, arrays, operands)
        result = followed.jitted(arrays, operands)
    except Exception as error:  # JAX's own way raises it again, unless only jitting does
        raise_if_interrupted(error)
        followed.is_followed = False
        metrics.counter_add("SteadyRefused")
        _log.info("%s is traced at every call: %s", _place(function), str(error).partition("\n")[0])
        return jaxapi.NOT_FOLLOWED
    finally:
        followed.data = None
    if isinstance(result, tuple) and len(result) > 1 and isinstance(result[1], jaxapi.Pullback):
        _pullbacks.add(jaxapi.code_of_pullback(result[1]))
    return result


def _is_operand(leaf: Any) -> bool:
    if type(leaf) in _OPERANDS:
        return True
    try:
        return not isinstance(leaf, jaxapi.Tracer) and jaxapi.is_array_aval(jaxapi.typeof(leaf))
    except TypeError:  # no array, such as a function that `jax.vmap` hands on
        return False


def _known(
    transform: Callable[..., Any], data: Data, options: tuple[Any, ...], function: Any
) -> _Function | None:
    """Return the function that was traced before, or that is to be; ``None`` if it is not to be."""
    key = (transform, data, options)
    followed = _functions.get(key)
    code = users_code(function)
    root = (transform, code)
    with _lock:
        if followed is not None:
            _traced[root] = max(0, _traced[root] - 1)
            return followed
        _traced[root] += 1
        if _traced[root] > MAX_TRACES:
            if _traced[root] == MAX_TRACES + 1:
                metrics.counter_add("SteadyRefused")
                _log.warning(
                    "%s is traced at every call: what it depends on was different in each of %d; "
                    "pass what changes as an array",
                    _place(function),
                    MAX_TRACES,
                )
            return None
        name = transform.__name__.strip("_") if code is None else code.co_name.strip("<>")
        followed = _functions[key] = _Function(transform, options, name)
        if len(_functions) > MAX_FUNCTIONS:
            _functions.popitem(last=False)
    return followed


def _check(followed: _Function, function: Any, arrays: Any, operands: Any) -> None:
    """Trace the call again; warn if that is another program than was traced before."""
    metrics.counter_add("SteadyChecks")
    # Values that are pending would be read.
    shapes = jax.tree.map(
        lambda leaf: jaxapi.shape_of_aval(leaf.aval) if type(leaf) is LazyArray else leaf,
        (arrays, operands),
    )
    with jaxapi.evaluating():
        before = jax.make_jaxpr(followed.jitted)(*shapes)
        followed.jitted = followed.jit()
        if is_same_program(before, jax.make_jaxpr(followed.jitted)(*shapes)):
            return
    metrics.counter_add("SteadyChanged")
    _log.warning(
        "%s is not steady: it computes something else than when it was traced, up to %d calls ago. "
        "It depends on what snaprt does not see, such as an attribute of a library's object: pass "
        "it as an argument, or use snaprt.lazy() without steady=True",
        _place(function),
        settings.get("SNAPRT_STEADY_CHECK"),
    )


def _place(function: Any) -> str:
    code = users_code(function)
    if code is None:
        return "a function"
    return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
