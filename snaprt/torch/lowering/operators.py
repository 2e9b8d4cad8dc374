"""Operators that torchax 0.0.13 lacks or computes wrongly, as JAX functions of arrays."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn import functional

from snaprt.errors import UsageError
from snaprt.torch.lowering import matrices, promotion, randomness, slopes, versions, windows
from snaprt.torch.tensors import DTYPES, jax_type

_NEVER: Final = -1e30
"""The logarithm of a probability of zero, finite so that gradients are."""


def _angle(values: Any) -> Any:
    if jnp.iscomplexobj(values):
        return slopes.angle_of(values.imag, values.real)
    is_nan = jnp.isnan(values)
    angles = jnp.where(is_nan, jnp.nan, jnp.where(values < 0, np.float64(np.pi), 0))
    return slopes.flat(angles.astype(_floats(values).dtype), values)


def _search(
    ordered: Any,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """Return where values belong in ordered rows."""
    if sorter is not None:
        ordered = jnp.take_along_axis(ordered, sorter, -1)
    side = side or ("right" if right else "left")
    values = jnp.asarray(values)
    if ordered.ndim == 1:
        return jnp.searchsorted(ordered, values, side=side)

    def row(ordered: Any, values: Any) -> Any:
        return jnp.searchsorted(ordered, values, side=side)

    positions = jax.vmap(row)(
        ordered.reshape(-1, ordered.shape[-1]),
        values.reshape(math.prod(values.shape[:-1]), values.shape[-1]),
    )
    return positions.reshape(values.shape)


def _bucketize(
    values: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False
) -> Any:
    return _search(boundaries, values, right=right)


def _take_along(values: Any, indices: Any, dim: int | None = None) -> Any:
    if dim is None:
        return values.reshape(-1)[indices.reshape(-1)]
    axis = dim % values.ndim
    return jnp.take_along_axis(values, indices, axis)


def _bags(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    """Return the sum (mode 0), mean (1) or maximum (2) of rows of ``weight``, in bags."""
    count = offsets.shape[0] - include_last_offset
    bag = jnp.searchsorted(offsets, jnp.arange(len(indices)), side="right") - 1
    bag = jnp.where(indices == padding_idx, count, bag)  # which is none of the bags
    rows = weight[indices]
    if scale_grad_by_freq:
        rows = _by_frequency(rows, indices, len(weight))
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    sizes = jax.ops.segment_sum(jnp.ones_like(bag), bag, count)
    if mode == 2:
        result = jax.ops.segment_max(rows, bag, count)
        result = jnp.where(sizes[:, None] > 0, result, 0)
    else:
        result = jax.ops.segment_sum(rows, bag, count)
    if mode == 1:
        result = result / jnp.maximum(sizes, 1)[:, None].astype(result.dtype)
    return result, bag, sizes, jnp.zeros(0, bag.dtype)


def _full_like(values: Any, fill_value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    return jnp.full_like(values, fill_value, None if dtype is None else jax_type(dtype))


def _summing(name: str) -> Callable[..., Any]:
    """Return an operator of torchax that sums or multiplies, small integers as large ones."""

    def call(values: Any, *args: Any, dtype: torch.dtype | None = None, **options: Any) -> Any:
        if dtype is not None or slopes.is_whole(values):
            values = values.astype(jax_type(dtype or torch.int64))
        return getattr(versions.torchax().ops.jaten, f"_aten_{name}")(values, *args, **options)

    return call


def _fill(values: Any, value: Any) -> Any:
    filled = jnp.broadcast_to(jnp.asarray(value, values.dtype), values.shape)
    return slopes.attached(filled, values)


def _view(values: Any, *shape: Any) -> Any:
    """Return values in another shape, or their bits as another dtype."""
    wanted = shape[0]
    if not isinstance(wanted, torch.dtype):
        return jnp.reshape(values, wanted if isinstance(wanted, Sequence) else shape)
    dtype = jnp.dtype(jax_type(wanted))
    if DTYPES[dtype] != wanted:
        raise UsageError(
            f"the bits of a tensor cannot be viewed as {wanted}: this device has no such numbers",
            hint="set JAX_ENABLE_X64=1",
        )
    return _bits(values, dtype)


def _bits(values: Any, dtype: Any) -> Any:
    if dtype == values.dtype:
        return values
    if jnp.iscomplexobj(values):
        parts = jnp.stack([values.real, values.imag], -1)
        return _bits(parts.reshape(*values.shape[:-1], -1), dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = _bits(values, jnp.finfo(dtype).dtype)
        pairs = parts.reshape(*parts.shape[:-1], -1, 2)
        return jax.lax.complex(pairs[..., 0], pairs[..., 1])
    if dtype == jnp.bool_:
        return _bits(values, jnp.dtype("uint8")) != 0
    if values.dtype == jnp.bool_:
        return _bits(values.astype(jnp.uint8), dtype)
    ratio, is_wider = (
        dtype.itemsize // values.dtype.itemsize,
        dtype.itemsize > values.dtype.itemsize,
    )
    if is_wider:
        values = values.reshape(*values.shape[:-1], -1, ratio)
    bits = jax.lax.bitcast_convert_type(values, dtype)
    is_narrower = bits.ndim > values.ndim
    return bits.reshape(*values.shape[:-1], -1) if is_narrower else bits


def _histogram(values: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:  # noqa: A002
    """Return how many values are in each of the bins between two bounds, by default their own."""
    low, high = (values.min(), values.max()) if min == max and values.size else (min, max)
    is_point = low == high
    low, high = jnp.where(is_point, low - 1, low), jnp.where(is_point, high + 1, high)
    places = ((values - low) / (high - low) * bins).astype(jnp.int32)
    places = jnp.where((values >= low) & (values <= high), jnp.minimum(places, bins - 1), bins)
    return jnp.zeros(bins, values.dtype).at[places.reshape(-1)].add(1, mode="drop")


def _count(values: Any, weights: Any = None, minlength: int = 0) -> Any:
    """Return how often each number is there, or the sum of the weights of those that are equal."""
    counts = jnp.bincount(values, weights, minlength=minlength)
    if weights is None:
        return counts
    is_float = jnp.issubdtype(weights.dtype, jnp.floating)
    return counts.astype(weights.dtype if is_float else jax_type(torch.float64))


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _multiply_at(values: Any, source: Any, places: Any, includes_self: bool) -> Any:
    """Multiply what is at some places, or 1 if not ``includes_self``, by values for each."""
    kept = values if includes_self else values.at[places].set(1)
    return kept.at[places].multiply(source)


@_multiply_at.defjvp
def _(includes_self: bool, primals: Any, tangents: Any) -> Any:
    (values, source, places), (change, change_of_source, _) = primals, tangents
    if not includes_self:
        values = values.at[places].set(1)
        change = change * jnp.ones_like(change).at[places].set(0)
    factors = [jnp.where(each == 0, 1, each) for each in (values, source)]
    product = _multiply_at(*factors, places, True)
    zeros = (values == 0).astype(jnp.int32).at[places].add(source == 0)

    def slope(given: Any, factor: Any, product: Any, zeros: Any) -> Any:
        return jnp.where(zeros > (given == 0), 0, product / factor)

    changes = slope(values, factors[0], product, zeros) * change
    slopes_of_source = slope(source, factors[1], product[places], zeros[places])
    result = _multiply_at(values, source, places, True)
    return result, changes.at[places].add(slopes_of_source * change_of_source)


def _scatter_reduce(
    values: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Any:
    jaten = versions.torchax().ops.jaten
    if reduce in ("amax", "amin") and not include_self and slopes.is_whole(values):
        range_ = jnp.iinfo(values.dtype)
        start = range_.min if reduce == "amax" else range_.max
        values = jaten._aten_scatter_reduce(values, dim, index, jnp.full_like(source, start))
        include_self = True
    if reduce not in ("prod", "multiply") or not values.ndim:
        return jaten._aten_scatter_reduce(
            values, dim, index, source, reduce, include_self=include_self
        )
    places, parts = jaten._scatter_index(dim, index)
    source = jnp.asarray(source, values.dtype)
    source = source[tuple(parts)] if source.ndim else jnp.broadcast_to(source, index.shape)
    return _multiply_at(values, source, tuple(places), include_self)


def _index_reduce(
    values: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Any:
    if not values.ndim:
        rows = (values[None], 0, index.reshape(-1), source.reshape(-1))
        return _index_reduce(*rows, reduce, include_self=include_self)[0]
    axis = dim % values.ndim
    places = jnp.expand_dims(index, [other for other in range(values.ndim) if other != axis])
    places = jnp.broadcast_to(places, source.shape)
    return _scatter_reduce(values, axis, places, source, reduce, include_self=include_self)


def _multilabel_margin_loss(values: Any, targets: Any, reduction: int = 1) -> Any:
    """Return the loss of rows with several labels each, up to the first that is -1."""
    if not values.ndim:
        loss, is_target = _multilabel_margin_loss(values[None], targets[None], reduction)
        return loss, is_target[0]
    is_label = jnp.cumprod(targets != -1, -1, dtype=bool)
    labels = jnp.where(is_label, targets, 0)
    is_target = (jax.nn.one_hot(labels, values.shape[-1], dtype=bool) & is_label[..., None]).any(-2)
    scores = jnp.take_along_axis(values, labels, -1)
    margins = 1 - scores[..., :, None] + values[..., None, :]
    is_counted = is_label[..., :, None] & ~is_target[..., None, :] & (margins > 0)
    losses = jnp.where(is_counted, margins, 0).sum((-1, -2)) / values.shape[-1]
    loss = (losses, losses.mean(), losses.sum())[reduction]
    return loss, is_target.astype(values.dtype)


def _log_softmax(values: Any, dim: int, half_to_float: bool = False) -> Any:
    return jax.nn.log_softmax(jnp.atleast_1d(values), dim).reshape(values.shape)


def _safe_softmax(values: Any, dim: int, dtype: torch.dtype | None = None) -> Any:
    """Return a softmax that is zero where all values are -inf."""
    values = values if dtype is None else values.astype(jax_type(dtype))
    is_blind = (values == -jnp.inf).all(dim, keepdims=True)
    return jnp.where(is_blind, 0, jax.nn.softmax(jnp.where(is_blind, 0, values), dim))


def _fake_quantize(
    values: Any, scale: Any, zero_point: Any, *bounds: Any, axis: int | None = None
) -> Any:
    """Return values rounded to multiples of ``scale``, and whether they are inside of bounds."""
    low, high = bounds[-2:]
    if axis is not None:
        others = [other for other in range(values.ndim) if other != axis % values.ndim]
        scale, zero_point = (jnp.expand_dims(each, others) for each in (scale, zero_point))
    steps = jnp.round(values * (1 / scale)) + zero_point
    is_inside = (steps >= low) & (steps <= high)
    rounded = ((jnp.clip(steps, low, high) - zero_point) * scale).astype(values.dtype)
    passed = slopes.straight_through(values, jax.lax.stop_gradient(rounded))
    return jnp.where(is_inside, passed, jax.lax.stop_gradient(rounded)), is_inside


def _floats(values: Any) -> Any:
    is_inexact = jnp.issubdtype(values.dtype, jnp.inexact)
    return values if is_inexact else values.astype(jax_type(None))


@jax.custom_jvp
def _digamma(values: Any) -> Any:
    at_zero = jnp.copysign(jnp.array(jnp.inf, values.dtype), -values)
    return jnp.where(values == 0, at_zero, jax.lax.digamma(values))


_digamma.defjvps(lambda change, _, values: change * _polygamma(1, values))


def _polygamma(n: int, values: Any) -> Any:
    values = _floats(values)
    if n == 0:
        return _digamma(values)
    if n > 1:
        return jax.lax.polygamma(jnp.full_like(values, n), values)
    is_reflected = values < 0.5
    right = jnp.where(is_reflected, 1 - values, values)
    slope = jax.lax.polygamma(jnp.ones_like(values), right)
    waves = jnp.square(jnp.pi / jnp.sin(jnp.pi * jnp.where(is_reflected, values, 0.5)))
    return jnp.where(is_reflected, waves - slope, slope)


def _embedding(
    weight: Any,
    indices: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    rows = jnp.take(weight, indices, axis=0)
    if scale_grad_by_freq:
        rows = _by_frequency(rows, indices, len(weight))
    if padding_idx < 0:
        return rows
    is_padding = (indices == padding_idx)[..., None]
    return jnp.where(is_padding, jax.lax.stop_gradient(rows), rows)


def _renormalize(weight: Any, indices: Any, max_norm: float, norm_type: float = 2.0) -> Any:
    """Return rows of which those that are used have no larger norm than ``max_norm``."""
    is_used = jnp.zeros(len(weight), bool).at[indices].set(True)
    sizes = slopes.norm(weight, norm_type, 1)
    factors = jnp.where(is_used & (sizes > max_norm), max_norm / (sizes + 1e-7), 1)
    return weight * factors[:, None].astype(weight.dtype)


def _distances(first: Any, second: Any, p: float, compute_mode: int | None = None) -> Any:
    """Return the distance of each row of ``first`` to each row of ``second``."""
    differences = first[..., :, None, :] - second[..., None, :, :]
    return slopes.attached(slopes.norm(differences, p, -1), differences.sum(-1))


def _own_distances(rows: Any, p: float = 2.0) -> Any:
    first, second = np.triu_indices(len(rows), 1)
    differences = rows[first] - rows[second]
    return slopes.attached(slopes.norm(differences, p, -1), differences.sum(-1))


def _fill_diagonal(values: Any, fill_value: Any, wrap: bool = False) -> Any:
    if values.ndim > 2:
        steps = np.arange(min(values.shape))
        return values.at[(steps,) * values.ndim].set(fill_value)
    rows, columns = values.shape
    places = np.arange(0, values.size if wrap else min(rows, columns) * columns, columns + 1)
    return values.reshape(-1).at[places].set(fill_value).reshape(values.shape)


def _frequencies(make: Callable[..., np.ndarray]) -> Callable[..., Any]:
    def frequencies(n: int, d: float = 1.0, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
        return jnp.asarray(make(n, d), jax_type(dtype))

    return frequencies


def _add(first: Any, second: Any, *, alpha: Any = 1) -> Any:
    """Return the sum, which for two booleans is whether one of them is true."""
    if all(getattr(value, "dtype", None) == jnp.bool_ for value in (first, second)):
        return first | (second & bool(alpha))
    return versions.torchax().ops.jaten._aten_add(first, second, alpha=alpha)


def _by_frequency(rows: Any, indices: Any, count: int) -> Any:
    """Return rows whose gradients are divided by how often the index of each is given."""
    often = jnp.zeros(count, rows.dtype).at[indices].add(1)[indices][..., None]
    fixed = jax.lax.stop_gradient(rows)
    return fixed + (rows - fixed) / often


def _cosines(*coefficients: float) -> Callable[[int], np.ndarray]:
    """Return a window that is a sum of cosines, with alternating signs."""

    def window(length: int) -> np.ndarray:
        angles = 2 * np.pi * np.arange(length) / max(length - 1, 1)
        terms = [(-1) ** k * a * np.cos(k * angles) for k, a in enumerate(coefficients)]
        return np.ones(1) if length == 1 else np.sum(terms, 0)

    return window


def _window(kind: Callable[..., Callable[[int], np.ndarray]]) -> Callable[..., Any]:
    def make(
        window_length: int,
        periodic: bool = True,
        *parameters: float,
        dtype: torch.dtype | None = None,
        **named: Any,
    ) -> Any:
        options = {name: named[name] for name in ("alpha", "beta") if name in named}
        window = kind(*parameters, **options)
        is_longer = periodic and window_length > 1
        values = window(window_length + is_longer)[:window_length] if window_length else np.zeros(0)
        return jnp.asarray(values, jax_type(dtype))

    return make


def _ctc(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Any:
    """Return the loss of connectionist temporal classification.

    Graves et al., "Connectionist Temporal Classification" (2006), by logarithms.

    Args:
        log_probs: Logarithms of probabilities, of shape (time, batch, classes), or (time, classes).
        targets: Classes, of shape (batch, longest), or all one after another.
        input_lengths: How many times each of the batch has.
        target_lengths: How many classes each of the batch has.
        blank: The class of blanks.
        reduction: 1 for the mean, 2 for the sum, 0 for neither.
        zero_infinity: Whether impossible targets have a loss of zero.
    """
    is_single = log_probs.ndim == 2
    dtype = log_probs.dtype
    log_probs = log_probs.astype(jnp.promote_types(dtype, jnp.float32))
    log_probs = log_probs[:, None] if is_single else log_probs
    times, batch, _ = log_probs.shape
    input_lengths = jnp.broadcast_to(jnp.asarray(input_lengths), (batch,))
    target_lengths = jnp.broadcast_to(jnp.asarray(target_lengths), (batch,))
    targets = targets[None] if is_single and targets.ndim == 1 else targets
    if targets.ndim == 1:
        starts = jnp.cumsum(target_lengths) - target_lengths
        places = starts[:, None] + jnp.arange(len(targets))
        targets = targets[jnp.minimum(places, len(targets) - 1)] if len(targets) else targets[None]
    longest = targets.shape[-1]
    labels = jnp.full((batch, 2 * longest + 1), blank).at[:, 1::2].set(targets)
    differs = (labels[:, 2:] != labels[:, :-2]) & (labels[:, 2:] != blank)
    may_skip = jnp.pad(differs, ((0, 0), (2, 0)))[:, : labels.shape[1]]

    def before(scores: Any, by: int) -> Any:
        return jnp.pad(scores, ((0, 0), (by, 0)), constant_values=_NEVER)[:, : scores.shape[1]]

    def step(scores: Any, given: Any) -> tuple[Any, None]:
        time, emitted = given
        skipped = jnp.where(may_skip, before(scores, 2), _NEVER)
        paths = jnp.stack([scores, before(scores, 1), skipped])
        new = jax.nn.logsumexp(paths, 0) + jnp.take_along_axis(emitted, labels, -1)
        new = jnp.maximum(new, _NEVER)
        return jnp.where((time < input_lengths)[:, None], new, scores), None

    first = jnp.full(labels.shape, _NEVER, log_probs.dtype).at[:, 0].set(0)
    scores, _ = jax.lax.scan(step, first, (jnp.arange(times), log_probs))
    last = 2 * target_lengths[:, None]
    ends = jnp.concatenate([last, jnp.maximum(last - 1, 0)], 1)
    final = jnp.take_along_axis(scores, ends, 1)
    final = final.at[:, 1].set(jnp.where(target_lengths > 0, final[:, 1], _NEVER))
    losses = -jax.nn.logsumexp(final, 1)
    is_possible = losses < -_NEVER / 2
    # PyTorch's gradient is that of the scores before `log_softmax`, from which they come.
    is_given = jnp.arange(times)[:, None] < input_lengths
    surplus = jnp.where(is_given[..., None], jnp.exp(log_probs), 0).sum((0, 2))
    losses = losses + (surplus - jax.lax.stop_gradient(surplus))
    losses = jnp.where(is_possible, losses, 0 if zero_infinity else jnp.inf).astype(dtype)
    if reduction == 1:
        return (losses / jnp.maximum(target_lengths, 1).astype(dtype)).mean()
    if reduction == 2:
        return losses.sum()
    return losses[0] if is_single else losses


def _grouped_product(
    left: Any, right: Any, offs: Any = None, bias: None = None, out_dtype: Any = None
) -> Any:
    """Multiply matrices group by group, as experts of a model do.

    Args:
        left: Rows of all groups (rows, inner), or a matrix for each (groups, rows, inner).
        right: Columns of all groups (inner, columns), or a matrix for each.
        offs: The end of each group, (groups,), in what one of them has of all groups: rows,
            columns, or, if both do, what is summed over.
        bias: None: PyTorch takes no other.
        out_dtype: The type of the result, if it is another one.
    """
    dtype = left.dtype if out_dtype is None else jax_type(out_dtype)
    if offs is None:
        return jnp.matmul(left, right).astype(dtype)
    if left.ndim == right.ndim == 2:
        groups = jnp.searchsorted(offs, jnp.arange(left.shape[1]), side="right")
        is_inside = groups == jnp.arange(len(offs))[:, None]
        return jnp.matmul(jnp.where(is_inside[:, None], left, 0), right).astype(dtype)
    sizes = jnp.diff(offs, prepend=0)
    if left.ndim == 3:
        rows = jax.lax.ragged_dot(right.T, jnp.swapaxes(left, 1, 2), sizes)
        return rows.T.astype(dtype)
    return jax.lax.ragged_dot(left, right, sizes).astype(dtype)


CONSTANTS: Final[dict[str, Callable[..., Any]]] = {
    "bartlett_window": _window(lambda: np.bartlett),
    "blackman_window": _window(lambda: _cosines(0.42, 0.5, 0.08)),
    "fft_fftfreq": _frequencies(np.fft.fftfreq),
    "fft_rfftfreq": _frequencies(np.fft.rfftfreq),
    "hamming_window": _window(lambda alpha=0.54, beta=0.46: _cosines(alpha, beta)),
    "hann_window": _window(lambda: _cosines(0.5, 0.5)),
    "kaiser_window": _window(lambda beta=12.0: lambda length: np.kaiser(length, beta)),
}
"""Functions that make windows and frequencies, by the names of PyTorch's operators."""

OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "_cdist_forward": _distances,
    "_embedding_bag": _bags,
    "_embedding_bag_forward_only": _bags,
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": _fake_quantize,
    "_grouped_mm": _grouped_product,
    "_log_softmax": _log_softmax,
    "_safe_softmax": _safe_softmax,
    "_pdist_forward": _own_distances,
    "add": _add,
    "angle": _angle,
    "bincount": _count,
    "bucketize": _bucketize,
    "digamma": lambda values: _digamma(_floats(values)),
    "embedding": _embedding,
    "fake_quantize_per_channel_affine_cachemask": lambda values, scale, zero, axis, *bounds: (
        _fake_quantize(values, scale, zero, *bounds, axis=axis)
    ),
    "fake_quantize_per_tensor_affine_cachemask": _fake_quantize,
    "fill": _fill,
    "full_like": _full_like,
    "histc": _histogram,
    "index_reduce": _index_reduce,
    "lgamma": lambda values: jax.lax.lgamma(_floats(values)),
    "multilabel_margin_loss_forward": _multilabel_margin_loss,
    "polygamma": _polygamma,
    "scatter.reduce": _scatter_reduce,
    "scatter.value_reduce": _scatter_reduce,
    "scatter_reduce": _scatter_reduce,
    "searchsorted": _search,
    "special_log_ndtr": lambda values: jax.scipy.special.log_ndtr(_floats(values)),
    **{name: _summing(name) for name in ("cumprod", "cumsum", "prod", "sum")},
    **CONSTANTS,
}
"""JAX functions, by the names of PyTorch's operators."""

