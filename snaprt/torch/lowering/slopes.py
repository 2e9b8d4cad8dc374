"""Operators whose gradients torchax has otherwise than PyTorch where they are not smooth.

These are zeros, bounds and equal values: a norm of zeros has no gradient (JAX has NaN there), and
the first of equal maxima gets all of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import torch

from snaprt.torch.lowering import versions
from snaprt.torch.tensors import jax_type

_fixed = jax.lax.stop_gradient


@jax.custom_jvp
def _abs_of_real(values: Any) -> Any:
    return jnp.abs(values)


_abs_of_real.defjvps(lambda change, _, values: change * jnp.sign(values))


def _abs(values: Any) -> Any:
    return (jnp.abs if jnp.iscomplexobj(values) else _abs_of_real)(values)


def _between(values: Any, low: float, high: float) -> Any:
    """Return whether values are inside of bounds, and these have no gradient."""
    return (values > low) & (values < high)


def _hardtanh(values: Any, min_val: float = -1, max_val: float = 1) -> Any:
    bounded = _fixed(jnp.clip(values, min_val, max_val)).astype(values.dtype)
    return jnp.where(_between(values, min_val, max_val), values, bounded)


def _hardsigmoid(values: Any) -> Any:
    line = values / 6 + 0.5
    return jnp.where(_between(values, -3, 3), line, _fixed(jnp.clip(line, 0, 1)))


def _hardswish(values: Any) -> Any:
    inside = values * (values + 3) / 6
    return jnp.where(values <= -3, 0, jnp.where(values < 3, inside, values))


def _elu(values: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Any:
    is_above = values > 0
    below = jnp.where(is_above, 0, values)  # of which the exponential is finite
    return jnp.where(is_above, values, alpha * jnp.expm1(below * input_scale)) * scale


def _softplus(values: Any, beta: Any = 1, threshold: Any = 20) -> Any:
    is_linear = values * beta > threshold
    below = jnp.where(is_linear, 0, values * beta)
    return jnp.where(is_linear, values, jnp.log1p(jnp.exp(below)) / beta)


def _sinc(values: Any) -> Any:
    is_small = _fixed(jnp.abs(values)) < 1e-2  # where the quotient has no precise slope
    angles = jnp.pi * jnp.where(is_small, 1, values)
    squares = jnp.square(jnp.pi * values)
    series = 1 - squares / 6 * (1 - squares / 20 * (1 - squares / 42))
    return jnp.where(is_small, series, jnp.sin(angles) / angles)


def _logit(values: Any, eps: float | None = None) -> Any:
    if eps is not None:
        inside = (values >= eps) & (values <= 1 - eps)
        values = jnp.where(inside, values, _fixed(jnp.clip(values, eps, 1 - eps)))
    return _log_odds(values)


@jax.custom_jvp
def _log_odds(values: Any) -> Any:
    return jnp.log(values / (1 - values))


@_log_odds.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (values,), (change,) = primals, tangents
    slope = 1 / (values * (1 - values))
    return _log_odds(values), jnp.where((values < 0) | (values > 1), jnp.nan, slope) * change


def _times_logarithm(shift: int) -> Callable[..., Any]:
    """Return a function for x * log(y + shift), which is zero where x is."""

    def logarithm(other: Any) -> Any:
        return jnp.log1p(other) if shift else jnp.log(other)

    @jax.custom_jvp
    def call(values: Any, other: Any) -> Any:
        result = jnp.where(values == 0, 0, values * logarithm(other))
        return jnp.where(jnp.isnan(other), jnp.nan, result)

    @call.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (values, other), (change, change_of_other) = primals, tangents
        is_nothing = (values == 0) & (other <= -shift)
        slope = jnp.where(is_nothing, 0, logarithm(jnp.where(is_nothing, 1, other)))
        return call(values, other), slope * change + values / (other + shift) * change_of_other

    def of_operands(values: Any, other: Any) -> Any:
        dtype = jnp.result_type(values, other)
        dtype = dtype if jnp.issubdtype(dtype, jnp.inexact) else jax_type(None)
        return call(*jnp.broadcast_arrays(*[jnp.asarray(v, dtype) for v in (values, other)]))

    return of_operands


def _leaky_relu(values: Any, negative_slope: float = 0.01) -> Any:
    return jnp.where(values > 0, values, values * negative_slope)


def _log_sigmoid(values: Any) -> Any:
    return jax.nn.log_sigmoid(values), jnp.zeros(0, values.dtype)


def _share_at_bound(*, of_tensor: bool) -> float:
    """Return which part of a gradient gets through `torch.clamp` at a bound: torch 2.14 has less.

    Args:
        of_tensor: Whether the bound is a tensor.
    """
    with torch.enable_grad():
        values = torch.zeros(1, device="cpu", requires_grad=True)
        bound = torch.zeros(1, device="cpu") if of_tensor else 0
        torch.clamp(values, min=bound).sum().backward()
        assert values.grad is not None
        return values.grad.item()


_SHARE_AT_BOUND: Final = {
    is_tensor: _share_at_bound(of_tensor=is_tensor) for is_tensor in (False, True)
}


def _clamp(values: Any, min: Any = None, max: Any = None) -> Any:  # noqa: A002 - PyTorch's names
    rules = (
        (min, jnp.maximum, jnp.less_equal, jnp.less),
        (max, jnp.minimum, jnp.greater_equal, jnp.greater),
    )
    for bound, halving, reaches, exceeds in rules:
        if bound is None:
            continue
        share = _SHARE_AT_BOUND[hasattr(bound, "dtype")]
        if share == 0.5:
            values = halving(values, bound)
        else:
            values = jnp.where((exceeds if share else reaches)(values, bound), bound, values)
    return values


def _extreme(reduce: Callable[..., Any], find: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for one of the largest or smallest values, and where it is."""

    @functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
    def extreme(values: Any, axis: int) -> Any:
        return reduce(values, axis, keepdims=True)

    @extreme.defjvp
    def _(axis: int, primals: Any, tangents: Any) -> Any:
        (values,), (change,) = primals, tangents
        place = find(values, axis, keepdims=True)
        is_there = jax.lax.broadcasted_iota(place.dtype, values.shape, axis) == place
        return extreme(values, axis), jnp.where(is_there, change, 0).sum(axis, keepdims=True)

    def call(values: Any, dim: int, keepdim: bool = False) -> Any:
        rows = values.reshape(-1) if values.ndim == 0 else values
        axis = dim % rows.ndim
        results = extreme(rows, axis), find(rows, axis, keepdims=True)
        return tuple([r if keepdim and values.ndim else r.squeeze(axis) for r in results])

    return call


