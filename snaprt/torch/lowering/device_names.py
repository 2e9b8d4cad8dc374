"""The names that PyTorch code uses for the device of tensors whose values are JAX arrays."""

from __future__ import annotations

from typing import Any, Final

import torch

from snaprt.errors import UsageError

OURS: Final = frozenset({"jax", "xla"})
"""The types of devices that mean ours: ``xla`` is its name in PyTorch/XLA."""


def means_ours(device: Any) -> bool:
    """Return whether a device, a string or anything else that a function was given names ours."""
    if isinstance(device, torch.device):
        return device.type in OURS
    return isinstance(device, str) and device.partition(":")[0] in OURS


def renamed(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a function of PyTorch with ``jax`` in the place of ``xla``.

    Raises:
        UsageError: The device is another one than ``xla:0``.
    """
    if _is_xla(kwargs.get("device")):
        kwargs = {**kwargs, "device": "jax"}
    if func in _POSITIONAL and any(map(_is_xla, args)):
        args = tuple(["jax" if _is_xla(a) else a for a in args])
    return args, kwargs


def _is_xla(device: Any) -> bool:
    if type(device) is str and device.startswith("xla"):
        device = torch.device(device)
    if type(device) is not torch.device or device.type != "xla":
        return False
    if device.index:
        raise UsageError(
            f"there is no device {device}: tensors of PyTorch are on one device of JAX",
            hint="use the device xla:0, and JAX's shardings for several devices",
        )
    return True


_POSITIONAL: Final = frozenset({torch.Tensor.to})  # the others take it as a keyword
