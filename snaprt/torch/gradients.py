"""A JAX function as one node of PyTorch's autograd, with `jax.vjp` as its gradient.

Forward and backward are compiled functions, traced once. In a lazy scope, each is one operation.
"""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.extend.core import Literal

from snaprt import jaxapi, metrics
from snaprt.torch.packs import Gradients, Layout, Leaves, is_packing, is_small, packable
from snaprt.torch.tensors import (
    Tensor,
    array_of,
    arrays_of_gradients,
    gradients_due,
    plainly,
    write,
)
from snaprt.trace.fast_path import Hidden, follow_function

Arrays = dict[str, Any]
"""Arrays by the names that snapshots show."""

Residuals = Hidden | list[Any]
"""What a backward pass needs of its forward pass."""

Written = Callable[[], dict[int, Tensor]]

_log = logging.getLogger("snaprt.torch")


class Differentiable:
    """A JAX function of some arrays, with its gradient.

    Args:
        function: ``function(params, inputs, key)`` returns a list of arrays that depend on
            ``params`` differentiably, and any other results.
        name: What it is called in modules and profiles.
        is_quiet: Whether nobody needs to know that it cannot be compiled.
    """

    def __init__(
        self,
        function: Callable[[Arrays, Arrays, Any], tuple[list[Any], Any]],
        name: str,
        *,
        is_quiet: bool = False,
    ) -> None:
        self._level = logging.DEBUG if is_quiet else logging.WARNING
        self._function = function
        self._name = name
        self._residuals: Any = None  # the structure of what forward hands to backward
        self._types: list[Any] = []  # of the results
        self._ways: dict[str, frozenset[int]] = {}  # to each variable, from which results
        self.reaching: frozenset[int] = frozenset()  # the results from which there is a way
        self._used: dict[Any, list[bool]] = {}
        self._is_compiled = True
        self._evaluate = self._jit(function, "")
        self._forward = self._jit(self._with_residuals, "")
        self._backwards: dict[Any, Any] = {}
        self._layouts: dict[tuple[bool, ...], Layout] = {}
        self._leaves: tuple[Any, Leaves] | None = None
        self._gradient: Differentiable | None = None

    def _jit(self, function: Callable[..., Any], suffix: str) -> Callable[..., Any]:
        """Return a function compiled under our name, with the names that snapshots show."""

        def forward(_params: Any, _inputs: Any, key: Any) -> Any:
            return function(_params, _inputs, key)

        def backward(residuals: Any, cotangents: Any) -> Any:
            return function(residuals, cotangents)

        named: Callable[..., Any] = backward if suffix else forward

        named.__name__ = named.__qualname__ = f"{self._name}{suffix}"
        return jax.jit(named)

    def evaluate(self, inputs: Arrays, key: Any) -> tuple[list[Any], Any]:
        """Return the results of a call without variables."""

        def call() -> tuple[Any, list[Any]]:
            return self._call(self._evaluate, self._function, {}, inputs, key), []

        operands = [*inputs.values(), key]
        return self._follow("evaluate", operands, call)[0]

    def forward(
        self, names: Sequence[str], arrays: Sequence[Any], inputs: Arrays, key: Any
    ) -> tuple[list[Any], Any, Residuals]:
        """Return the results for ``arrays`` of these names, and what `backward` needs."""

        def call() -> tuple[Any, list[Any]]:
            params = dict(zip(names, arrays, strict=True))
            *shown, residuals = self._call(self._forward, self._with_residuals, params, inputs, key)
            return shown, residuals

        operands = [*arrays, *inputs.values(), key]
        (results, others), residuals = self._follow("forward", operands, call)
        return results, others, residuals

    def used(self, names: Sequence[str], is_present: Sequence[bool]) -> list[bool]:
        """Return which variables the results depend on; others get no gradient, not even zeros.

        Args:
            names: The variables.
            is_present: Which results the gradient comes from.
        """
        key = (*is_present, *names)
        used = self._used.get(key)
        if used is None:
            present = {index for index, is_there in enumerate(is_present) if is_there}
            used = [not present.isdisjoint(self._ways[name]) for name in names]
            self._used[key] = used
        return used

    def leaves(
        self, variables: Sequence[Tensor], arrays: Sequence[Any], to_leaf: Sequence[bool]
    ) -> Leaves:
        """Return which gradients of the variables are packed, of those that go to leaves."""
        key = (is_packing(), to_leaf, [*map(id, variables)])
        if self._leaves is None or key != self._leaves[0]:
            kinds = [
                array.dtype if key[0] and is_leaf and is_small(array) else None
                for array, is_leaf in zip(arrays, to_leaf, strict=True)
            ]
            is_packed = tuple(packable(kinds))
            layout = self._layouts.get(is_packed)
            if layout is None:
                inside = [*compress(arrays, is_packed)]
                names = [str(array.dtype) for array in inside]
                layout = Layout([array.shape for array in inside], names)
                self._layouts[is_packed] = layout
            self._leaves = (key, Leaves(layout, variables, is_packed))
        return self._leaves[1]

    def backward(
        self,
        names: Sequence[str],
        residuals: Residuals,
        cotangents: Sequence[Any],
        leaves: Leaves,
    ) -> tuple[list[Any], list[Any]]:
        """Return the packed gradients, and those of the other names that are used.

        Args:
            names: The variables.
            residuals: What `forward` returned.
            cotangents: Those of the results; None stands for zeros.
            leaves: Which gradients are packed.
        """
        present = tuple([cotangent is not None for cotangent in cotangents])
        given = [cotangent for cotangent in cotangents if cotangent is not None]
        layout = leaves.layout
        key = (present, layout)

        def call() -> tuple[Any, list[Any]]:
            compiled = self._backwards.get(key)
            if compiled is None:
                inside = [*compress(names, leaves.is_packed)]
                function = self._transposed(present, inside, layout)
                compiled = self._backwards[key] = function, self._jit(function, "_backward")
            arrays = residuals.arrays() if isinstance(residuals, Hidden) else residuals
            packed, gradients = compiled[self._is_compiled](arrays, given)
            return (packed, [gradients[name] for name in names if name in gradients]), []

        first = [residuals] if isinstance(residuals, Hidden) else residuals
        operands = [*first, *given]
        return self._follow(key, operands, call)[0]

    def _follow(self, what: Any, operands: Sequence[Any], call: Any) -> tuple[Any, Any]:
        if not self._is_compiled:
            return call()
        return follow_function((weakref.ref(self), what), operands, call)

    def gradient(self) -> Differentiable:
        """Return the function of parameters and cotangents that computes the gradients."""
        if self._gradient is None:
            function = self._function

            def gradient(params: Arrays, inputs: Arrays, key: Any) -> tuple[list[Any], Any]:
                primals = {name[2:]: a for name, a in params.items() if name.startswith("p:")}
                cotangents = [params[f"c:{i}"] for i in range(len(params) - len(primals))]
                _, pull_back, _ = jax.vjp(
                    lambda primals: function(primals, inputs, key), primals, has_aux=True
                )
                pull_back = jaxapi.adding_widely(pull_back)
                (gradients,) = pull_back([*map(_conjugated, cotangents)])
                return [_conjugated(gradients[name]) for name in sorted(primals)], None

            self._gradient = Differentiable(gradient, f"{self._name}_gradient")
        return self._gradient

    def _call(self, compiled: Any, function: Any, *args: Any) -> Any:
        if self._is_compiled:
            try:
                return compiled(*args)
            except NEEDS_VALUES as error:
                self._is_compiled = False
                place = (jaxapi.user_stack(error) or (self._name,))[-1]
                _log.log(
                    self._level,
                    "%s runs operation by operation, which is slow: %s needs the values of a "
                    "tensor (use torch.where, or compute it outside)",
                    self._name,
                    place,
                )
        metrics.counter_add("torch::untraced_calls")
        return function(*args)

    def _with_residuals(
        self, params: Arrays, inputs: Arrays, key: Any
    ) -> tuple[list[Any], Any, list[Any]]:
        results, pull_back, others = jax.vjp(
            lambda params: self._function(params, inputs, key), params, has_aux=True
        )
        self._types = [jax.typeof(result) for result in results]
        self._ways = _ways(params, pull_back, self._types)
        self.reaching = frozenset[int]().union(*self._ways.values())
        self._used.clear()
        residuals, self._residuals = jax.tree.flatten(pull_back)
        return results, others, residuals

    def _transposed(
        self, present: tuple[bool, ...], inside: Sequence[str], layout: Layout
    ) -> Callable[..., tuple[list[Any], Arrays]]:
        def backward(residuals: list[Any], cotangents: list[Any]) -> tuple[list[Any], Arrays]:
            given = iter(cotangents)
            whole = [
                _conjugated(next(given).astype(aval.dtype))
                if there
                else jnp.zeros(aval.shape, aval.dtype)
                for there, aval in zip(present, self._types, strict=True)
            ]
            pull_back = jaxapi.adding_widely(jax.tree.unflatten(self._residuals, residuals))
            (gradients,) = pull_back(whole)
            gradients = {name: _conjugated(gradient) for name, gradient in gradients.items()}
            packed = layout.join([gradients[name] for name in inside])
            is_used = zip(gradients, self.used([*gradients], present), strict=True)
            rest = {name for name, used in is_used if used} - {*inside}
            return packed, {name: a for name, a in gradients.items() if name in rest}

        return backward


