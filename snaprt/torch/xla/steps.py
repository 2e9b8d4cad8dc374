"""Steps under the names of PyTorch/XLA: where one ends, and what runs then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

import snaprt
from snaprt.torch import scope
from snaprt.torch.tensors import Tensor, array_of
from snaprt.torch.xla.absent import refuse
from snaprt.torch.xla.processes import check_alone

mark_step = snaprt.mark_step
sync = snaprt.mark_step


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    barrier: bool = False,
    optimizer_args: Mapping[str, Any] | None = None,
    groups: Any = None,
    pin_layout: bool = True,
) -> Any:
    """Call ``optimizer.step(**optimizer_args)``, and `mark_step` if ``barrier`` is set.

    There are no gradients of other processes to add. `MpDeviceLoader` marks the step, too.

    Raises:
        UsageError: This is one of several processes, whose gradients would have to be added.

    Examples:
        >>> model = torch.nn.Linear(2, 1).to(xm.xla_device())
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model(torch.ones(4, 2, device=xm.xla_device())).sum().backward()
        >>> xm.optimizer_step(optimizer, barrier=True)
    """
    check_alone("optimizer_step")
    result = optimizer.step(**(optimizer_args or {}))
    if barrier:
        snaprt.mark_step()
    return result


def reduce_gradients(optimizer: torch.optim.Optimizer, groups: Any = None, **_: Any) -> None:
    """Do nothing: there are no gradients of other processes to add.

    Raises:
        UsageError: This is one of several processes.

    Examples:
        >>> model = torch.nn.Linear(2, 1).to(xm.xla_device())
        >>> xm.reduce_gradients(torch.optim.SGD(model.parameters(), lr=0.1))
    """
    check_alone("reduce_gradients")


def add_step_closure(
    closure: Callable[..., object], args: Iterable[Any] = (), run_async: bool = False
) -> None:
    """Call ``closure(*args)`` after the next `mark_step`, see `snaprt.add_step_closure`.

    The closure gets tensors in ``args`` as they are now, without their history.

    Examples:
        >>> loss = torch.ones(2, device=xm.xla_device()).sum()
        >>> xm.add_step_closure(lambda loss: print(loss.item()), args=(loss,))
        >>> xm.mark_step()
        2.0
    """
    given = tuple(args)
    tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]

    def call(*arrays: Any) -> None:
        now = dict(zip(map(id, tensors), map(Tensor, arrays), strict=True))
        closure(*[_replaced(argument, now) for argument in given])

    arrays = [array_of(tensor) for tensor in tensors]
    snaprt.add_step_closure(call if callable(closure) else closure, arrays, run_async)


def _replaced(argument: Any, now: Mapping[int, Tensor]) -> Any:
    """Return an argument with other tensors; one without tensors is what it was."""
    if not any(id(leaf) in now for leaf in pytree.tree_leaves(argument)):
        return argument
    return pytree.tree_map(lambda leaf: now.get(id(leaf), leaf), argument)


def step() -> AbstractContextManager[None]:
    """Return a scope that is one step: it runs lazily, and ends with `mark_step`.

    Examples:
        >>> with xm.step():
        ...     y = torch.ones(2, device=xm.xla_device()) * 3
        >>> y.cpu()
        tensor([3., 3.])
    """
    return _one_step(full_graph=False)


def compile(  # noqa: A001 - the name in PyTorch/XLA
    f: Callable[..., Any] | None = None,
    full_graph: bool | None = False,
    name: str | None = None,
    max_different_graphs: int | None = None,
    custom_compile_options: Mapping[str, Any] | None = None,
) -> Any:
    """Let each call of a function be one step; as a decorator, or as a scope without function.

    The function runs lazily each time, and its program is compiled once. `snaprt.torch.jit` does
    not run it again, which is faster.

    Args:
        f: The function.
        full_graph: Whether reading a value inside is an error.
        name: Not used: programs have the names of their operations.
        max_different_graphs: Not supported; `snaprt.no_compile` finds new programs.
        custom_compile_options: Not supported; use ``XLA_FLAGS``.

    Raises:
        UsageError: An option is given that is not supported.

    Examples:
        >>> @xm.compile
        ... def double(x):
        ...     return x * 2
        >>> double(torch.ones(2, device=xm.xla_device())).cpu()
        tensor([2., 2.])
    """
    refuse("max_different_graphs", max_different_graphs, "use snaprt.no_compile()")
    refuse("custom_compile_options", custom_compile_options, "set XLA_FLAGS")
    one_step = _one_step(full_graph=bool(full_graph))
    return one_step if f is None else one_step(f)


@contextmanager
def _one_step(*, full_graph: bool) -> Iterator[None]:
    snaprt.mark_step()
    with eager_mode_context(False), scope.lazy(fullgraph=full_graph):
        yield
        snaprt.mark_step()


def eager_mode(enable: bool) -> None:
    """Run each operation as soon as it is called, see `snaprt.eager_mode`; not in `compile`.

    Examples:
        >>> xm.eager_mode(True)
        >>> y = torch.ones(2, device=xm.xla_device()) + 1  # has run
        >>> xm.eager_mode(False)
    """
    snaprt.eager_mode(enable)


is_eager_mode = snaprt.is_eager_mode


@contextmanager
def eager_mode_context(enable: bool) -> Iterator[None]:
    """Set `eager_mode` inside.

    Examples:
        >>> with xm.eager_mode_context(True):
        ...     xm.is_eager_mode()
        True
    """
    before = snaprt.is_eager_mode()
    if before == enable:
        yield
        return
    snaprt.eager_mode(enable)
    try:
        yield
    finally:
        snaprt.eager_mode(before)


def unlazy(tensors: Iterable[torch.Tensor]) -> None:
    """Compute tensors, and everything else that is pending, and wait for it.

    Examples:
        >>> y = torch.ones(2, device=xm.xla_device()) * 5
        >>> xm.unlazy([y])  # y has its value
    """
    snaprt.mark_step(wait=True)
