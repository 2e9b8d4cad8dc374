"""`torch.autograd.Function` inside of what is traced: JAX would not call its ``backward``."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils import checkpoint

from snaprt.errors import UsageError
from snaprt.torch import traced


@functools.cache
def watch_functions() -> None:
    """Refuse, from here on, gradients of functions that define them, where JAX computes them."""
    function: Any = torch.autograd.Function
    original = function.apply.__func__

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if not traced.is_tracing() or not torch.is_grad_enabled():
            return original(cls, *args, **kwargs)
        if cls is checkpoint.CheckpointFunction:
            run, _, *inputs = args
            return run(*inputs)  # XLA decides what it keeps in memory
        raise UsageError(
            f"{cls.__qualname__} is a torch.autograd.Function, whose backward would not be called "
            "in a wrapped module or function",
            hint="write it with differentiable operations, such as x + (f(x) - x).detach() for a "
            "straight-through gradient, or call it outside of what is wrapped",
        )

    function.apply = classmethod(functools.wraps(original)(apply))