def _ways(
    names: Iterable[str], pull_back: Callable[..., Any], types: Sequence[Any]
) -> dict[str, frozenset[int]]:
    """Return for each variable the results from which a gradient flows to it."""
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in types]
    try:
        closed = jax.make_jaxpr(pull_back)(types)
    except Exception:  # of the user's own backward, which raises it again when it is called
        return dict.fromkeys(names, frozenset(range(len(types))))
    reached: dict[Any, frozenset[int]] = {
        var: frozenset([index]) for index, var in enumerate(closed.jaxpr.invars)
    }
    nothing: frozenset[int] = frozenset()

    def of(var: Any) -> frozenset[int]:
        return nothing if isinstance(var, Literal) else reached.get(var, nothing)

    for equation in closed.jaxpr.eqns:
        result = nothing.union(*map(of, equation.invars))
        reached.update(dict.fromkeys(equation.outvars, result))
    return dict(zip(sorted(names), map(of, closed.jaxpr.outvars), strict=True))


def _conjugated(gradient: Any) -> Any:
    """Return what PyTorch calls the gradient of complex numbers, for JAX's, and back."""
    return gradient.conj() if jnp.iscomplexobj(gradient) else gradient


NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,  # and its kinds: bool(tensor), numpy, indices
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


class _Node(torch.autograd.Function):
    """One call of a `Differentiable`."""

    @staticmethod
    def forward(
        ctx: Any,
        function: Differentiable,
        call: _Call,
        *variables: Tensor,
    ) -> tuple[Tensor, ...]:
        arrays = [array_of(variable) for variable in variables]
        with torch.enable_grad():  # what is traced sees the mode of the call
            results, call.others, residuals = function.forward(
                call.names, arrays, call.inputs, call.key
            )
        holder = torch.empty(0)
        holder.saved = (residuals, variables, arrays)  # type: ignore[attr-defined]
        ctx.save_for_backward(holder)  # PyTorch lets go of it, or says that it has
        ctx.set_materialize_grads(False)
        ctx.function, ctx.call = function, call.without_results()
        tensors, dirty, detached = [], [], []
        written = call.written()
        for index, result in enumerate(results):
            target = written.get(index)
            if target is None:
                tensors.append(Tensor(result))
                if index not in function.reaching:
                    detached.append(tensors[-1])
            else:
                target.box.write(result)
                dirty.append(target)
                tensors.append(target)
        if dirty:
            ctx.mark_dirty(*dirty)
        if detached:
            ctx.mark_non_differentiable(*detached)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        (holder,) = ctx.saved_tensors
        residuals, variables, arrays = holder.saved
        needed = ctx.needs_input_grad[2:]
        if not any(needed) or all(cotangent is None for cotangent in cotangents):
            return (None,) * (2 + len(variables))
        names = ctx.call.names
        is_used = ctx.function.used(names, [c is not None for c in cotangents])
        if torch.is_grad_enabled():
            gradients = _graph_of_gradients(ctx, variables, arrays, cotangents)
            return (
                None,
                None,
                *[g if u else None for g, u in zip(gradients, is_used, strict=True)],
            )
        with plainly():
            to_leaf = _that_go_to_leaves(ctx, variables)
        to_leaf = [*map(operator.and_, to_leaf, is_used)]
        leaves = ctx.function.leaves(variables, arrays, to_leaf)
        given = [None if c is None else array_of(c) for c in cotangents]
        packed, rest = ctx.function.backward(names, residuals, given, leaves)
        return (None, None, *_deliver(variables, to_leaf, leaves, packed, rest, is_used, needed))