def _running(name: str) -> Callable[..., Any]:
    """Return a function for the largest or smallest values so far, and where they are."""

    def find(values: Any, dim: int) -> Any:
        return getattr(versions.torchax().ops.jaten, f"_aten_{name}")(values, dim)

    @functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
    def running(values: Any, axis: int) -> Any:
        return find(values, axis)[0]

    @running.defjvp
    def _(axis: int, primals: Any, tangents: Any) -> Any:
        (values,), (change,) = primals, tangents
        extremes, places = find(values, axis)
        return extremes, jnp.take_along_axis(change, places, axis)

    def call(values: Any, dim: int) -> Any:
        if values.ndim == 0:
            return find(values, dim)
        axis = dim % values.ndim
        return running(values, axis), find(values, axis)[1]

    return call


@jax.custom_jvp
def straight_through(old: Any, new: Any) -> Any:
    """Return the new values, with the gradient of the old."""
    return new


@straight_through.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return primals[1], tangents[0]


def flat(result: Any, *operands: Any) -> Any:
    """Return a result that is constant but for jumps: its gradients are zeros, not none."""
    return attached(_fixed(result), *operands)


def attached(result: Any, *operands: Any) -> Any:
    """Return a result that depends on the operands, too, with gradients of zeros."""
    for operand in operands:
        if jnp.issubdtype(getattr(operand, "dtype", bool), jnp.inexact):
            result = jnp.where(False, operand.astype(result.dtype), result)
    return result


