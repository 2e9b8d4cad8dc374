"""PyTorch's own words for processes: a process group of one, and no copies of a module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from snaprt.errors import UsageError
from snaprt.torch.tensors import Tensor


@functools.cache
def register() -> None:
    """Let ``init_process_group("xla")`` make a group of one process, as scripts ask for one."""
    if not dist.is_available():
        return
    dist.Backend.register_backend("xla", _group, devices=["cpu"])
    distributed: Any = dist
    distributed.register_rendezvous_handler("xla", _meet)


def _group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    if size > 1:
        raise UsageError(
            f"a process group of {size} processes was asked for; PyTorch code trains in one here",
            hint="start one process, without torchrun",
        )
    group: Any = dist.ProcessGroupGloo
    return group(store, rank, size, timeout)


def _meet(url: str, timeout: Any = None, **_: Any) -> Iterator[tuple[Any, int, int]]:
    distributed: Any = dist
    yield distributed.HashStore(), 0, 1


@functools.cache
def refuse_copies() -> None:
    """Let modules that copy a module on the device say that there is nothing to copy it to."""
    for kind in (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel):
        kind.__init__ = _refusing(kind.__init__)  # type: ignore[method-assign]


def _refusing(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(  # noqa: N807
        self: torch.nn.Module, module: torch.nn.Module, *args: Any, **kwargs: Any
    ) -> None:
        if any(type(parameter) is Tensor for parameter in module.parameters()):
            raise UsageError(
                f"{type(self).__name__} copies a module to several devices or processes, and "
                "PyTorch code has one of each here",
                hint="use the module itself",
            )
        original(self, module, *args, **kwargs)

    return __init__
