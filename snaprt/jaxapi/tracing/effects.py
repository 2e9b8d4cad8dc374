"""What operations do beside computing results, and who waits for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jax._src import core as _core
from jax._src import debugging as _debugging
from jax._src import dispatch as _dispatch
from jax._src import effects as _effects
from jax._src import error_check as _error_check

from snaprt.jaxapi.tracing.operations import ORDERABLE_CALLBACKS
from snaprt.jaxapi.tracing.traces import current_trace_setting, evaluating, once


def can_wait(effects: Iterable[Any]) -> bool:
    """Return whether a compiled program, run later, can have these effects.

    It cannot raise the error of a `checkify.check`, nor touch a reference or box that lives outside
    of it. Checked with jax 0.10.2 and 0.12.0, which keep the class of the former in different
    modules, one of which takes long to import.
    """
    return all(
        effect is _core.internal_mutable_array_effect
        or (_effects.lowerable_effects.contains(effect) and type(effect).__name__ != "ErrorEffect")
        for effect in effects
    )


def closes_over_references(params: Mapping[str, Any]) -> bool:
    """Return whether a called function has references (`jax.new_ref`) among its constants."""
    constants = getattr(params.get("jaxpr"), "consts", ())
    return any(isinstance(constant, _core.Ref) for constant in constants)


def can_be_ordered(primitive: Any, params: Mapping[str, Any]) -> bool:
    """Return whether an operation is a callback that XLA may run before or after others like it."""
    return primitive.name in ORDERABLE_CALLBACKS and not params.get("partitioned")


def ordered(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a callback that `can_be_ordered`, so that it is."""
    if "ordered" in params:
        return {**params, "ordered": True}
    return {**params, "effect": _debugging.ordered_debug_effect}


def is_breakpoint(params: Mapping[str, Any]) -> bool:
    """Return whether a ``debug_callback`` with these parameters is a `jax.debug.breakpoint`.

    Checked with jax 0.10.2 and 0.12.0, where its callback is closed over by that of the operation.
    """
    cells = getattr(params.get("callback"), "__closure__", None) or ()
    names = [getattr(cell.cell_contents, "__qualname__", "") for cell in cells]
    return "breakpoint.<locals>._breakpoint_callback" in names


def donates(params: Mapping[str, Any]) -> bool:
    """Return whether an operation with these parameters takes the memory of an operand."""
    semantics = params.get("copy_semantics") or ()  # of ``device_put``
    return any(params.get("donated_invars") or ()) or any(
        how.name == "DONATE_INPUT" for how in semantics
    )


_asked_before_waiting: list[Callable[[], None]] = []


def before_waiting_for_effects(start: Callable[[], None]) -> None:
    """Call ``start`` before a thread waits for effects, as in `jax.effects_barrier` or at its end.

    Checked with jax 0.10.2 and 0.12.0: both ask a set of tokens for that.
    """
    _asked_before_waiting.append(start)
    if len(_asked_before_waiting) > 1:
        return
    tokens: Any = _dispatch.RuntimeTokenSet
    original = tokens.block_until_ready

    @functools.wraps(original)
    def block_until_ready(self: Any) -> None:
        for callback in _asked_before_waiting:
            callback()
        original(self)

    tokens.block_until_ready = block_until_ready


@once
def teach_error_check(kind: Any) -> None:
    """Let `raise_if_error` of JAX's error checks look at values under a trace of type ``kind``.

    It takes the trace for one of a function that is compiled, and refuses.
    """
    module: Any = _error_check
    original = module.raise_if_error

    @functools.wraps(original)
    def raise_if_error() -> None:
        if type(current_trace_setting.value) is kind:
            with evaluating():
                return original()
        return original()

    module.raise_if_error = raise_if_error
