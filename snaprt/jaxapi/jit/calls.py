"""Describes, makes and tells apart calls of jitted functions, as JAX lowers them."""

from __future__ import annotations

import functools
import itertools
import re
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import numpy as np
from jax._src import array as _array
from jax._src import config as _config
from jax._src import core as _core
from jax._src import pjit as _pjit
from jax._src import tree_util as _tree_util
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.named_sharding import UNSPECIFIED as _UNSPECIFIED

from snaprt.host.identities import identity
from snaprt.jaxapi.jit.entry import (
    clearings,
    infer_jit,
    parse_jit_call,
    run_jit,
    run_jit_primitive,
)
from snaprt.jaxapi.settings import key_reuse_is_checked, trace_context
from snaprt.jaxapi.tracing.arrays import data_of_keys, shape_of_aval
from snaprt.jaxapi.tracing.traces import evaluating


@dataclass(frozen=True)
class FlatCall:
    """A call of a jitted function as JAX lowers it."""

    args: tuple[Any, ...]  # the leaves of its arguments, static ones left out
    names: tuple[str, ...]  # of each argument, such as ``params['w']``
    results: tuple[str, ...]  # the name of each result, such as ``result['loss']``
    params: dict[str, Any]
    # Makes of the results what the function returns.
    unflatten: Callable[[Sequence[Any]], Any] = list
    # How many of the arguments are no leaves of the user's, and come before those.
    captured: int = 0


def flatten_jit_call(fun: Any, info: Any, args: Any, kwargs: Any) -> FlatCall:
    """Return a call as JAX lowers it; the function is traced if it was not for such arguments.

    Raises:
        Exception: JAX cannot trace it, or a value has escaped from a function that was traced.
    """
    traced, flat = infer_jit(fun, info, args, kwargs)
    leaves = tuple(map(_core.full_lower, flat))
    _core.check_eval_args(leaves)
    names = [f"closure{number}" for number in range(len(traced.consts))]
    names += traced.arg_names or [""] * (len(flat) - len(names))
    return FlatCall(
        args=leaves,
        names=_shown(_numbered("arg", names, len(flat))),
        results=_results_of(traced.params["jaxpr"]),
        params=_params_of_arrays(traced.params),
        unflatten=traced.out_tree.unflatten,
        captured=len(traced.consts),
    )


def is_of_arrays_alone(call: FlatCall) -> bool:
    """Return whether JAX lowers a call as it is; else it binds another one, of arrays, instead.

    JAX 0.10 does so for each function that takes its operations apart only when it is lowered.
    """
    return not _is_high(call.params["jaxpr"])


def _is_high(jaxpr: Any) -> bool:
    return jaxpr.jaxpr.is_high


