"""Operators with windows that slide over tensors, which torchax lacks or computes wrongly."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

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


OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "col2im": _fold,
    "conv_tbc": _convolve_time_first,
    "convolution": _convolution,
    "max_pool2d_with_indices": _max_pool,
    "max_pool3d_with_indices": _max_pool,
}
"""JAX functions, by the names of PyTorch's operators."""
