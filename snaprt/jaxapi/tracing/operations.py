"""Primitives and jaxprs: binds, evaluates, looks into them."""

from __future__ import annotations

import functools
import math
import operator
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax._src import ad_checkpoint as _ad_checkpoint
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import effects as _effects
from jax._src import pjit as _pjit
from jax._src import source_info_util as _source_info
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import mlir as _mlir
from jax._src.named_sharding import UNSPECIFIED as _UNSPECIFIED

from snaprt.jaxapi.tracing.arrays import shape_of_aval
from snaprt.jaxapi.tracing.traces import evaluating, set_current_trace

# Not from `jax.extend`, which imports Pallas and more.
Jaxpr = _core.Jaxpr
ClosedJaxpr: Any = getattr(_core, "ClosedJaxpr", Jaxpr)  # one and the same since JAX 0.12
_JAX_FOLDER = os.path.dirname(jax.__file__) + os.sep
JaxprLiteral = _core.Literal


def operation_context() -> Any:
    """Return what lowering needs beside the parameters (compute type, mesh, ...); interned."""
    return _core.JaxprEqnContext()


def bind_at(
    info: Any, context: Any, primitive: Any, operands: Sequence[Any], params: dict[str, Any]
) -> Any:
    """Bind ``primitive`` under the current trace, with the recorded location and context."""
    stack = _source_info.current_name_stack() + info.name_stack
    with _source_info.user_context(info.traceback, name_stack=stack), context.manager:
        if _takes_token_alone(primitive, operands, params):
            return _core.jaxpr_as_fun(params["jaxpr"])(*operands)
        return primitive.bind(*operands, **primitive.get_bind_params(params))


def _takes_token_alone(primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> bool:
    """Return whether a program would call a function that takes nothing but a token.

    Of such a call, XLA (jaxlib 0.11 and 0.12) repeats the effects of a loop, or ends the process in
    a failed CHECK. A jitted function that is called by itself is a program, and no call.
    """
    return (
        primitive is _pjit.jit_p
        and not operands
        and all(sharding is _UNSPECIFIED for sharding in params["out_shardings"])
        and bool(_effects.ordered_effects.filter_in(params["jaxpr"].effects))
    )


def abstract_evaluate(
    primitive: Any, avals: Sequence[Any], params: dict[str, Any]
) -> tuple[Any, Any]:
    """Return (list of abstract values, effects) of one operation."""
    results, effects = primitive.abstract_eval(*avals, **params)
    return [*map(_over_mesh, results if primitive.multiple_results else (results,))], effects


def _over_mesh(aval: Any) -> Any:
    """Return the type of a result, as it is once JAX has run the operation on its own.

    Under a mesh with explicit axes an array whose type names no mesh is then one on it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not mesh.are_all_axes_explicit or not isinstance(aval, _core.ShapedArray):
        return aval
    if not aval.sharding.mesh.empty:
        return aval
    over = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*[None] * aval.ndim))
    return _core.update_aval_with_sharding(aval, over)


def evaluate_call(name: str, *args: Any, **params: Any) -> Any:
    """Call the eager trace's own ``process_*`` method of that name."""
    with evaluating():
        return getattr(_core.eval_trace, name)(*args, **params)


def names_within(primitive: Any, params: Mapping[str, Any]) -> Iterator[str]:
    """Yield the name of a primitive and, each once, those in the jaxprs among its parameters."""
    yield primitive.name
    for jaxpr in _core.jaxprs_in_params(params):
        for equation in jaxpr.eqns:
            yield from names_within(equation.primitive, equation.params)


#: Source files of snaprt whose jitted functions stand for a part of the user's, not for a call.
files_of_parts: set[str] = set()


def is_call_of_users_jit(primitive: Any, params: Mapping[str, Any]) -> bool:
    """Return whether an operation is a call of a jitted function that is not one of JAX's own."""
    if primitive is not _pjit.jit_p:
        return False
    file = params["jaxpr"].jaxpr.debug_info.func_filename
    return file is None or not (file.startswith(_JAX_FOLDER) or file in files_of_parts)


#: Operations that JAX jits when they are called eagerly, and that run functions of the user's.
RUN_FUNCTIONS = frozenset({"call_exported", "cond", "scan", "while"})


def runs_at_once(primitive: Any, params: Mapping[str, Any]) -> bool:
    """Return whether an operation is one of JAX's own that runs nothing of the user's."""
    return primitive.name not in RUN_FUNCTIONS and not is_call_of_users_jit(primitive, params)


def unpackable_function(primitive: Any, params: Mapping[str, Any]) -> str | None:
    """Return which of the user's jitted functions an operation calls, such as ``f at train.py:9``.

    ``None`` if it calls none, or one of which a call says more than what is computed.
    """
    if not is_call_of_users_jit(primitive, params):
        return None
    shardings = (*params["in_shardings"], *params["out_shardings"])
    if any(isinstance(sharding, jax.sharding.Sharding) for sharding in shardings):
        return None
    return str(params["jaxpr"].jaxpr.debug_info.func_src_info)


def run_unpacked(trace: Any, params: Mapping[str, Any], operands: Sequence[Any]) -> list[Any]:
    """Bind what a jitted function does, instead of a call of it."""
    closed = params["jaxpr"]
    with set_current_trace(trace):
        return list(_core.eval_jaxpr(closed.jaxpr, closed.consts, *operands))


def equations_within(primitive: Any, params: Mapping[str, Any]) -> int:
    """Return how many equations an operation is, those in the jaxprs among its parameters counted.

    An equation that is lowered to many operations counts as so many.
    """
    jaxprs = _core.jaxprs_in_params(params)
    return _LOWERED_TO.get(primitive.name, 1) + sum(_extent_of_jaxpr(jaxpr)[0] for jaxpr in jaxprs)


def extent(
    primitive: Any, params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]
) -> tuple[int, float]:
    """Return how large an operation is: to the compiler, and to the device.

    Returns:
        The number of equations as `equations_within`, and an estimate of the floating point
        operations, in which a loop of unknown length runs once.
    """
    equations = _LOWERED_TO.get(primitive.name, 1)
    work = float(equations * sum(getattr(aval, "size", 1) for aval in results))
    if primitive.name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        work *= 2 * math.prod(operands[0].shape[axis] for axis in contracted)
    elif primitive.name == "conv_general_dilated":
        kernel = operands[1]
        work *= 2 * kernel.size / max(kernel.shape[params["dimension_numbers"].rhs_spec[0]], 1)
    for jaxpr in _core.jaxprs_in_params(params):
        inner = _extent_of_jaxpr(jaxpr)
        equations += inner[0]
        work += inner[1] * params.get("length", 1)
    return equations, work


