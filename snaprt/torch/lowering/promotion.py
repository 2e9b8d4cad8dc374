"""The dtypes of results where tensors without dimensions are operands, as PyTorch has them.

A tensor without dimensions does not change the dtype of the result unless it is of a higher kind: a
bfloat16 tensor times a float32 number is a bfloat16 tensor. JAX, and so torchax, promotes by all
operands alike. Source: PyTorch's documentation of type promotion (torch.result_type).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final

import jax.numpy as jnp
import torch

_KINDS: Final = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)

_EXACT_OPERANDS: Final = ("add", "div", "floor_divide", "mul", "rsub", "sub", "true_divide")
"""Operators that compute with the operand as it is, and round the result."""

PROMOTING: Final = (
    *_EXACT_OPERANDS,
    *("addcdiv", "addcmul", "atan2", "bitwise_and", "bitwise_or", "bitwise_xor", "clamp"),
    *("clamp_max", "clamp_min", "copysign", "eq", "fmax", "fmin", "fmod", "gcd"),
    *("ge", "gt", "heaviside", "hypot", "lcm", "le", "ldexp", "logaddexp", "logaddexp2", "lt"),
    *("maximum", "minimum", "ne", "nextafter", "pow", "remainder", "special_xlog1py", "where"),
    "xlogy",
)
"""The names of PyTorch's operators whose operands are promoted to one dtype."""


def promoting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a JAX function that stands for an operator promote its operands as PyTorch does."""
    first = 1 if name == "where" else 0  # the condition is no operand

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        dtype = _dtype_of(args[first:])
        if dtype is None:
            return function(*args, **options)
        if name in _EXACT_OPERANDS and jnp.issubdtype(dtype, jnp.floating):
            return function(*args, **options).astype(dtype)
        cast = [v.astype(dtype) if _is_array(v) and not v.ndim else v for v in args[first:]]
        return function(*args[:first], *cast, **options)

    return call


def _dtype_of(operands: Any) -> Any:
    """Return the dtype that the operands with dimensions have in common, if it is to hold."""
    arrays = [value for value in operands if _is_array(value)]
    wide = [value.dtype for value in arrays if value.ndim]
    single = [value.dtype for value in arrays if not value.ndim]
    if not wide or not single:
        return None
    dtype = functools.reduce(jnp.promote_types, wide)
    if all(_kind(other) <= _kind(dtype) and other != dtype for other in single):
        return dtype
    return None


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "ndim")


def _kind(dtype: Any) -> int:
    return next(n for n, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind))


def promote_in(operators: dict[Any, Any], overloads: Callable[[str], list[Any]]) -> None:
    """Let torchax's operators that promote do so as PyTorch does."""
    for name in PROMOTING:  # those that write in place call these
        for known in (*overloads(name), getattr(torch.ops.aten, name, None)):
            operator = operators.get(known)
            if operator is not None and operator.is_jax_function:
                function = promoting(name, operator.func)
                operators[known] = dataclasses.replace(operator, func=function)
