"""The device of tensors, its arrays, and the lazy scope."""

from __future__ import annotations

import jax
import torch

from snaprt.runtime.lazy_scope import lazy as _lazy
from snaprt.torch import tensors
from snaprt.torch.setup import set_up


class lazy(_lazy):  # noqa: N801 - reads as a function, used as a scope and a decorator
    """Run PyTorch code on the device lazily inside; takes the options of `snaprt.lazy`.

    ``with snaprt.torch.lazy(): ...`` records what PyTorch computes on `snaprt.torch.device`;
    `snaprt.mark_step` runs it as one program. Tensors on other devices are not affected.

    Examples:
        >>> import torch
        >>> import snaprt.torch
        >>> with snaprt.torch.lazy():
        ...     y = torch.ones(3).to(snaprt.torch.device()) * 2
        ...     snaprt.mark_step()
        >>> y.cpu()
        tensor([2., 2., 2.])
    """

    def __enter__(self) -> None:
        set_up()
        super().__enter__()


def device() -> torch.device:
    """Return the device of tensors whose values are JAX arrays, for ``tensor.to(device)``.

    Examples:
        >>> import torch
        >>> import snaprt.torch
        >>> torch.ones(3).to(snaprt.torch.device()).device.type
        'jax'
    """
    set_up()
    return tensors.DEVICE


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """Return the array of a tensor on the device; nothing is copied.

    Inside `lazy`, it may be a lazy array. Gradients do not flow through.

    Raises:
        UsageError: The tensor is on another device.

    Examples:
        >>> import torch
        >>> import snaprt.torch
        >>> tensor = torch.arange(3.0).to(snaprt.torch.device())
        >>> print(snaprt.torch.to_jax(tensor))
        [0. 1. 2.]
    """
    set_up()
    return tensors.to_jax(tensor)


def to_torch(array: jax.Array) -> torch.Tensor:
    """Return an array as a tensor on the device; nothing is copied.

    Raises:
        UsageError: It is not a JAX array, or PyTorch has no such dtype.

    Examples:
        >>> import snaprt.torch
        >>> snaprt.torch.to_torch(jnp.arange(3.0)).cpu()
        tensor([0., 1., 2.])
    """
    set_up()
    return tensors.to_torch(array)