#: Callbacks whose results nobody reads: eager JAX just calls them.
DEBUG_CALLBACKS = frozenset({"debug_callback", "debug_print"})
ORDERABLE_CALLBACKS = DEBUG_CALLBACKS | {"io_callback"}

#: What XLA takes as long for as for so many simple operations; for callbacks, if there are many.
_LOWERED_TO = {
    **dict.fromkeys(("random_bits", "random_fold_in", "random_split", "threefry2x32"), 100),
    **dict.fromkeys((*ORDERABLE_CALLBACKS, "pure_callback"), 50),
}

_extents: weakref.WeakKeyDictionary[Any, tuple[int, float]] = weakref.WeakKeyDictionary()


def _extent_of_jaxpr(jaxpr: Any) -> tuple[int, float]:
    cached = _extents.get(jaxpr)
    if cached is None:
        extents = [
            extent(e.primitive, e.params, [v.aval for v in e.invars], [v.aval for v in e.outvars])
            for e in jaxpr.eqns
        ]
        cached = sum(n for n, _ in extents), sum(work for _, work in extents)
        _extents[jaxpr] = cached
    return cached


def constant_bytes(params: Mapping[str, Any]) -> int:
    """Return how many bytes of arrays the jaxprs among parameters close over.

    Checked with jax 0.10.2, where closed jaxprs hold them, and 0.12.0, where all may.
    """
    total = 0
    for value in params.values():
        for element in value if isinstance(value, tuple | list) else (value,):
            if isinstance(element, ClosedJaxpr | Jaxpr):
                constants = getattr(element, "consts", ())
                total += sum(getattr(constant, "nbytes", 0) for constant in constants)
                equations = getattr(element, "jaxpr", element).eqns
                total += sum(constant_bytes(equation.params) for equation in equations)
    return total