FUNCTIONS: Final[dict[Any, Callable[..., Any]]] = {
    torch.ctc_loss: _ctc,
    torch.take_along_dim: _take_along,
    torch.Tensor.take_along_dim: _take_along,
    torch.Tensor.view: _view,
}
"""JAX functions, by PyTorch's functions whose own code refuses what they get on the device."""

COMPOSED: Final[Sequence[Any]] = (
    *(torch.angle, torch.linalg.det, torch.linalg.slogdet, torch.logdet, torch.lu_solve),
    *(torch.cdist, torch.linalg.solve, torch.linalg.solve_ex, functional.max_pool2d),
    *(torch.linalg.svd, torch.svd, torch.tensor_split),
)
"""Functions that PyTorch computes by these operators, and torchax by others."""


@functools.cache
def corrected_environment() -> Any:
    """Return torchax's environment, with these functions in the place of its own."""
    torchax = versions.torchax()
    environment = torchax.default_env()
    in_place = torchax.ops.op_base.InplaceOp
    for function in COMPOSED:
        environment._ops.pop(function, None)
    aten = [
        *((name, function, False, True) for name, function in randomness.IN_PLACE.items()),
        *((name, function, False, False) for name, function in randomness.OPERATORS.items()),
        *(
            (name, function, True, False)
            for table in (OPERATORS, matrices.OPERATORS, slopes.OPERATORS, windows.OPERATORS)
            for name, function in table.items()
        ),
    ]
    ours = [
        *((known, *rest) for name, *rest in aten for known in _overloads(name)),
        *((known, function, True, False) for known, function in FUNCTIONS.items()),
        *(
            (known, in_place(function, is_jax_func=True), False, True)
            for known, function in (
                (torch.Tensor.fill_diagonal_, _fill_diagonal),
                (torch.ops.aten.embedding_renorm_.default, _renormalize),
                (torch.ops.aten.zero_.default, lambda values: _fill(values, 0)),
            )
        ),
    ]
    for known, function, is_jax, is_view in ours:
        environment.override_op_definition(known, function, is_view)
        environment._ops[known].is_jax_function = is_jax
    promotion.promote_in(environment._ops, _overloads)
    _look_up_further(environment)
    return environment


