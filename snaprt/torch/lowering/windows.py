"""Operators with windows that slide over tensors, which torchax lacks or computes wrongly."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from snaprt.torch.lowering import versions


def _convolution(
    values: Any,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    if transposed and groups > 1:  # torchax takes the inputs for the first axis, not the groups
        of_groups = weight.reshape(groups, -1, *weight.shape[1:])
        weight = jnp.swapaxes(of_groups, 0, 1).reshape(weight.shape)
    convolve = versions.torchax().ops.jaten._aten_convolution
    shapes = (stride, padding, dilation, transposed, output_padding)
    return convolve(values, weight, bias, *shapes, groups)


def _max_pool(
    values: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> Any:
    """Return the maxima, and where they are in each image."""
    pool = versions.torchax().ops.jaten.max_pool
    pool = functools.partial(pool, with_index=True)
    options = (kernel_size, stride, padding, dilation, ceil_mode)
    axes = len(kernel_size)
    if dilation in (1, [1], [1] * axes):
        return pool(values, *options)
    # JAX has no gradient of dilated windows.
    _, places = pool(jax.lax.stop_gradient(values), *options)
    images = values.reshape(*values.shape[:-axes], -1)
    flat = places.reshape(*places.shape[:-axes], -1)
    return jnp.take_along_axis(images, flat, -1).reshape(places.shape), places


def _fold(
    columns: Any,
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Any:
    """Return images that are sums of windows, (batch, channels, height, width)."""
    per_axis = [*zip(output_size, kernel_size, dilation, padding, stride, strict=True)]
    counts = [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, d, p, s in per_axis]
    batch = columns.shape[:-2]
    windows = columns.reshape(*batch, -1, *kernel_size, *counts)
    padded = [size + 2 * p for size, _, _, p, _ in per_axis]
    images = jnp.zeros((*windows.shape[: len(batch) + 1], *padded), columns.dtype)
    for offsets in itertools.product(*map(range, kernel_size)):
        places = [
            slice(offset * d, offset * d + s * count, s)
            for offset, count, (_, _, d, _, s) in zip(offsets, counts, per_axis, strict=True)
        ]
        part = windows[(..., *offsets, slice(None), slice(None))]
        images = images.at[(..., *places)].add(part)
    return images[(..., *[slice(p, p + size) for size, _, _, p, _ in per_axis])]


def _convolve_time_first(values: Any, weight: Any, bias: Any, pad: int = 0) -> Any:
    """Return a convolution of (time, batch, channels), with a weight (time, inputs, outputs)."""
    return bias + jax.lax.conv_general_dilated(
        values, weight, (1,), [(pad, pad)], dimension_numbers=("WNC", "WIO", "WNC")
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _scatter(values: Any, places: Any, count: int) -> Any:
    """Return rows of zeros, with values at their places: one of them where there are several."""
    return _rows(values, count).at[_rows_of(places)].set(values)


@_scatter.defjvp
def _(count: int, primals: Any, tangents: Any) -> Any:
    # PyTorch gives each value the gradient of its place, written there or not.
    (values, places), (change, _) = primals, tangents
    changes = _rows(change, count).at[_rows_of(places)].add(change)
    return _scatter(values, places, count), changes


def _rows(values: Any, count: int) -> Any:
    return jnp.zeros((len(values), count), values.dtype)


def _rows_of(places: Any) -> tuple[Any, Any]:
    return jnp.arange(len(places))[:, None], places


def _max_unpool(
    values: Any,
    indices: Any,
    output_size: Sequence[int],
    stride: Sequence[int] | None = None,
    padding: Sequence[int] | None = None,
) -> Any:
    """Return images of zeros, with maxima at the places where they were."""
    batch = values.shape[: -len(output_size)]
    rows = (math.prod(batch), -1)
    images = _scatter(values.reshape(rows), indices.reshape(rows), math.prod(output_size))
    return images.reshape(*batch, *output_size)


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - x, 0)


def _cubic(x: np.ndarray) -> np.ndarray:
    inside = (1.5 * x - 2.5) * x * x + 1
    return np.where(x < 1, inside, np.where(x < 2, ((2.5 - 0.5 * x) * x - 4) * x + 2, 0))


def _resizing(size: int, count: int, align_corners: bool, factor: float | None, kernel: Any) -> Any:
    """Return what each of ``size`` pixels adds to each of ``count``, in a row for each of these."""
    if align_corners:
        step = (size - 1) / (count - 1) if count > 1 else 0.0
    else:
        step = 1 / factor if factor else size / count
    filter_, reach = kernel
    wide = max(step, 1.0)
    centers = step * (np.arange(count)[:, None] + 0.5)
    pixels = np.arange(size)
    first = np.trunc(centers - reach * wide + 0.5)
    last = np.trunc(centers + reach * wide + 0.5)
    weights = filter_(np.abs(pixels - centers + 0.5) / wide)
    weights = np.where((pixels >= first) & (pixels < last), weights, 0)
    return weights / weights.sum(1, keepdims=True)


def _smooth_resize(*kernel: Any) -> dict[str, Callable[..., Any]]:
    """Return how images are resized with antialiasing, by PyTorch's overloads."""

    def resize(
        values: Any,
        output_size: Sequence[int],
        align_corners: bool,
        *factors: float | None,
    ) -> Any:
        for axis, count, factor in zip((-2, -1), output_size, factors or (None, None), strict=True):
            weights = _resizing(values.shape[axis], count, align_corners, factor, kernel)
            moved = jnp.moveaxis(values, axis, -1)
            weights = jnp.asarray(weights.T, values.dtype)
            values = jnp.moveaxis(jnp.matmul(moved, weights, precision="highest"), -1, axis)
        return values

    def by_vectors(
        values: Any,
        output_size: Sequence[int] | None,
        align_corners: bool,
        scale_factors: Sequence[float] | None = None,
    ) -> Any:
        factors = scale_factors or (None, None)
        if output_size is None:
            sizes = zip(values.shape[-2:], factors, strict=True)
            output_size = [math.floor(size * (factor or 1)) for size, factor in sizes]
        return resize(values, output_size, align_corners, *factors)

    return {".default": resize, ".vec": by_vectors}


OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    **{
        f"{name}{overload}": function
        for name, kernel in (
            ("_upsample_bilinear2d_aa", (_triangle, 1)),
            ("_upsample_bicubic2d_aa", (_cubic, 2)),
        )
        for overload, function in _smooth_resize(*kernel).items()
    },
    "col2im": _fold,
    "conv_tbc": _convolve_time_first,
    "convolution": _convolution,
    "max_pool2d_with_indices": _max_pool,
    "max_pool3d_with_indices": _max_pool,
    "max_unpool2d": _max_unpool,
    "max_unpool3d": _max_unpool,
}
"""JAX functions, by the names of PyTorch's operators."""
