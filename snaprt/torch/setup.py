"""What PyTorch is taught, once a process: the device ``jax``, and how its tensors are run."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from snaprt import jaxapi
from snaprt.torch import (
    autograd_functions,
    generators,
    lists,
    operations,
    optimizers,
    tensors,
    versions,
)

_C: Any = torch._C
_T: Any = torch.Tensor
_libraries: list[torch.library.Library] = []  # what they register is gone with them


@functools.cache
def set_up() -> None:
    """Let PyTorch make tensors on the device ``jax``; no mode of PyTorch is switched on.

    Raises:
        UsageError: torch or torchax is missing, or they do not fit.
    """
    torchax = versions.torchax()
    for file in (torch.__file__, torchax.__file__, __file__):
        jaxapi.hide_frames_below(Path(file).parent)
        jaxapi.hide_traceback_below(Path(file).parent)
    _register_device()
    tensors.set_device("jax")
    tensors.handle_with(operations.run_function, operations.run_dispatched)
    optimizers.watch_steps()
    autograd_functions.watch_functions()
    generators.provide_generators()
    lists.group_by_device()
    _T.pin_memory = lambda tensor, device=None: tensor  # XLA copies from memory of any kind


def _register_device() -> None:
    """Register what C++ asks of a device: a guard, and how its tensors are allocated.

    Checked with torch 2.12.1 and 2.13.0.
    """

    class Guard(_C._acc.DeviceGuard):
        def type_(self) -> Any:
            return _C._autograd.DeviceType.PrivateUse1

    _C._acc.register_python_privateuseone_device_guard(Guard())
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in operations.FACTORIES.items():
        library.impl(name, kernel, "PrivateUse1")
    _libraries.append(library)
