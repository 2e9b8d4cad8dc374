"""Loaders under the names of PyTorch/XLA: batches on the device, each with a step of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

from snaprt.errors import UsageError
from snaprt.runtime.step import mark_step
from snaprt.torch.xla.absent import refuse
from snaprt.torch.xla.placement import send_cpu_data_to_device


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
