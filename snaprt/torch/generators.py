"""`torch.Generator` for the device: PyTorch's of the CPU, from which random keys are drawn."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch

from snaprt.torch import tensors
from snaprt.torch.device_names import means_ours

_PLAIN: Final[Any] = torch.Generator


_Meta: Any = type(_PLAIN)


class _OfAnyDevice(_Meta):
    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, _PLAIN)


class Generator(_PLAIN, metaclass=_OfAnyDevice):
    """What `torch.Generator` makes: one for this device, or a plain one for any other."""

    def __new__(cls, device: Any = "cpu") -> Any:
        """Make a generator for ``device``."""
        return super().__new__(cls) if means_ours(device) else _PLAIN(device)

    def __init__(self, device: Any = "cpu") -> None:
        """Leave everything to ``__new__``."""

    @property
    def device(self) -> torch.device:
        """The device of the tensors that it is for."""
        return tensors.DEVICE


@functools.cache
def provide_generators() -> None:
    """Let ``torch.Generator(device)`` make generators for the device, from here on."""
    library: Any = torch
    library.Generator = Generator