def without_constants(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters whose jaxprs have weak references in place of what they close over."""
    return {
        name: _without_constants(value) if getattr(value, "consts", ()) else value
        for name, value in params.items()
    }


def _without_constants(jaxpr: Any) -> Any:
    references = [
        weakref.ref(constant) if isinstance(constant, jax.Array) else constant
        for constant in jaxpr.consts
    ]
    if hasattr(jaxpr, "with_consts"):  # JAX 0.12
        return jaxpr.with_consts(references)
    return jaxpr.replace(consts=references)


def lowering_module(primitive: Any) -> str:
    """Return the Python module that defines how ``primitive`` is lowered, "" where none does."""
    tables = [table for table in _lowering_tables() if primitive in table]
    modules = {_module_of(table[primitive].rule) for table in tables}
    foreign = [module for module in modules if not module.startswith(("jax.", "jaxlib."))]
    return foreign[0] if foreign else min(modules, default="")


def can_be_lowered(primitive: Any, params: Mapping[str, Any]) -> bool:
    """Return whether JAX can lower an operation for some platform, and not only run it.

    Of those with jaxprs, JAX runs `jax.checkpoint` alone equation by equation, and since 0.11 what
    was traced (`jax.jit(f).trace(x)`) and is called.
    """
    if primitive is _ad_checkpoint.remat_p or getattr(primitive, "impl", None) is _RUN_EQUATIONS:
        jaxpr = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
        return all(can_be_lowered(equation.primitive, equation.params) for equation in jaxpr.eqns)
    return any(primitive in table for table in _lowering_tables())


_RUN_EQUATIONS: Any = getattr(getattr(_core, "eval_jaxpr_p", None), "impl", object())


def _lowering_tables() -> tuple[Mapping[Any, Any], ...]:
    return (_mlir._lowerings, *_mlir._platform_specific_lowerings.values())


def has_own_implementation(primitive: Any) -> bool:
    """Return whether JAX runs an operation without compiling it."""
    implementation = vars(primitive).get("impl")
    if implementation is None:  # JAX refuses to run it
        return False
    return getattr(implementation, "func", None) is not _dispatch.apply_primitive


def with_indices_as_operands(
    primitive: Any, params: Mapping[str, Any]
) -> Callable[..., Any] | None:
    """Return a function that does what an operation does, but takes its indices as operands.

    So does eager JAX with static slices, to compile one program for all. ``None`` where an
    operation has no such indices.
    """
    of_params = _WITH_INDICES.get(primitive)
    return None if of_params is None else of_params(params)


def _slice_by_operands(params: Mapping[str, Any]) -> Callable[..., Any] | None:
    starts, limits = params["start_indices"], params["limit_indices"]
    if params["strides"] is not None or not _fit_32_bits(limits):
        return None
    sizes = tuple([limit - start for start, limit in zip(starts, limits, strict=True)])

    def run(x: Any) -> Any:
        return jax.lax.dynamic_slice_p.bind(x, *map(np.int32, starts), slice_sizes=sizes)

    return run


def _pad_by_operands(params: Mapping[str, Any]) -> Callable[..., Any] | None:
    if not params["padding_config"]:
        return None
    before, after, between = zip(*params["padding_config"], strict=True)
    if any(between) or min(*before, *after) < 0 or not _fit_32_bits(before):
        return None

    def run(x: Any, value: Any) -> Any:
        shape = tuple([sum(sizes) for sizes in zip(before, x.shape, after, strict=True)])
        padding = jax.lax.broadcast_in_dim_p.bind(
            value, shape=shape, broadcast_dimensions=(), sharding=None
        )
        return jax.lax.dynamic_update_slice_p.bind(padding, x, *map(np.int32, before))

    return run


def _fit_32_bits(indices: Sequence[int]) -> bool:
    return all(index <= np.iinfo(np.int32).max for index in indices)


_WITH_INDICES: Mapping[Any, Callable[[Mapping[str, Any]], Callable[..., Any] | None]] = {
    jax.lax.pad_p: _pad_by_operands,
    jax.lax.slice_p: _slice_by_operands,
}


def refuse_if_lowering_refuses(
    primitive: Any, avals: Sequence[Any], params: Mapping[str, Any]
) -> None:
    """Raise the error of JAX if an operation asks for what it finds missing when it lowers.

    A `jax.lax.DotAlgorithm`: JAX's own `dot_product_attention` tries which are there. And the
    forward-mode derivative of a function that has a `custom_vjp`.
    """
    if not _may_be_refused(primitive, params):
        return

    def operation(*operands: Any) -> Any:
        return primitive.bind(*operands, **primitive.get_bind_params(dict(params)))

    jax.jit(operation).lower(*[jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals])


_ALGORITHMS = (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset)


def _may_be_refused(primitive: Any, params: Mapping[str, Any]) -> bool:
    asks = primitive is _ad.custom_lin_p or isinstance(params.get("precision"), _ALGORITHMS)
    return asks or any(
        _may_be_refused(equation.primitive, equation.params)
        for jaxpr in _core.jaxprs_in_params(params)
        for equation in jaxpr.eqns
    )


def _module_of(rule: Any) -> str:
    while isinstance(rule, functools.partial):
        rule = rule.func
    return getattr(rule, "__module__", None) or ""


def primitive_named(name: str, module: str) -> Any:
    """Return JAX's own primitive of that name, None where there is none.

    Args:
        name: Its name, which several may have.
        module: What `lowering_module` says of it.
    """
    tables = [_mlir._lowerings, *_mlir._platform_specific_lowerings.values()]
    candidates = {primitive for table in tables for primitive in table if primitive.name == name}
    ours = [
        primitive
        for primitive in candidates
        if lowering_module(primitive).partition(".")[0] in ("jax", "jaxlib")
    ]
    return next(
        (primitive for primitive in ours if lowering_module(primitive) == module),
        next(iter(ours), None),
    )


def adding_widely(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose sums of 16-bit floats are added up in 32 bits, as `jnp.sum` does.

    JAX adds up the gradient of what was broadcast in its own type. So does XLA on a CPU: there,
    ones of bfloat16 never add up to more than 256. Checked with jax 0.10.2, 0.11.2 and 0.12.0.
    """

    def call(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        jaxpr, leaves = _adding_widely(closed.jaxpr), jax.tree.leaves(args)
        results = _core.eval_jaxpr(jaxpr, closed.consts, *leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call


def _adding_widely(jaxpr: Any) -> Any:
    equations = [after for before in jaxpr.eqns for after in _in_32_bits(before)]
    return jaxpr if _are_same(equations, jaxpr.eqns) else jaxpr.replace(eqns=equations)


def _are_same(after: Sequence[Any], before: Sequence[Any]) -> bool:
    return len(after) == len(before) and all(map(operator.is_, after, before))


def _in_32_bits(equation: Any) -> list[Any]:
    """Return what stands in the place of an equation: itself where it adds up nothing narrow."""
    if equation.primitive is jax.lax.reduce_sum_p and equation.outvars[0].aval.dtype in _NARROW:
        operand, result = equation.invars[0], equation.outvars[0]

        def add(x: Any) -> Any:
            wide = equation.primitive.bind(x.astype(np.float32), **equation.params)
            return wide.astype(x.dtype)

        body = jax.make_jaxpr(add)(shape_of_aval(operand.aval)).jaxpr
        names = {body.invars[0]: operand, body.outvars[0]: result}
        return [
            each.replace(
                invars=[names.get(variable, variable) for variable in each.invars],
                outvars=[names.get(variable, variable) for variable in each.outvars],
                source_info=equation.source_info,
            )
            for each in body.eqns
        ]
    params = {name: _with_wide_sums(value) for name, value in equation.params.items()}
    is_as_before = _are_same([*params.values()], [*equation.params.values()])
    return [equation if is_as_before else equation.replace(params=params)]


def _with_wide_sums(value: Any) -> Any:
    """Return a parameter of an equation: the same object where it holds no such sums."""
    if isinstance(value, tuple):
        held = tuple(map(_with_wide_sums, value))
        return value if _are_same(held, value) else held
    if not isinstance(value, Jaxpr | ClosedJaxpr):
        return value
    closed: Any = value
    body = getattr(closed, "jaxpr", closed)
    wide = _adding_widely(body)
    if wide is body:
        return value
    return wide if body is closed else closed.replace(jaxpr=wide, consts=closed.consts)


_NARROW: Final = (np.dtype("float16"), np.dtype(jax.numpy.bfloat16))
