"""`torch.autograd.Function` inside of what is traced: the user's backward is the gradient for JAX.

``forward`` runs as a part of the trace, on tensors without gradients. A `jax.custom_vjp` then gives
its results the gradient that ``backward`` computes from them and from what the context has saved.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from snaprt.errors import UsageError
from snaprt.torch.gradients import NEEDS_VALUES
from snaprt.torch.lowering import versions
from snaprt.torch.structure import flatten, unflatten
from snaprt.torch.traced import environment_of_thread, is_differentiable, tracing, value_of

_Function: Any = torch.autograd.Function


class Context(FunctionCtx):
    """What ``forward`` leaves for ``backward``; its methods are those of PyTorch."""

    to_save: Any = ()
    dirty_tensors: tuple[torch.Tensor, ...] = ()
    non_differentiable: tuple[torch.Tensor, ...] = ()
    materialize_grads = True
    needs_input_grad: tuple[bool, ...] = ()

    @property
    def saved_tensors(self) -> tuple[torch.Tensor | None, ...]:
        """What was given to ``save_for_backward``."""
        return self.to_save


def apply(cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a `torch.autograd.Function` while a function is traced.

    Raises:
        UsageError: It gets keyword arguments, or does not return a tensor that it marks as dirty.
    """
    has_second_style = cls.setup_context is not _Function.setup_context
    if has_second_style:
        bound = inspect.signature(cls.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        args, kwargs = bound.args, bound.kwargs
    if kwargs:
        raise UsageError(
            f"{cls.__qualname__}.apply takes keyword arguments only if the class defines "
            "setup_context",
            hint="pass the arguments by position",
        )
    context = Context()
    needs = torch.is_grad_enabled()
    context.needs_input_grad = tuple([needs and _is_variable(argument) for argument in args])
    inner = {id(a): _stopped(a.jax()) for a in args if _is_traced(a)}
    given = [inner.get(id(argument), argument) for argument in args]
    before = {id(tensor): tensor._elem for tensor in inner.values()}
    with torch.no_grad(), jax.named_scope(cls.__name__):
        if has_second_style:
            result = cls.forward(*given)
            cls.setup_context(context, tuple(given), result)
        else:
            result = cls.forward(context, *given)
    outputs = list(result) if isinstance(result, tuple) else [result]
    dirty = {id(tensor) for tensor in context.dirty_tensors}
    if not dirty <= {*map(id, outputs)}:
        raise UsageError(
            f"{cls.__qualname__}.forward marks a tensor as dirty and does not return it",
            hint="return each tensor that is given to ctx.mark_dirty",
        )
    attached = _with_gradient(cls, context, args, given, before, outputs)
    for argument in args:
        changed = inner.get(id(argument))
        if changed is None or changed._elem is before[id(changed)]:
            continue
        if id(changed) not in dirty:
            with torch.no_grad():
                argument.copy_(changed)
            continue
        for index, output in enumerate(outputs):
            if output is changed:
                argument.copy_(attached[index])
                attached[index] = argument
    return tuple(attached) if isinstance(result, tuple) else attached[0]


def watched(function: Any) -> Any:
    """Return ``apply`` as its class has it now, for one that was taken before; others as given."""
    cls: Any = getattr(function, "__self__", None)
    is_apply = isinstance(cls, type) and issubclass(cls, _Function)
    return cls.apply if is_apply and function.__name__ == "apply" else function


def _is_traced(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and hasattr(value, "jax")


def _is_variable(value: Any) -> bool:
    return _is_traced(value) and is_differentiable(value.jax())


def _tensor(array: Any) -> Any:
    return versions.torchax().tensor.Tensor(array, environment_of_thread())


def _stopped(array: Any) -> Any:
    return _tensor(jax.lax.stop_gradient(array))


def _with_gradient(
    cls: Any,
    context: Context,
    args: Sequence[Any],
    given: Sequence[Any],
    before: dict[int, Any],
    outputs: Sequence[Any],
) -> list[Any]:
    """Return the outputs, those that depend on the arguments with the gradient of ``backward``."""
    constant = {id(tensor) for tensor in context.non_differentiable}
    shown = [
        i for i, output in enumerate(outputs) if _is_variable(output) and id(output) not in constant
    ]
    results: list[Any] = [
        _stopped(output.jax()) if _is_traced(output) else output for output in outputs
    ]
    if not any(context.needs_input_grad) or not shown:
        return results
    variables = [i for i, needed in enumerate(context.needs_input_grad) if needed]
    # Where backward finds each saved tensor: second derivatives flow to arguments and results.
    place = {id(outputs[i]): (1, number) for number, i in enumerate(shown)}
    for number, i in enumerate(variables):
        if given[i]._elem is before[id(given[i])]:
            place[id(given[i])] = (0, number)
    saved: list[torch.Tensor] = []
    context.dirty_tensors = context.non_differentiable = ()  # backward does not need them
    structure = flatten(vars(context), saved)
    rest: list[Any] = []
    places: list[Any] = []
    for tensor in saved:
        if not _is_traced(tensor):
            places.append(tensor)
        elif id(tensor) in place:
            places.append(place[id(tensor)])
        else:
            places.append((2, len(rest)))
            rest.append(jax.lax.stop_gradient(tensor.jax()))  # type: ignore[attr-defined]

    types = [jax.typeof(output.jax()) if _is_traced(output) else None for output in outputs]
    wanted = {i: jax.typeof(args[i].jax()) for i in variables}
    materializes, count = context.materialize_grads, len(args)

    def pull_back(residuals: Any, cotangents: Sequence[Any]) -> tuple[list[Any], Any, Any]:
        if _is_once_differentiable(cls):
            residuals, cotangents = _once(cls, (residuals, cotangents))
        arrays = iter(residuals)
        with tracing(_NoRandomness(cls), torch.is_grad_enabled(), None):
            tensors = [_tensor(next(arrays)) if type(p) is tuple else p for p in places]
            again = Context()
            vars(again).update(unflatten(structure, iter(tensors)))
            gradients: list[Any] = [
                None if aval is None or not materializes else jnp.zeros(aval.shape, aval.dtype)
                for aval in types
            ]
            for i, cotangent in zip(shown, cotangents, strict=True):
                gradients[i] = jnp.conj(cotangent)  # PyTorch's convention is the conjugate of JAX's
            with jax.named_scope(f"{cls.__name__}.backward"):
                given = [None if g is None else _tensor(g) for g in gradients]
                returned = _call_backward(cls, again, given)
                return _checked(cls, returned, count, wanted), None, None

    attach: Any = jax.custom_vjp(lambda _, raw, __: raw)

    def forward(variables: Any, raw: Any, rest: Any) -> tuple[Any, Any]:
        pools = (variables, attach(variables, raw, rest), rest)
        return pools[1], [pools[p[0]][p[1]] for p in places if type(p) is tuple]

    attach.defvjp(forward, pull_back)
    raw = [results[i].jax() for i in shown]
    for i, array in zip(shown, attach([args[i].jax() for i in variables], raw, rest), strict=True):
        results[i] = _tensor(array)
    return results


def _backward_of(cls: Any) -> Callable[..., Any]:
    return cls.backward if cls.vjp is _Function.vjp else cls.vjp


def _call_backward(cls: Any, context: Context, gradients: Sequence[Any]) -> Any:
    try:
        return _backward_of(cls)(context, *gradients)
    except NEEDS_VALUES as error:
        raise UsageError(
            f"{cls.__qualname__}.backward needs the values of a tensor while it is traced",
            hint="use torch.where in the place of if",
        ) from error


def _checked(cls: Any, returned: Any, count: int, wanted: dict[int, Any]) -> list[Any]:
    """Return the gradients of the variables, of their shapes and dtypes.

    Raises:
        UsageError: ``backward`` returned other numbers of gradients, or other shapes.
    """
    gradients = list(returned) if isinstance(returned, tuple) else [returned]
    while len(gradients) > count and gradients[-1] is None:
        gradients.pop()
    if len(gradients) != count:
        raise UsageError(
            f"{cls.__qualname__}.backward returned {len(gradients)} gradients for the {count} "
            "arguments of forward",
            hint="return one for each argument after ctx; None for what has no gradient",
        )
    for i, gradient in enumerate(gradients):
        if gradient is not None and not isinstance(gradient, torch.Tensor):
            raise UsageError(
                f"{cls.__qualname__}.backward returned {gradient!r} as the gradient of argument "
                f"{i}",
                hint="return a tensor or None",
            )
    return [_fitted(cls, i, gradients[i], aval) for i, aval in wanted.items()]


def _fitted(cls: Any, index: int, gradient: Any, aval: Any) -> Any:
    if gradient is None:
        return None
    array = value_of(gradient)
    extra = array.ndim - len(aval.shape)
    pairs = [*zip(array.shape[max(extra, 0) :], aval.shape, strict=False)]
    if extra < 0 or any(have != want and want != 1 for have, want in pairs):
        raise UsageError(
            f"{cls.__qualname__}.backward returned a gradient of shape {[*array.shape]} for "
            f"argument {index} of shape {[*aval.shape]}",
            hint="return gradients of the shapes of the arguments",
        )
    if array.shape != aval.shape:  # as PyTorch does
        widened = [axis + extra for axis, (have, want) in enumerate(pairs) if have != want]
        array = array.sum((*range(extra), *widened)).reshape(aval.shape)
    if jnp.iscomplexobj(array) and not jnp.issubdtype(aval.dtype, jnp.complexfloating):
        array = array.real
    return jnp.conj(array.astype(aval.dtype))


_ONCE: Final = once_differentiable(lambda _: None).__code__


def _is_once_differentiable(cls: Any) -> bool:
    function: Any = _backward_of(cls)
    while function is not None and getattr(function, "__code__", None) is not _ONCE:
        function = getattr(function, "__wrapped__", None)
    return function is not None


def _once(cls: Any, values: Any) -> Any:
    """Return the values; whoever differentiates them gets an error."""

    @jax.custom_jvp
    def same(values: Any) -> Any:
        return values

    @same.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise UsageError(
            f"{cls.__qualname__}.backward is once_differentiable: it has no second derivative",
            hint="leave out @once_differentiable, or compute gradients without create_graph=True",
        )

    return same(values)


class _NoRandomness:
    """What torchax asks for while a backward is traced."""

    mesh = None
    autocast_dtype = None

    def __init__(self, cls: Any) -> None:
        self._cls = cls

    @property
    def prng(self) -> Any:
        return self.get_and_rotate_prng_key()

    def get_and_rotate_prng_key(self) -> Any:
        raise UsageError(
            f"{self._cls.__qualname__}.backward draws random numbers",
            hint="draw them in forward and save them: ctx.save_for_backward(noise)",
        )
