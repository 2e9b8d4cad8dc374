"""Finds out who asks a tracer for its value; must not know what is answered."""

from __future__ import annotations

import sys

from jax._src import config as _config
from jax._src import core as _core


def asked_as_opaque_state() -> bool:
    """Return whether the caller's caller is the comparison of two opaque trace states.

    Libraries (flax) compare `get_opaque_trace_state()` to find out whether an object was made at
    another trace level. Recording lazily is no other level, so there the lazy trace answers that
    it equals the eager one. Everywhere else, above all in the key of jit's fast path, it must not.
    """
    return sys._getframe(2).f_code is _core.OpaqueTraceState.__eq__.__code__


# Functions that only pass the question "is this concrete?" on.
_ASKS_ON = frozenset({"is_concrete", "to_concrete_value"})

# Functions of JAX that demand a value on behalf of their caller, which gives the cause its name.
_DEMANDS_FOR = frozenset({"concrete_dim_or_error", "_ensure_index_tuple", "<genexpr>"})

# Functions that fail, or behave differently from eager JAX, without the value: what they stand for.
_DEMANDS = {
    "__bool__": "bool",
    "__hex__": "hex",
    "__index__": "index",
    "__int__": "int",
    "__oct__": "oct",
    "_is_slice_element_none_or_constant_or_symbolic": "slice",
    "concrete_or_error": "",  # named after its caller: `nonzero`, `arange`, ...
    "expand_bool_indices": "bool_mask",
    "is_constant_dim": "shape",
}

# Under `jax.disable_jit` they take a branch in Python, where the value is there to choose it.
_BRANCHES = frozenset({"_cond", "_switch_internal", "cond", "switch"})


def demanded_by() -> str | None:
    """Return what needs the value that the caller was asked for, or ``None`` for a mere probe.

    `Tracer.to_concrete_value` serves code that needs a value (`concrete_or_error`, a boolean
    mask) and mere probes (in `asarray`, `ad`, `power`); only the first may cut a graph. The
    question may come through the tracers of `grad` and `vmap`, hence the walk up the stack.
    """
    frame = sys._getframe(2)
    while frame.f_code.co_name in _ASKS_ON and frame.f_back is not None:
        frame = frame.f_back
    if frame.f_code.co_name in _BRANCHES and _config.disable_jit.value:
        return "bool"
    cause = _DEMANDS.get(frame.f_code.co_name)
    if cause == "" and frame.f_back is not None:
        frame = frame.f_back
        while frame.f_code.co_name in _DEMANDS_FOR and frame.f_back is not None:
            frame = frame.f_back
        return frame.f_code.co_name.strip("_<>")
    return cause