_HINTS: Final = {
    "_pack_padded_sequence": "pad the sequences, and mask what is beyond their lengths",
    "_pad_packed_sequence": "pad the sequences, and mask what is beyond their lengths",
    "_to_sparse": "use dense tensors",
    "sparse": "use dense tensors",
    "quantize": "use torch.fake_quantize_per_tensor_affine, which rounds in the same way",
}
"""What to do instead, by parts of the names of operators."""


def _look_up_further(environment: Any) -> None:
    """Let operators that write in place and are not known be those that do not.

    All others that are not known are errors, after which PyTorch may compute them by others.
    """
    torchax = versions.torchax()
    look_up = environment._get_op_or_decomp
    not_found = torchax.tensor.OperatorNotFound

    class NotAvailableError(UsageError, not_found):  # type: ignore[misc, valid-type]
        """An operator that is not available on this device."""

    def find(operator: Any) -> Any:
        try:
            return look_up(operator)
        except not_found:
            packet = getattr(operator, "overloadpacket", None)
            name = getattr(packet, "__name__", "") or str(operator)
            known = getattr(torch.ops.aten, name.removesuffix("_"), packet)
        if known is packet:
            hints = [hint for part, hint in _HINTS.items() if part in name]
            raise NotAvailableError(
                f"the operator {name} of PyTorch is not available on this device",
                hint=(hints or [_COMPUTE_ELSEWHERE])[0],
            )
        environment.override_op_definition(operator, torchax.ops.op_base.InplaceOp(known), True)
        return environment._ops[operator]

    environment._get_op_or_decomp = find


_COMPUTE_ELSEWHERE: Final = (
    "use other functions of PyTorch, or compute it on the CPU, outside of what is wrapped: x.cpu()"
)


def _overloads(name: str) -> list[Any]:
    name, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:  # such as `cholesky`, which PyTorch does not have from 2.14 on
        return []
    if overload:
        return [getattr(packet, overload)]
    return [getattr(packet, each) for each in packet.overloads() if not each.endswith("out")]
