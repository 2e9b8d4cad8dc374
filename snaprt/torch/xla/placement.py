"""The device under the names of PyTorch/XLA, and the modules and files that are moved to it."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import snaprt
from snaprt.errors import UsageError
from snaprt.torch import accelerator, modules, scope, tensors, traced, xla_imports
from snaprt.torch.lowering import device_names
from snaprt.torch.tensors import Tensor
from snaprt.torch.xla.absent import refuse
from snaprt.torch.xla.processes import hold_copies

_LISTS_OF_DEVICES: Final = frozenset(
    f"_get_{kind}_supported_devices" for kind in ("capturable", "foreach_kernels", "fused_kernels")
)
_KINDS: Final = {"gpu": "CUDA", "cuda": "CUDA", "rocm": "ROCM"}


class _Thread(threading.local):
    """Whether this thread has been made lazy."""

    is_lazy = False


_thread = _Thread()


def device(index: int | None = None) -> torch.device:
    """Return the device, and let this thread run lazily from here on, as PyTorch/XLA does.

    Under ``snaprt run --torch``, ``--no-lazy`` keeps it eager.

    Raises:
        UsageError: ``index`` is neither None nor 0: tensors of PyTorch are on one device.

    Examples:
        >>> x = torch.ones(2, device=xm.device())
        >>> (x + 1).cpu()
        tensor([2., 2.])
    """
    if index not in (None, 0):
        raise UsageError(
            f"there is no device xla:{index}: PyTorch tensors are on one device of JAX",
            hint="use torch_xla.device(), and JAX's shardings for several devices",
        )
    if not xla_imports.is_provided() and not _thread.is_lazy:
        _thread.is_lazy = True
        snaprt.enable()
    return scope.device()


def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """Return `device`; ``devkind`` has no meaning, as in PyTorch/XLA.

    Examples:
        >>> torch.ones(2).to(xm.xla_device()).sum().item()
        2.0
    """
    return device(n)


def devices() -> list[torch.device]:
    """Return the devices of this process that tensors can be on: one.

    Examples:
        >>> len(xm.devices())
        1
    """
    return [scope.device()]


def get_xla_supported_devices(max_devices: int | None = None) -> list[str]:
    """Return the names of `devices`.

    Examples:
        >>> len(xm.get_xla_supported_devices())
        1
    """
    return [str(each) for each in devices()][:max_devices]


def device_count() -> int:
    """Return how many devices tensors can be on: 1.

    Examples:
        >>> xm.device_count()
        1
    """
    return len(devices())


def device_type() -> str:
    """Return the kind of the device: ``CPU``, ``CUDA``, ``TPU``.

    Examples:
        >>> xm.device_type() in ("CPU", "CUDA", "TPU")
        True
    """
    platform: str = accelerator.jax_device().platform
    return _KINDS.get(platform, platform.upper())


def xla_device_hw(device: Any = None) -> str:
    """Return `device_type`.

    Examples:
        >>> xm.xla_device_hw(xm.xla_device()) == xm.device_type()
        True
    """
    return device_type()


def set_replication(device: Any, devices: Sequence[Any]) -> None:
    """Check that there is one device.

    Raises:
        UsageError: There are several.

    Examples:
        >>> xm.set_replication(xm.xla_device(), xm.get_xla_supported_devices())
    """
    if len(devices) > 1:
        raise UsageError(
            f"set_replication was given {len(devices)} devices; tensors are on one here",
            hint="pass xm.get_xla_supported_devices()",
        )


def real_devices() -> list[str]:
    """Return the device as PyTorch/XLA names the hardware: ``CPU:0``.

    Examples:
        >>> xm.real_devices() == [f"{xm.device_type()}:0"]
        True
    """
    return [f"{device_type()}:{accelerator.jax_device().id}"]


def xla_real_devices(devices: Iterable[Any] | None = None) -> list[str]:
    """Return `real_devices`.

    Examples:
        >>> xm.xla_real_devices([xm.xla_device()]) == xm.real_devices()
        True
    """
    return real_devices()


def get_memory_info(device: Any = None) -> dict[str, int]:
    """Return the bytes of the device's memory that are used, that there are, and the peak.

    Raises:
        UsageError: JAX does not know them, as on the CPU.

    Examples:
        >>> if xm.device_type() != "CPU":
        ...     print(xm.get_memory_info(xm.xla_device())["bytes_used"])
    """
    stats = accelerator.memory_stats()
    if not stats:
        raise UsageError(f"JAX does not know the memory of a {device_type()}")
    return {
        "bytes_used": stats["bytes_in_use"],
        "bytes_limit": stats.get("bytes_limit", 0),
        "peak_bytes_used": stats.get("peak_bytes_in_use", 0),
    }


def wait_device_ops(devices: Any = ()) -> None:
    """Wait until all work that was started has finished.

    Examples:
        >>> y = torch.ones(2, device=xm.xla_device()) * 2
        >>> xm.mark_step()
        >>> xm.wait_device_ops()
    """
    snaprt.wait_device_ops()


def is_xla_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on the device.

    Examples:
        >>> xm.is_xla_tensor(torch.ones(2, device=xm.xla_device())), xm.is_xla_tensor(torch.ones(2))
        (True, False)
    """
    return isinstance(tensor, Tensor)