def _params_of_arrays(params: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters with the program that JAX 0.12 lowers in the place of the traced one.

    It does so where nothing but arrays goes in and out, of `searchsorted` and `custom_root` say.
    """
    jaxpr = params["jaxpr"]
    take_apart = getattr(_partial_eval, "lower_jaxpr2", None)
    if (
        take_apart is None
        or not _is_high(jaxpr)
        or any(aval.is_high for aval in (*jaxpr.in_avals, *jaxpr.out_avals))
    ):
        return params
    return {**params, "jaxpr": take_apart(jaxpr)}


def run_jit_call(fun: Any, info: Any, args: Any, kwargs: Any) -> Any:
    """Make a call of a jitted function as JAX does for C++."""
    inferred, flat = infer_jit(fun, info, args, kwargs)
    return run_jit(inferred, flat, fun, args, kwargs)[0]


def leaves_of_call(info: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the leaves of the arguments of a call that are not static."""
    if info.static_argnums or info.static_argnames:
        return parse_jit_call(info, args, kwargs)[1]
    tree = (args, kwargs) if kwargs else args
    return _tree_util.tracing_registry.flatten(tree)[0]  # in half the time


def leaves_of_results(results: Any) -> list[Any]:
    """Return what `jax.tree.leaves` takes four times as long to find."""
    return _tree_util.default_registry.flatten(results)[0]


def lowered_leaves(leaves: Sequence[Any]) -> tuple[Sequence[Any], bool]:
    """Return the leaves of the arguments of a call, as JAX lowers it if it captured nothing.

    Returns:
        The arguments; and whether all are JAX's arrays, as `are_arrays` says.
    """
    if are_arrays(leaves):
        return leaves, True
    return tuple(map(_core.full_lower, leaves)), False


def are_arrays(values: Sequence[Any]) -> bool:
    """Return whether all values are JAX's arrays, of no other class than that of its results."""
    return _ARRAYS_ALONE.issuperset(map(type, values))


_ARRAYS_ALONE: Final = frozenset({_array.ArrayImpl})


def behind_reference(value: Any) -> Any:
    """Return the array that a reference holds now, and any other value as it is."""
    return value._refs._buf if isinstance(value, _core.Ref) else value


def flat_jit_call(args: tuple[Any, ...], params: dict[str, Any]) -> FlatCall:
    """Return a call of the primitive ``jit`` as one with names."""
    jaxpr = params["jaxpr"]
    return FlatCall(args, argument_names(params, len(args)), _results_of(jaxpr), params)


def argument_names(params: Mapping[str, Any], count: int) -> tuple[str, ...]:
    """Return the names of the arguments of a call of the primitive ``jit``, as snapshots show them.

    They are paths, such as ``params['w']``. Where a parameter begins with an underscore, its
    arguments have their keys alone for names: ``w`` in the place of ``_params['w']``.
    """
    return _shown(_numbered("arg", params["jaxpr"].debug_info.arg_names, count))


_KEY_ALONE: Final = re.compile(r"_\w*\[(['\"])(.+)\1\]")


def _shown(names: Sequence[str]) -> tuple[str, ...]:
    matches = [(_KEY_ALONE.fullmatch(name), name) for name in names]
    return tuple([match[2] if match else name for match, name in matches])


def named_call(
    args: tuple[Any, ...],
    names: Any,
    count: int,
    results: Any,
    result_count: int,
    params: dict[str, Any],
) -> FlatCall:
    """Return a call, with numbers in the place of the names that JAX does not know."""
    return FlatCall(
        args, _numbered("arg", names, count), _numbered("out", results, result_count), params
    )


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


def taken_arguments(call: FlatCall, kept: Collection[int]) -> list[int]:
    """Return the numbers of the arguments that a call deletes, for its results take their memory.

    Those of which JAX says so when it lowers a program for one device. None while JAX looks for NaN
    or infinities, which it would do in arrays that are `moved` as well.

    Source: ``_set_up_aliases`` of jax/_src/interpreters/mlir.py.

    Args:
        call: The call, on one device.
        kept: The numbers of the arguments that go into the program.
    """
    if _config.debug_nans.value or _config.debug_infs.value:
        return []
    donated = call.params["donated_invars"]
    results = call.params["jaxpr"].out_avals
    free = Counter((aval.shape, aval.dtype) for aval in results if hasattr(aval, "dtype"))
    taken = []
    for place in kept:
        array = call.args[place]
        if donated[place] and isinstance(array, jax.Array):
            key = array.shape, array.dtype
            free[key] -= 1
            if free[key] >= 0:
                taken.append(place)
    return taken


def donates_and_keeps(call: FlatCall, kept: Sequence[int]) -> bool:
    """Return whether a call donates an argument that it is given in another place, too.

    Args:
        call: The call, which XLA refuses if results take that argument's memory.
        kept: The numbers of the arguments that go into the program.
    """
    places = Counter([identity(call.args[place]) for place in kept])
    donated = call.params["donated_invars"]
    return len(places) < len(kept) and any(
        donated[place] and places[identity(call.args[place])] > 1 for place in kept
    )


def moved(arrays: list[Any]) -> list[Any]:
    """Return new arrays that have the memory of others, which are deleted."""
    shardings = tuple(array.sharding if array.committed else None for array in arrays)
    with evaluating():
        return _moved(shardings)(arrays)


@functools.lru_cache(maxsize=1024)
def _moved(shardings: tuple[Any, ...]) -> Callable[[list[Any]], list[Any]]:
    def move(arrays: list[Any]) -> list[Any]:
        return arrays

    return jax.jit(move, donate_argnums=0, out_shardings=list(shardings))


def with_result(
    call: FlatCall, result_of: Callable[[Sequence[Any]], jax.Array], name: str
) -> FlatCall:
    """Return the call of a program that has one more result.

    The operations that the program has stay as they are: those of the result come after them.

    Args:
        call: Arrays alone go in and out of it.
        result_of: Computes it, to be traced, from the others: the same for every call.
        name: Its name.
    """
    params = call.params
    jaxpr = params["jaxpr"]
    if jaxpr not in _extended:
        shapes = list(map(shape_of_aval, jaxpr.out_avals))
        _extended[jaxpr] = _followed_by(jaxpr, jax.make_jaxpr(result_of)(shapes))
    params = {
        **params,
        "jaxpr": _extended[jaxpr],
        "out_shardings": (*params["out_shardings"], _UNSPECIFIED),
        "out_layouts": (*params["out_layouts"], None),
    }
    return replace(call, params=params, results=(*call.results, name))


_extended: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _followed_by(first: Any, then: Any) -> Any:
    """Return a program that has the results of ``first``, and then what ``then`` makes of them."""
    body, end = first.jaxpr, then.jaxpr
    substitutes = dict(zip(end.invars, body.outvars, strict=True))
    substitutes |= {
        variable: _core.Literal(value, variable.aval)
        for variable, value in zip(end.constvars, then.consts, strict=True)
    }

    def renamed(atoms: Sequence[Any]) -> list[Any]:
        return [
            atom if isinstance(atom, _core.Literal) else substitutes.get(atom, atom)
            for atom in atoms
        ]

    added = [operation.replace(invars=renamed(operation.invars)) for operation in end.eqns]
    return first.replace(
        jaxpr=body.replace(
            eqns=[*body.eqns, *added], outvars=[*body.outvars, *renamed(end.outvars)]
        ),
        consts=first.consts,
    )


def run_flat_jit_call(call: FlatCall) -> list[Any]:
    """Run a flat call as JAX does."""
    return run_jit_primitive(*call.args, **call.params)


def with_keys_checked(call: FlatCall, run: Callable[[], list[Any]]) -> list[Any]:
    """Return what ``run`` returns in the place of a call, which C++ is to make.

    Under `jax_debug_key_reuse` it raises for a key that was used before, as JAX does for the call.
    """
    if not key_reuse_is_checked():
        return run()
    # It loads what nobody else needs.
    from jax.experimental.key_reuse._core import call_impl_with_key_reuse_checks

    def run_call(*_: Any, **__: Any) -> list[Any]:
        return run()

    return list(call_impl_with_key_reuse_checks(_pjit.jit_p, run_call, *call.args, **call.params))


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


def kind_of_jit_call(info: Any, args: Any, kwargs: Any) -> tuple[Any, Sequence[Any]]:
    """Return what tells calls of a jitted function that run different programs.

    Returns:
        A key, equal for calls of one kind, though one kind may have several; and the leaves of the
        arguments that are not static. After JAX's caches were cleared, all keys are others: it
        traces the functions anew, and what they read may have changed.

    Raises:
        Exception: JAX cannot make the call.
    """
    signature, leaves = parse_jit_call(info, args, kwargs)
    return (signature, _kinds_of(leaves), trace_context(), clearings.count), leaves


def kind_of_flat_call(call: FlatCall) -> Any:
    """Return what tells calls of one traced function that run different programs."""
    params = call.params
    chosen = (params["in_shardings"], params["out_shardings"], params["donated_invars"])
    return (_kinds_of(call.args), chosen, trace_context())


def _kinds_of(leaves: Sequence[Any]) -> tuple[Any, ...]:
    parts: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, _array.ArrayImpl):
            parts += (_number_of(leaf.aval), _number_of(leaf.sharding), leaf._committed)
        else:
            parts += (type(leaf), getattr(leaf, "dtype", None), np.shape(leaf))
            if isinstance(leaf, int):
                jax.typeof(leaf)  # raises where it is too large
            held = data_of_keys(behind_reference(leaf))
            if isinstance(held, _array.ArrayImpl):  # of keys, or of a reference
                parts += (held.sharding, held._committed)
    return tuple(parts)


_numbers = itertools.count()
_numbers_by_value: dict[Any, int] = {}
_numbers_by_id: dict[int, tuple[Any, int]] = {}  # with what has that id, which is alive so
_MAX_NUMBERED: Final = 1 << 14


def _number_of(value: Any) -> int:
    """Return a number that equal values have, which takes less time than to compare them."""
    known = _numbers_by_id.get(identity(value))
    if known is None:
        for table in (_numbers_by_id, _numbers_by_value):
            if len(table) >= _MAX_NUMBERED:
                table.clear()  # equal ones get another number from here on, which none had
        number = _numbers_by_value.setdefault(value, next(_numbers))
        known = _numbers_by_id[identity(value)] = value, number
    return known[1]
