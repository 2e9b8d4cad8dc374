"""Primitives and jaxprs: binds, evaluates, looks into them; must not know recorded graphs."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax._src import core as _core
from jax._src import source_info_util as _source_info
from jax._src.interpreters import mlir as _mlir
from jax.extend import core as jex_core

from snaprt.jaxapi.traces import evaluating

ClosedJaxpr = jex_core.ClosedJaxpr
Jaxpr = jex_core.Jaxpr
JaxprLiteral = jex_core.Literal


def operation_context() -> Any:
    """Return what lowering needs beside the parameters (compute type, mesh, ...); interned."""
    return _core.JaxprEqnContext()


def bind_at(
    info: Any, context: Any, primitive: Any, operands: Sequence[Any], params: dict[str, Any]
) -> Any:
    """Bind ``primitive`` under the current trace, with the recorded location and context."""
    stack = _source_info.current_name_stack() + info.name_stack
    with _source_info.user_context(info.traceback, name_stack=stack), context.manager:
        return primitive.bind(*operands, **primitive.get_bind_params(params))


def abstract_evaluate(
    primitive: Any, avals: Sequence[Any], params: dict[str, Any]
) -> tuple[Any, Any]:
    """Return (list of abstract values, effects) of one operation."""
    found, effects = primitive.abstract_eval(*avals, **params)
    return [*map(_over_mesh, found if primitive.multiple_results else (found,))], effects


def _over_mesh(aval: Any) -> Any:
    """Return the type of a result, as it is once JAX has run the operation on its own.

    Under a mesh with explicit axes a scalar, whose type may name no mesh, then is one on it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not mesh.are_all_axes_explicit or not isinstance(aval, _core.ShapedArray):
        return aval
    if aval.shape or not aval.sharding.mesh.empty:
        return aval
    over = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return _core.update_aval_with_sharding(aval, over)


def evaluate_call(name: str, *args: Any, **params: Any) -> Any:
    """Call the eager trace's own ``process_*`` method of that name."""
    with evaluating():
        return getattr(_core.eval_trace, name)(*args, **params)


def names_within(primitive: Any, params: Mapping[str, Any]) -> Iterator[str]:
    """Yield the name of a primitive and, each once, those in the jaxprs among its parameters.

    Checked with jax 0.10.2 and 0.12.0.
    """
    yield primitive.name
    for jaxpr in _core.jaxprs_in_params(params):
        for equation in jaxpr.eqns:
            yield from names_within(equation.primitive, equation.params)


def lowering_module(primitive: Any) -> str:
    """Return the Python module that defines how ``primitive`` is lowered, "" where none does."""
    tables = [_mlir._lowerings, *_mlir._platform_specific_lowerings.values()]
    modules = {_module_of(table[primitive].rule) for table in tables if primitive in table}
    foreign = [module for module in modules if not module.startswith(("jax.", "jaxlib."))]
    return foreign[0] if foreign else min(modules, default="")


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
    named = {one for table in tables for one in table if one.name == name}
    ours = [one for one in named if lowering_module(one).partition(".")[0] in ("jax", "jaxlib")]
    return next((one for one in ours if lowering_module(one) == module), next(iter(ours), None))
