"""Describes and makes calls of jitted functions, as JAX lowers them; must not know who watches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax._src import array as _array
from jax._src import core as _core
from jax._src import pjit as _pjit
from jax._src.interpreters import mlir as _mlir
from jax._src.named_sharding import UNSPECIFIED as _UNSPECIFIED

from snaprt.jaxapi.jit_entry import infer_jit, parse_jit_call, run_jit_primitive


@dataclass(frozen=True)
class FlatCall:
    """A call of a jitted function as JAX lowers it.

    Attributes:
        args: The leaves of its arguments, static ones left out.
        names: Of each argument, such as ``params['w']``.
        results: The name of each result, such as ``result['loss']``.
        params: The parameters of the primitive ``jit``.
        unflatten: Makes of the results what the function returns.
        captured: How many of the arguments are no leaves of the user's, and come before those.
    """

    args: tuple[Any, ...]
    names: tuple[str, ...]
    results: tuple[str, ...]
    params: dict[str, Any]
    unflatten: Callable[[Sequence[Any]], Any] = list
    captured: int = 0


def flatten_jit_call(fun: Any, info: Any, args: Any, kwargs: Any) -> FlatCall:
    """Return a call as JAX lowers it; the function is traced if it was not for such arguments."""
    traced, flat = infer_jit(fun, info, args, kwargs)
    names = [f"closure{number}" for number in range(len(traced.consts))]
    names += traced.arg_names or [""] * (len(flat) - len(names))
    return FlatCall(
        args=tuple(map(_core.full_lower, flat)),
        names=_numbered("arg", names, len(flat)),
        results=_results_of(traced.params["jaxpr"]),
        params=traced.params,
        unflatten=traced.out_tree.unflatten,
        captured=len(traced.consts),
    )


def leaves_of_jit_call(info: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return the arguments of a call of a function that captured nothing, as JAX lowers it."""
    return tuple(
        [
            leaf if type(leaf) is _array.ArrayImpl else _core.full_lower(leaf)
            for leaf in parse_jit_call(info, args, kwargs)[1]
        ]
    )


def flat_jit_call(args: tuple[Any, ...], params: dict[str, Any]) -> FlatCall:
    """Return a call of the primitive ``jit`` as one with names."""
    jaxpr = params["jaxpr"]
    names = _numbered("arg", jaxpr.debug_info.arg_names, len(args))
    return FlatCall(args, names, _results_of(jaxpr), params)


def _results_of(jaxpr: Any) -> tuple[str, ...]:
    return _numbered("out", jaxpr.debug_info.result_paths, len(jaxpr.out_avals))


def _numbered(word: str, names: Any, count: int) -> tuple[str, ...]:
    """Return names, made of ``word`` and a number where JAX knows none."""
    if not isinstance(names, tuple | list) or len(names) != count:
        names = [""] * count
    return tuple([name or f"{word}{number}" for number, name in enumerate(names)])


def without_donation(call: FlatCall) -> FlatCall:
    """Return the call of a program that leaves its arguments as they are."""
    donated = call.params["donated_invars"]
    return replace(call, params={**call.params, "donated_invars": (False,) * len(donated)})


def with_result(
    call: FlatCall, add: Callable[[Callable[..., Any]], Callable[..., Any]], name: str
) -> FlatCall:
    """Return the call of a program that has one more result.

    Args:
        call: Arrays alone go in and out of it.
        add: Makes of a flat function one that has it: the same for every call.
        name: Its name.
    """
    params = call.params
    jaxpr = params["jaxpr"]
    if jaxpr not in _extended:
        avals = [
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
            for aval in jaxpr.in_avals
        ]
        _extended[jaxpr] = jax.make_jaxpr(add(_core.jaxpr_as_fun(jaxpr)))(*avals)
    params = {
        **params,
        "jaxpr": _extended[jaxpr],
        "out_shardings": (*params["out_shardings"], _UNSPECIFIED),
        "out_layouts": (*params["out_layouts"], None),
    }
    return replace(call, params=params, results=(*call.results, name))


_extended: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def run_flat_jit_call(call: FlatCall) -> list[Any]:
    """Run a flat call as JAX does."""
    return run_jit_primitive(*call.args, **call.params)


def lower_jit_call(call: FlatCall) -> Any:
    """Lower a flat call as JAX does when it runs it: it then finds this, and compiles it once."""
    computation = _pjit._resolve_and_lower(
        tuple(map(_pjit.convert_to_metaty, call.args)),
        **call.params,
        lowering_platforms=None,
        lowering_parameters=_mlir.LoweringParameters(),
        pgle_profiler=None,
    )
    return jax.stages.Lowered(computation, {}, None)