def _step(name: str) -> Callable[..., Any]:
    """Return an operator of torchax as one that is constant but for jumps."""

    def call(*operands: Any, **options: Any) -> Any:
        given = [_fixed(each) if hasattr(each, "dtype") else each for each in operands]
        result = getattr(versions.torchax().ops.jaten, f"_aten_{name}")(*given, **options)
        return flat(result, *operands)

    return call


_STEPS: Final = ("ceil", "floor", "floor_divide", "round", "sign", "trunc")


def is_whole(*values: Any) -> bool:
    """Return whether values are integers or booleans, as arrays or as numbers."""
    return not any(jnp.issubdtype(jnp.result_type(value), jnp.inexact) for value in values)


def whole(*values: Any) -> list[Any]:
    """Return integers as arrays of the dtype that PyTorch computes with."""
    dtype = jnp.result_type(*values)
    dtype = jax_type(torch.int64) if dtype == jnp.bool_ else dtype
    return [jnp.asarray(value).astype(dtype) for value in values]


def _divide(values: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode and is_whole(values, other):  # as floats, large ones would not be exact
        divide = jnp.floor_divide if rounding_mode == "floor" else jax.lax.div
        return divide(*jnp.broadcast_arrays(*whole(values, other)))
    result = versions.torchax().ops.jaten._aten_div(values, other, rounding_mode)
    return flat(result, values, other) if rounding_mode else result


def _copy_sign(values: Any, signs: Any) -> Any:
    result = versions.torchax().ops.jaten._aten_copysign(values, signs)
    return attached(jnp.where(values == 0, _fixed(result), result), signs)


def _axes(values: Any, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return the axes that PyTorch means, all by none; a number has one in its place."""
    if values.ndim == 0:
        return ()
    return tuple([dim] if isinstance(dim, int) else dim or range(values.ndim))


def norm(
    values: Any,
    ord: Any = 2,  # noqa: A002 - the name in PyTorch
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """Return norms of vectors along axes; those of zeros have no gradient."""
    if dtype is not None:
        values = values.astype(jax_type(dtype))
    axis = _axes(values, dim)
    sizes = _abs(values)
    order = float(ord)
    if order == 0:
        return (sizes != 0).sum(axis, keepdims=keepdim).astype(sizes.dtype)
    if order == 1:
        return sizes.sum(axis, keepdims=keepdim)
    if order == math.inf:
        return jnp.max(sizes, axis, keepdims=keepdim, initial=0)
    if order == -math.inf:
        return jnp.min(sizes, axis, keepdims=keepdim)
    if order == 2:
        return _root(jnp.square(sizes).sum(axis, keepdims=keepdim))
    is_zero = sizes == 0
    powers = jnp.where(
        is_zero, 0.0 if order > 0 else math.inf, jnp.where(is_zero, 1, sizes) ** order
    )
    total = powers.sum(axis, keepdims=keepdim)
    is_flat = (total == 0) | jnp.isinf(total)
    root = jnp.where(is_flat, 1, total) ** (1 / order)
    return jnp.where(is_flat, _fixed(total ** (1 / order)), root).astype(sizes.dtype)


def _root(values: Any) -> Any:
    """Return square roots; that of zero has no gradient."""
    is_zero = values == 0
    return jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 1, values))).astype(values.dtype)


def _deviation(values: Any, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Any:
    correction = 1 if correction is None else correction
    return _root(jnp.var(values, _axes(values, dim), ddof=correction, keepdims=keepdim))


def _deviation_and_mean(values: Any, dim: Any = None, **options: Any) -> Any:
    mean = values.mean(_axes(values, dim), keepdims=options.get("keepdim", False))
    return _deviation(values, dim, **options), mean


@jax.custom_jvp
def _power_of_arrays(base: Any, exponent: Any) -> Any:
    return jnp.power(base, exponent)


@_power_of_arrays.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (base, exponent), (change, change_of_exponent) = primals, tangents
    power = _power_of_arrays(base, exponent)
    slope = jnp.where(exponent == 0, 0, exponent * _power_of_arrays(base, exponent - 1))
    is_level = (base == 0) & (exponent.real >= 0)
    logarithm = jnp.log(jnp.where(is_level, 1, base))
    slope_of_exponent = jnp.where(is_level, 0, power * logarithm)
    return power, slope * change + slope_of_exponent * change_of_exponent


def _power(base: Any, exponent: Any) -> Any:
    both = (base, exponent)
    if all(jnp.issubdtype(getattr(value, "dtype", bool), jnp.inexact) for value in both):
        dtype = jnp.result_type(*both)
        return _power_of_arrays(*jnp.broadcast_arrays(*[each.astype(dtype) for each in both]))
    if is_whole(*both):
        return jnp.power(*whole(*both))
    power = versions.torchax().ops.jaten._aten_pow(base, exponent)
    is_flat = not hasattr(exponent, "dtype") and exponent == 0
    return flat(power, base) if is_flat else power


@jax.custom_jvp
def _bessel(values: Any) -> Any:
    return jax.scipy.special.i0(values)


_bessel.defjvps(lambda change, _, values: change * jax.scipy.special.i1(values))


def angle_of(first: Any, second: Any) -> Any:
    """Return ``atan2``, which has no gradient at the origin."""
    is_origin = (first == 0) & (second == 0)
    angles = jnp.arctan2(jnp.where(is_origin, 1, first), jnp.where(is_origin, 1, second))
    return jnp.where(is_origin, _fixed(jnp.arctan2(first, second)), angles)


_LEAST_LOGARITHM: Final = -100.0


@jax.custom_jvp
def _cross_entropy(values: Any, targets: Any) -> Any:
    positive = jnp.maximum(jnp.log(values), _LEAST_LOGARITHM)
    negative = jnp.maximum(jnp.log1p(-values), _LEAST_LOGARITHM)
    return (targets - 1) * negative - targets * positive


@_cross_entropy.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (values, targets), (change, change_of_targets) = primals, tangents
    slope = (values - targets) / jnp.maximum(values * (1 - values), 1e-12)
    negative = _cross_entropy(values, jnp.zeros_like(targets))
    positive = _cross_entropy(values, jnp.ones_like(targets))
    return (
        _cross_entropy(values, targets),
        slope * change + (positive - negative) * change_of_targets,
    )


def _binary_cross_entropy(values: Any, targets: Any, weight: Any = None, reduction: int = 1) -> Any:
    losses = _cross_entropy(values, targets)
    losses = losses if weight is None else losses * weight
    return (lambda all_: all_, jnp.mean, jnp.sum)[reduction](losses)


OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "abs": _abs,
    "atan2": angle_of,
    "binary_cross_entropy": _binary_cross_entropy,
    **{name: _step(name) for name in _STEPS},
    "celu": lambda values, alpha=1.0: _elu(values, alpha, 1, 1 / alpha),
    "clamp": _clamp,
    "clamp_max": lambda values, max: _clamp(values, None, max),  # noqa: A006 - PyTorch's name
    "clamp_min": _clamp,
    "copysign": _copy_sign,
    "cummax": _running("cummax"),
    "cummin": _running("cummin"),
    "dist": lambda first, second, p=2: norm(first - second, p),
    "div": _divide,
    "elu": _elu,
    "fmod": jnp.fmod,
    "hardsigmoid": _hardsigmoid,
    "hardswish": _hardswish,
    "hardtanh": _hardtanh,
    "i0": _bessel,
    "leaky_relu": _leaky_relu,
    "linalg_vector_norm": norm,
    "log_sigmoid_forward": _log_sigmoid,
    "logit": _logit,
    "max.dim": _extreme(jnp.max, jnp.argmax),
    "min.dim": _extreme(jnp.min, jnp.argmin),
    "mish": lambda values: values * jnp.tanh(_softplus(values)),
    "nextafter": lambda values, other: straight_through(
        values, jnp.nextafter(_fixed(values), _fixed(other))
    ),
    "pow": _power,
    "relu6": lambda values: _hardtanh(values, 0, 6),
    "sinc": _sinc,
    "softplus": _softplus,
    "special_xlog1py": _times_logarithm(1),
    "std.correction": _deviation,
    "std_mean.correction": _deviation_and_mean,
    "xlogy": _times_logarithm(0),
}
"""JAX functions, by the names of PyTorch's operators."""
