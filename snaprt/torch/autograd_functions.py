"""Python code that PyTorch's autograd calls: of `torch.autograd.Function`, hooks, checkpoints."""

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
    library: Any = torch.autograd
    library._engine_run_backward = _with_functions(library._engine_run_backward)


def _with_functions(run: Any) -> Any:
    """Return a function that runs ``backward`` with functions of PyTorch going to `operations`.

    It is reached with that switched off. What a checkpoint computes again, and hooks, must be
    recorded by autograd as they were the first time.
    """

    @functools.wraps(run)
    def run_with_functions(*args: Any, **kwargs: Any) -> Any:
        with torch._C._EnableTorchFunction():
            return run(*args, **kwargs)

    return run_with_functions
