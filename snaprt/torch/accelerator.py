"""What `torch.accelerator` and the module of the device, `torch.jax`, tell and do.

Scripts that ask for the machine's accelerator get the device, because it is registered as one. C++
would look for streams and allocators that XLA keeps to itself, and fails or crashes without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import jax
import torch

import snaprt
from snaprt.errors import UsageError
from snaprt.torch.tensors import DTYPES

_STATISTICS: Final = {
    "memory_allocated": "bytes_in_use",
    "memory_reserved": "bytes_in_use",
    "max_memory_allocated": "peak_bytes_in_use",
    "max_memory_reserved": "peak_bytes_in_use",
}
"""Which number of JAX's each function of PyTorch returns; XLA reserves no more than it uses."""

_NOTHING: Final = (
    *("empty_cache", "empty_host_cache", "reset_peak_memory_stats"),
    "reset_accumulated_memory_stats",
)
"""What XLA does by itself, or does not do."""


def jax_device() -> Any:
    """Return the device of JAX that tensors are on."""
    return jax.local_devices()[0]


def memory_stats(device: Any = None) -> dict[str, int]:
    """Return what JAX knows of the device's memory, in bytes: nothing on a CPU."""
    check_index(device)
    return dict(jax_device().memory_stats() or {})


def check_index(device: Any) -> None:
    """Check that a device, if one is named, is the only one that there is.

    Raises:
        UsageError: It is another one.
    """
    index = torch.device(device).index if isinstance(device, str | torch.device) else device
    if index not in (None, 0):
        raise UsageError(
            f"there is no device of index {index}: PyTorch tensors are on one device of JAX",
            hint="use index 0, and JAX's shardings for several devices",
        )


def synchronize(device: Any = None) -> None:
    """Run what is recorded, and wait until all that was started has finished."""
    check_index(device)
    snaprt.mark_step(wait=True)


def _memory_info(device: Any = None) -> tuple[int, int]:
    """Return the bytes that are free, and all that there are."""
    stats = memory_stats(device)
    limit = stats.get("bytes_limit", 0)
    return limit - stats.get("bytes_in_use", 0) if limit else 0, limit


def _statistic(name: str) -> Callable[..., int]:
    return lambda device=None: memory_stats(device).get(name, 0)


_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "synchronize": synchronize,
    "set_device_index": check_index,
    "set_device_idx": check_index,
    "get_device_capability": lambda device=None: {"supported_dtypes": set(DTYPES.values())},
    "get_memory_info": _memory_info,
    "memory_stats": memory_stats,
    # Keys are drawn from the generator of the CPU, whose state is all that there is.
    "get_rng_state": lambda device=None: torch.empty(0, dtype=torch.uint8),
    "set_rng_state": lambda state, device=None: None,
    **{name: _statistic(of_jax) for name, of_jax in _STATISTICS.items()},
    **dict.fromkeys(_NOTHING, lambda device=None: None),
}


def answer() -> None:
    """Let these functions answer, in `torch.accelerator` and in the module of the device.

    Checked with torch 2.12.1, 2.13.0 and 2.14.1; not all have all of them in `torch.accelerator`.
    """
    accelerator, module = torch.accelerator, torch.get_device_module("jax")
    for name, function in _FUNCTIONS.items():
        if hasattr(accelerator, name):
            setattr(accelerator, name, function)
        setattr(module, name, function)
    module.set_device = check_index
