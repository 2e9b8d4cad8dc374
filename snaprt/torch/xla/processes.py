"""Processes under the names of PyTorch/XLA: there is one, and it has all tensors.

So there is a process group of one for ``torch.distributed``, and what copies a module has only it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

import snaprt
from snaprt.errors import UsageError
from snaprt.processes import place_in_job
from snaprt.torch.tensors import Tensor
from snaprt.torch.xla.absent import refuse

is_master_ordinal = snaprt.is_master_ordinal
master_print = snaprt.master_print

# The methods of a process group, those of torch 2.14 included.
_IN_PLACE: Final = (
    *("allreduce", "allreduce_coalesced", "barrier", "broadcast", "monitored_barrier", "reduce"),
)
_COPYING: Final = (
    *("_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_to_all_single"),
    *("all_gather_single_coalesced", "allgather", "allgather_coalesced", "alltoall"),
    *("allgather_into_tensor_coalesced", "alltoall_base", "gather", "gather_single"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("reduce_scatter_tensor_coalesced", "scatter"),
)

REDUCE_SUM = "sum"
REDUCE_MUL = "mul"
REDUCE_AND = "and"
REDUCE_OR = "or"
REDUCE_MIN = "min"
REDUCE_MAX = "max"


def check_alone(name: str) -> None:
    """Check that this is not one of several processes, which would train apart.

    Raises:
        UsageError: It is.
    """
    place = place_in_job()
    if place.processes > 1:
        raise UsageError(
            f"{name} was called in rank {place.rank} of {place.processes} processes; PyTorch code "
            "trains in one process here, and gradients are not summed across processes",
            hint="start one process; several devices need JAX's shardings "
            "(docs/how-to/many-processes.md)",
        )


def world_size() -> int:
    """Return how many processes train together: 1.

    Raises:
        UsageError: This is one of several.

    Examples:
        >>> xm.world_size()
        1
    """
    check_alone("world_size")
    return 1


def xrt_world_size(defval: int = 1) -> int:
    """Return `world_size`.

    Examples:
        >>> xm.xrt_world_size()
        1
    """
    return world_size()


def global_ordinal() -> int:
    """Return the number of this process among those that train together: 0.

    Examples:
        >>> xm.global_ordinal()
        0
    """
    return world_size() - 1


def get_ordinal(defval: int = 0) -> int:
    """Return `global_ordinal`.

    Examples:
        >>> xm.get_ordinal()
        0
    """
    return global_ordinal()


def get_local_ordinal(defval: int = 0) -> int:
    """Return `global_ordinal`.

    Examples:
        >>> xm.get_local_ordinal()
        0
    """
    return global_ordinal()


local_ordinal = process_index = host_index = global_ordinal
process_count = local_process_count = global_device_count = world_size
global_runtime_device_count = addressable_runtime_device_count = world_size
addressable_device_count = local_device_count = world_size


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    start_method: str = "spawn",
    debug_single_process: bool = False,
) -> None:
    """Call ``fn(0, *args)`` in this process.

    Raises:
        UsageError: This is one of several processes.

    Examples:
        >>> xm.launch(lambda index, rate: print(index, rate), args=(0.1,))
        0 0.1
    """
    check_alone("launch")
    fn(0, *args)


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> None:
    """Call ``fn(0, *args)`` in this process.

    Raises:
        UsageError: More processes are asked for.

    Examples:
        >>> xm.spawn(lambda index, rate: print(index, rate), args=(0.1,))
        0 0.1
    """
    if nprocs not in (None, 1):
        raise UsageError(
            f"xmp.spawn was asked for {nprocs} processes; PyTorch code trains in one process here",
            hint="pass nprocs=1, or leave it out",
        )
    launch(fn, args)


def all_reduce(
    reduce_type: str,
    inputs: Any,
    scale: float = 1.0,
    groups: Any = None,
    pin_layout: bool = True,
) -> Any:
    """Return a tensor times ``scale``; tensors of a list are multiplied in place.

    Raises:
        UsageError: This is one of several processes.

    Examples:
        >>> xm.all_reduce(xm.REDUCE_SUM, torch.ones(2), scale=0.5)
        tensor([0.5000, 0.5000])
    """
    check_alone("all_reduce")
    if isinstance(inputs, torch.Tensor):
        return inputs * scale
    if scale != 1.0:
        with torch.no_grad():
            for tensor in inputs:
                tensor.mul_(scale)
    return None


def all_gather(
    value: torch.Tensor, dim: int = 0, groups: Any = None, output: Any = None, **_: Any
) -> torch.Tensor:
    """Return the tensor: there are no others.

    Raises:
        UsageError: This is one of several processes, or ``output`` is given.

    Examples:
        >>> xm.all_gather(torch.ones(2))
        tensor([1., 1.])
    """
    check_alone("all_gather")
    refuse("output", output, "use the result")
    return value


def collective_broadcast(tensors: Any, root_ordinal: int = 0, **_: Any) -> None:
    """Do nothing: the tensors are those of the first process.

    Raises:
        UsageError: This is one of several processes, or ``root_ordinal`` is not 0.

    Examples:
        >>> xm.collective_broadcast([torch.ones(2)])
    """
    check_alone("collective_broadcast")
    if root_ordinal != 0:
        raise UsageError(f"there is no process {root_ordinal} to broadcast from, only the first")


def broadcast_master_param(model: torch.nn.Module) -> None:
    """Do nothing: the parameters are those of the first process.

    Raises:
        UsageError: This is one of several processes.

    Examples:
        >>> xm.broadcast_master_param(torch.nn.Linear(2, 1))
    """
    check_alone("broadcast_master_param")


def mesh_reduce(tag: str, data: Any, reduce_fn: Callable[[list[Any]], Any]) -> Any:
    """Return ``reduce_fn([data])``.

    Raises:
        UsageError: This is one of several processes.

    Examples:
        >>> xm.mesh_reduce("accuracy", 97.5, lambda values: sum(values) / len(values))
        97.5
    """
    check_alone("mesh_reduce")
    return reduce_fn([data])


def rendezvous(tag: str, payload: bytes = b"", replicas: Collection[int] = ()) -> list[bytes]:
    """Return the payloads of all processes: of this one.

    Raises:
        UsageError: This is one of several processes.

    Examples:
        >>> xm.rendezvous("loaded", b"ready")
        [b'ready']
    """
    check_alone("rendezvous")
    return [payload]


def do_on_ordinals(
    target: Callable[..., Any], data: Any = (), ordinals: Iterable[int] = (0,)
) -> None:
    """Call ``target(*data)`` if this process is among ``ordinals``.

    Examples:
        >>> xm.do_on_ordinals(print, ("on the first process",), ordinals=(0,))
        on the first process
    """
    if global_ordinal() in ordinals:
        target(*data)


def save(
    data: Any, file_or_path: str | Path | IO[bytes], master_only: bool = True,
    global_master: bool = False,
) -> None:  # fmt: skip
    """Save with `torch.save`, with tensors of the CPU, which plain PyTorch can load.

    Args:
        data: What to save.
        file_or_path: Where to.
        master_only: Whether only the first process saves.
        global_master: Whether that is the first of the job, or of the machine.

    Examples:
        >>> xm.save({"w": torch.ones(2, device=xm.xla_device())}, "params.pt")
        >>> torch.load("params.pt")
        {'w': tensor([1., 1.])}
    """
    if not master_only or is_master_ordinal(local=not global_master):
        torch.save(data, file_or_path)


def load(path: str | Path) -> Any:
    """Load what `save` saved: tensors of the CPU.

    Examples:
        >>> xm.save(torch.ones(2, device=xm.xla_device()), "ones.pt")
        >>> xm.load("ones.pt")
        tensor([1., 1.])
    """
    return torch.load(path)


class MpModelWrapper:
    """Holds a module until it is moved to the device.

    Examples:
        >>> wrapped = xm.MpModelWrapper(torch.nn.Linear(2, 1))
        >>> model = wrapped.to(xm.xla_device())
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def to(self, device: Any) -> torch.nn.Module:
        """Return the module on the device."""
        return self._model.to(device)


