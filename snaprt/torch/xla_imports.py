"""Imports of torch_xla by a program that does not have it: they find `snaprt.torch.xla`.

Imports neither torch nor JAX: the program does, when it has set what they are to find.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any, Final

from snaprt.host import after_import

_OURS: Final = "snaprt.torch.xla"
_NAMES: Final = (
    *("_XLAC", "amp", "amp.autocast_mode", "amp.syncfree", "backends", "core", "core.functions"),
    *("core.xla_env_vars", "core.xla_model", "debug", "debug.metrics", "debug.profiler"),
    *("distributed", "distributed.data_parallel", "distributed.fsdp", "distributed.fsdp.wrap"),
    *("distributed.parallel_loader", "distributed.spmd", "distributed.spmd.xla_sharding"),
    *("distributed.xla_backend", "distributed.xla_multiprocessing"),
    *("distributed.zero_redundancy_optimizer", "experimental", "experimental.assume_pure"),
    *("experimental.custom_kernel", "experimental.eager", "experimental.fori_loop"),
    *("experimental.pjrt_backend", "experimental.scan", "experimental.scan_layers"),
    *("experimental.spmd_fully_sharded_data_parallel", "runtime", "stablehlo", "test"),
    *("test.test_utils", "utils", "utils.checkpoint", "utils.serialization", "utils.utils"),
)

MODULES: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("torch_xla", *[f"torch_xla.{name}" for name in _NAMES]), _OURS),
        "torch_xla.amp.syncfree": "torch.optim",
    }
)
"""The modules of torch_xla that can be imported, and where their names come from."""

# Names that libraries use although they begin with an underscore.
_RENAMED: Final = {
    "_fetch_gradients": "fetch_gradients",
    "_maybe_convert_to_cpu": "convert_to_cpu",
    "_xla_get_tensor_id": "get_tensor_id",
    "_xla_metrics_report": "metrics_report",
}

_is_provided = False


def provide(*, is_lazy: bool = True) -> None:
    """Let the program use the device ``xla`` and import torch_xla, without PyTorch/XLA.

    To be called before the program runs, in its thread. Processes that it spawns can, too.

    Args:
        is_lazy: Whether the program runs lazily.
    """
    global _is_provided
    _is_provided = True
    _set_up(is_lazy=is_lazy)


def _set_up(*, is_lazy: bool) -> None:
    sys.meta_path.insert(0, _Finder())
    after_import.call_after_import("torch", _name_device)
    hand_on = functools.partial(_hand_on, _Provided(is_lazy))
    after_import.call_after_import("multiprocessing.spawn", hand_on)


class _Provided:
    """What a spawned process is sent before it imports the program: it does as this one."""

    def __init__(self, is_lazy: bool) -> None:
        self._is_lazy = is_lazy

    def __reduce__(self) -> Any:
        return _provide_in_spawned, (self._is_lazy,)


def _provide_in_spawned(is_lazy: bool) -> None:
    """Provide all in a process whose threads run lazily once they ask for the device."""
    global _is_provided
    _is_provided = not is_lazy
    _set_up(is_lazy=is_lazy)


def _hand_on(provided: _Provided) -> None:
    """Send it with what multiprocessing sends. Checked with Python 3.11."""
    from multiprocessing import spawn

    original = spawn.get_preparation_data

    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**original(name), "snaprt": provided}

    spawn.get_preparation_data = get_preparation_data


def is_provided() -> bool:
    """Return whether ``snaprt run --torch`` runs the program, which says what is lazy."""
    return _is_provided


def installed_version() -> str | None:
    """Return the version of the real torch_xla, if it is installed."""
    try:
        return importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError:
        return None


def _name_device() -> None:
    kind = os.environ.get("PJRT_DEVICE", "").lower()
    if kind in ("cpu", "cuda", "tpu"):
        os.environ.setdefault("JAX_PLATFORMS", kind)
    import jax  # noqa: F401 - before anything of snaprt that would, so that it is whole by then

    from snaprt.torch.xla.placement import name_device_xla

    name_device_xla()


class _Finder:
    """Finds the modules of torch_xla, and makes each."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in MODULES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        import torch  # noqa: F401 - before the module is there for all to see, PyTorch included

        return _Module(spec.name, f"The names of {spec.name}, from {MODULES[spec.name]}.")

    def exec_module(self, module: ModuleType) -> None:
        import torch

        from snaprt.torch.xla import processes

        module.__dict__["__version__"] = f"{torch.__version__.partition('+')[0]}+snaprt"
        processes.register_process_group()


class _Module(ModuleType):
    """A module whose names are those of another, and of the modules below it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if f"{self.__name__}.{name}" in MODULES:
            return importlib.import_module(f"{self.__name__}.{name}")
        target = importlib.import_module(MODULES[self.__name__])
        try:
            return getattr(target, _RENAMED.get(name, name))
        except AttributeError:
            raise AttributeError(
                f"snaprt has no {self.__name__}.{name} (see docs/how-to/coming-from-pytorch-xla.md)"
            ) from None