class _Call:
    """What a call of a `Differentiable` gets besides its variables, and its other results."""

    __slots__ = ("inputs", "key", "names", "others", "written")

    def __init__(self, names: Sequence[str], inputs: Arrays, key: Any, written: Written) -> None:
        self.names = names
        self.inputs = inputs
        self.key = key
        self.others: Any = None
        self.written = written  # results that take the place of a tensor's values

    def without_results(self) -> _Call:
        return _Call(self.names, self.inputs, self.key, dict)


def apply(
    function: Differentiable,
    variables: dict[str, Tensor],
    inputs: Arrays,
    key: Any,
    written: Written = dict,
) -> tuple[tuple[Tensor, ...], Any]:
    """Call a function as one node of autograd.

    Args:
        function: What to call.
        variables: The tensors that gradients are computed for.
        inputs: The other arrays.
        key: The data of the random key.
        written: Tells, once the function is traced, which results are written to which tensors.

    Returns:
        The tensors that depend on the variables, and the other results.
    """
    call = _Call(tuple(variables), inputs, key, written)
    results = _Node.apply(function, call, *variables.values())
    return results, call.others


def _graph_of_gradients(
    ctx: Any, variables: Sequence[Tensor], arrays: Sequence[Any], cotangents: Sequence[Any]
) -> list[Tensor | None]:
    """Return gradients that can be differentiated again: the function is computed once more."""
    for variable, array in zip(variables, arrays, strict=True):
        if variable.box.array is not array:
            raise RuntimeError(
                "a tensor that is needed for a second derivative was changed in place after the "
                "forward pass; compute all derivatives before the optimizer's step"
            )
    given: dict[str, Tensor] = dict(zip((f"p:{n}" for n in ctx.call.names), variables, strict=True))
    for index, (cotangent, aval) in enumerate(zip(cotangents, ctx.function._types, strict=True)):
        zeros = Tensor(jnp.zeros(aval.shape, aval.dtype)) if cotangent is None else cotangent
        given[f"c:{index}"] = zeros
    results, _ = apply(ctx.function.gradient(), given, ctx.call.inputs, ctx.call.key)
    by_name = dict(zip(sorted(ctx.call.names), results, strict=True))
    return [by_name[name] for name in ctx.call.names]


