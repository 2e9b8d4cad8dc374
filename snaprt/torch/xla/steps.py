"""Steps under PyTorch/XLA's names: where one ends, what runs then, loaders that mark them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

import snaprt
from snaprt.errors import UsageError
from snaprt.torch import scope
from snaprt.torch.tensors import Tensor, array_of
from snaprt.torch.xla.absent import refuse
from snaprt.torch.xla.placement import send_cpu_data_to_device
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


def fetch_gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the gradients of an optimizer's parameters, of those that have one.

    Examples:
        >>> model = torch.nn.Linear(2, 1).to(xm.xla_device())
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> len(xm.fetch_gradients(torch.optim.SGD(model.parameters(), lr=0.1)))
        2
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [param.grad for param in params if param.grad is not None]


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


class MpDeviceLoader:
    """Gives the batches of a loader with their tensors on the device, and marks the steps.

    Args:
        loader: A `torch.utils.data.DataLoader`, or any iterable of batches.
        device: The device.
        batches_per_execution: How many batches make one step.
        input_sharding: Must be None.
        sizes: Sizes of queues and numbers of threads of PyTorch/XLA, which are ignored: a
            `DataLoader` with workers loads ahead.

    Raises:
        UsageError: A sharding is given, or ``batches_per_execution`` is less than 1.

    Examples:
        >>> loader = xm.MpDeviceLoader([torch.ones(2), torch.zeros(2)], xm.xla_device())
        >>> [float(batch.sum()) for batch in loader]
        [2.0, 0.0]
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: Any,
        *,
        batches_per_execution: int = 1,
        input_sharding: Any = None,
        **sizes: Any,
    ) -> None:
        refuse("input_sharding", input_sharding, "one device holds each tensor here")
        if batches_per_execution < 1:
            raise UsageError(f"batches_per_execution is {batches_per_execution}, less than 1")
        self._loader = loader
        self._device = device
        self._batches_per_step = batches_per_execution

    def __len__(self) -> int:
        """Return the number of batches, where the loader knows it."""
        if not isinstance(self._loader, Sized):
            raise TypeError(f"{type(self._loader).__name__} does not say how many batches it has")
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Give the batches in their order, and mark the step before the next and at the end."""
        number = 0
        for number, batch in enumerate(self._loader, 1):
            yield send_cpu_data_to_device(batch, self._device)
            if number % self._batches_per_step == 0:
                mark_step()
        if number % self._batches_per_step:
            mark_step()


class ParallelLoader:
    """Gives the loader of a device, see `MpDeviceLoader`.

    Raises:
        UsageError: There is not exactly one device.

    Examples:
        >>> device = xm.xla_device()
        >>> loader = xm.ParallelLoader([torch.ones(2)], [device]).per_device_loader(device)
        >>> [float(batch.sum()) for batch in loader]
        [2.0]
    """

    def __init__(
        self, cpu_loader: Iterable[Any], devices: Sequence[Any], batchdim: int = 0, **options: Any
    ) -> None:
        if len(devices) != 1:
            raise UsageError(
                f"ParallelLoader was given {len(devices)} devices; tensors are on one here",
                hint="pass [torch_xla.device()]",
            )
        self._loader = MpDeviceLoader(cpu_loader, devices[0], **options)

    def per_device_loader(self, device: Any) -> MpDeviceLoader:
        """Return the loader of the device."""
        return self._loader


class SampleGenerator:
    """Gives the same batch a number of times, in the place of a loader.

    Examples:
        >>> [batch.shape for batch in xm.SampleGenerator(torch.ones(4, 8), sample_count=2)]
        [torch.Size([4, 8]), torch.Size([4, 8])]
    """

    def __init__(self, data: Any, sample_count: int) -> None:
        self._batch = data
        self._count = sample_count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._count):
            yield self._batch