def get_tensor_id(tensor: torch.Tensor) -> int:
    """Return a number that no other tensor has as long as this one exists.

    Examples:
        >>> x = torch.ones(2, device=xm.xla_device())
        >>> xm.get_tensor_id(x) == xm.get_tensor_id(x.detach())
        False
    """
    return id(tensor)


def convert_to_cpu(data: Any, convert: bool = True) -> Any:
    """Return data with its tensors on the CPU, or as it is.

    Examples:
        >>> xm.convert_to_cpu({"x": torch.ones(2, device=xm.xla_device())})
        {'x': tensor([1., 1.])}
    """
    return pytree.tree_map_only(torch.Tensor, lambda t: t.cpu(), data) if convert else data


def send_cpu_data_to_device(data: Any, device: Any, input_sharding: Any = None) -> Any:
    """Return data with its tensors on the device.

    Raises:
        UsageError: A sharding is given.

    Examples:
        >>> batch = xm.send_cpu_data_to_device({"x": torch.ones(2)}, xm.xla_device())
        >>> xm.is_xla_tensor(batch["x"])
        True
    """
    refuse("input_sharding", input_sharding, "one device holds each tensor here")
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), data)


@functools.cache
def follow_moves() -> None:
    """Let a module that is moved to the device run as compiled operations, as `wrap` does.

    A module that is moved back is a plain one again. Files are read to the CPU.
    """
    scope.device()
    module: Any = torch.nn.Module
    module.to = _moving(module.to)
    module.cpu = _moving_back(module.cpu)
    torch.serialization.register_package(5, lambda _: None, _restore)
    hold_copies()


def _moving(original: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    @functools.wraps(original)
    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        where, dtype = _target(*args, **kwargs)
        if where is None or traced.is_tracing():
            return original(self, *args, **kwargs)
        if not device_names.means_ours(where):
            _unwrap(self)
            return original(self, *args, **kwargs)
        if dtype is not None:
            original(self, dtype)
        return modules.wrap(self)

    return to


def _moving_back(original: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    @functools.wraps(original)
    def cpu(self: torch.nn.Module) -> torch.nn.Module:
        _unwrap(self)
        return original(self)

    return cpu


def _target(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """Return the device and dtype that the arguments of `nn.Module.to` name."""
    tensor = kwargs.get("tensor", args[0] if args else None)
    if isinstance(tensor, torch.Tensor):
        return tensor.device, tensor.dtype
    core: Any = torch._C
    where, dtype, *_ = core._nn._parse_to(*args, **kwargs)
    return where, dtype


def _unwrap(module: torch.nn.Module) -> None:
    for part in [*module.modules()]:
        if hasattr(type(part), "_snaprt_plain"):
            modules.unwrap(part)


def _restore(storage: Any, location: str) -> Any:
    """Return a storage as it is, on the CPU, for ``torch.load(file, map_location="xla")``."""
    return storage if device_names.means_ours(location) else None


class _Xla(TorchFunctionMode):
    """Lets ``xla`` name the device in every function and method of PyTorch."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = device_names.renamed(func, args, kwargs or {})
        return func(*args, **kwargs)


def name_device_xla() -> None:
    """Let ``xla`` name the device: in this thread, and in all that start from here on."""
    follow_moves()
    tensors.set_device("xla")
    library: Any = torch
    library.xla = library.jax  # the module of the device, which checkpoints ask for by its type
    library.set_default_device = _setting_default(torch.set_default_device)
    for place in [each for name, each in sys.modules.items() if name.startswith("torch.optim.")]:
        for name in {*vars(place)} & _LISTS_OF_DEVICES:
            setattr(place, name, _also_for_xla(getattr(place, name)))
    thread: Any = threading.Thread
    thread.start = _starting(thread.start)
    _Xla().__enter__()


def _also_for_xla(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """Return what lists the devices that a kind of optimizer works on: it knows ours as ``jax``."""
    return lambda *args, **options: [*original(*args, **options), "xla"]


def _starting(original: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    """Return `Thread.start`, which names the device in the thread: modes belong to threads."""

    @functools.wraps(original)
    def start(self: threading.Thread) -> None:
        run = self.run

        def named() -> None:
            vars(self).pop("run", None)  # it refers to the thread
            with _Xla():
                run()

        self.run = named  # type: ignore[method-assign]
        original(self)

    return start


def _setting_default(original: Callable[..., None]) -> Callable[..., None]:
    """Return `torch.set_default_device`, whose device no mode sees."""

    @functools.wraps(original)
    def set_default_device(device: Any) -> None:
        original("jax" if device_names.means_ours(device) else device)

    return set_default_device