def _deliver(
    variables: Sequence[Tensor],
    to_leaf: Sequence[bool],
    leaves: Leaves,
    packed: Sequence[Any],
    rest: Sequence[Any],
    is_used: Sequence[bool],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Return the gradients for the engine; those of plain leaves are left with them at once.

    Through the engine, each leaf would cost two calls of Python more.
    """
    returned: list[Tensor | None] = [None] * len(variables)
    alone: list[Tensor] = []
    arrays: list[Any] = []
    others = iter(rest)
    with plainly():
        for index, variable in enumerate(variables):
            if leaves.is_packed[index] or not is_used[index]:
                continue
            gradient = next(others)
            if to_leaf[index]:
                alone.append(variable)
                arrays.append(gradient)
            elif needed[index]:
                returned[index] = Tensor(gradient)
    _accumulate(alone, arrays)
    if packed:
        _accumulate_packed([*compress(variables, leaves.is_packed)], Gradients(leaves, packed))
    return returned


def _accumulate_packed(leaves: Sequence[Tensor], gradients: Gradients) -> None:
    """Add packed gradients to those of leaves."""
    before = gradients_due(leaves)
    kinds = {*map(type, before)}
    if kinds == {Gradients} and len({*before}) == 1 and before[0].leaves is gradients.leaves:
        before[0].write(_add([*before[0].packed], [*gradients.packed]))
    elif kinds == {type(None)}:
        for leaf in leaves:
            leaf.due = gradients
    else:
        _accumulate(leaves, gradients.parts())


def _accumulate(leaves: Sequence[Tensor], arrays: Sequence[Any]) -> None:
    """Add arrays to the gradients of leaves, all in one operation."""
    present = arrays_of_gradients(leaves)
    indices = [index for index, array in enumerate(present) if array is not None]
    if indices:
        sums = _add([present[index] for index in indices], [arrays[index] for index in indices])
        for index, total in zip(indices, sums, strict=True):
            leaf = leaves[index]
            if leaf.due is None:
                write(leaf.grad, total)  # type: ignore[arg-type]
            else:
                leaf.due = total
    for leaf, array, before in zip(leaves, arrays, present, strict=True):
        if before is None:
            leaf.due = array


@jax.jit
def _add(left: list[Any], right: list[Any]) -> list[Any]:
    return [a + b for a, b in zip(left, right, strict=True)]


def _that_go_to_leaves(ctx: Any, variables: Sequence[Tensor]) -> list[bool]:
    """Return for each variable if the engine would add its gradient to ``.grad`` and no more."""
    if len(variables) < 2 or len({*map(id, variables)}) < len(variables):
        return [False] * len(variables)  # the engine adds up the gradients of a repeated one
    will_execute = torch._C._will_engine_execute_node
    try:
        return [
            node is not None
            and variable.is_leaf
            and not variable._backward_hooks
            and not variable._post_accumulate_grad_hooks
            and will_execute(node)
            for variable, (node, _) in zip(variables, ctx.next_functions, strict=True)
        ]
    except RuntimeError:  # torch.autograd.grad: the caller gets the gradients
        return [False] * len(variables)