class MpSerialExecutor:
    """Calls functions one process at a time: there is one.

    Examples:
        >>> xm.MpSerialExecutor().run(lambda: "the data set")
        'the data set'
    """

    def run(self, fn: Callable[[], Any]) -> Any:
        """Return ``fn()``."""
        return fn()


@functools.cache
def register_process_group() -> None:
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
    return _group_of_one()(rank, size)


@functools.cache
def _group_of_one() -> type[Any]:
    """Return the class of a process group whose tensors may be on any device.

    What a process gets of all processes is what it gives itself: nothing where it is written to
    the same tensors, and a copy where it is written to others.
    """

    class Done(dist.Work):
        def __init__(self, result: Any) -> None:
            super().__init__()
            self._result = result

        def wait(self, timeout: Any = None) -> bool:
            return True

        def is_completed(self) -> bool:
            return True

        def is_success(self) -> bool:
            return True

        def result(self) -> Any:
            return self._result

        def get_future(self) -> Any:
            future: Any = torch.futures.Future()
            future.set_result(self._result)
            return future

    def same(group: Any, tensors: Any = (), *_: Any, **__: Any) -> Any:
        return Done(tensors)

    def copied(group: Any, outputs: Any, inputs: Any, *_: Any) -> Any:
        with torch.no_grad(), torch._C._EnableTorchFunction():
            for output, given in zip(*map(pytree.tree_leaves, (outputs, inputs)), strict=True):
                output.copy_(given.reshape(output.shape))
        return Done(outputs)

    members = {**dict.fromkeys(_IN_PLACE, same), **dict.fromkeys(_COPYING, copied)}
    return type("GroupOfOne", (dist.ProcessGroup,), {**members, "getBackendName": _name})


def _name(group: Any) -> str:
    return "xla"


def _meet(url: str, timeout: Any = None, **_: Any) -> Iterator[tuple[Any, int, int]]:
    distributed: Any = dist
    yield distributed.HashStore(), 0, 1


class _Alone(torch.nn.Module):
    """A module that would copy another to several devices or processes: it calls the one there is.

    Its parameters have the names that they have in PyTorch: ``module.weight``.
    """

    module: torch.nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing: gradients are never added over processes."""
        yield

    join = no_sync

    def register_comm_hook(self, *_: Any) -> None:
        """Refuse a function that would add gradients.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "nothing would call the hook: gradients are not summed across processes here",
            hint="leave the call out, or register hooks of the parameters",
        )


@functools.cache
def hold_copies() -> None:
    """Let `DistributedDataParallel` and `DataParallel` of a module on the device just call it."""
    for kind in (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel):
        kind.__init__ = _holding(kind.__init__)  # type: ignore[method-assign]


def _holding(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(  # noqa: N807
        self: torch.nn.Module, module: torch.nn.Module, *args: Any, **kwargs: Any
    ) -> None:
        if not any(type(parameter) is Tensor for parameter in module.parameters()):
            original(self, module, *args, **kwargs)
            return
        kind: Any = type(self)
        check_alone(kind.__name__)
        torch.nn.Module.__init__(self)
        self.module = module
        self.__class__ = _alone(kind)

    return __init__


@functools.cache
def _alone(kind: Any) -> Any:
    return type(kind.__name__, (_Alone, kind), {"__module__": kind.__module__})
