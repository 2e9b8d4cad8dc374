"""PyTorch/XLA's names for seeds, precision, the device, the cache, metrics and profiles."""

from __future__ import annotations

import atexit
import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import torch

from snaprt import metrics
from snaprt.errors import UsageError
from snaprt.host.whole_files import named_path
from snaprt.runtime import profile
from snaprt.torch.xla import placement


def manual_seed(seed: int, device: Any = None) -> None:
    """Call `torch.manual_seed`: the device draws its random numbers from PyTorch's generator.

    Examples:
        >>> xm.manual_seed(7)
        >>> xm.get_rng_state()
        7
    """
    torch.manual_seed(seed)


set_rng_state = manual_seed


def get_rng_state(device: Any = None) -> int:
    """Return the seed; `torch.get_rng_state` also knows how many numbers have been drawn.

    Examples:
        >>> xm.set_rng_state(7)
        >>> xm.get_rng_state()
        7
    """
    return torch.initial_seed()


@contextmanager
def fork_rng(device: Any = None, enabled: bool = True) -> Iterator[None]:
    """Draw random numbers inside, and continue afterwards as if none had been drawn.

    Examples:
        >>> xm.manual_seed(7)
        >>> with xm.fork_rng():
        ...     noise = torch.rand(4)
        >>> bool((torch.rand(4) == noise).all())
        True
    """
    with torch.random.fork_rng(devices=[], enabled=enabled):
        yield


def autocast(
    device: Any = None, enabled: bool = True, dtype: torch.dtype = torch.bfloat16, **_: Any
) -> Any:
    """Return the scope of `torch.autocast` for the device, in bfloat16.

    Examples:
        >>> x = torch.ones(2, 2, device=xm.xla_device())
        >>> with xm.autocast(xm.xla_device()):
        ...     y = x @ x
        >>> y.dtype
        torch.bfloat16
    """
    return torch.autocast("cpu", dtype=dtype, enabled=enabled)


def set_mat_mul_precision(precision: str) -> None:
    """Set the precision of matrix products: ``default``, ``high`` or ``highest``.

    Examples:
        >>> xm.set_mat_mul_precision("highest")
        >>> xm.get_mat_mul_precision()
        'highest'
        >>> xm.set_mat_mul_precision("default")
    """
    jax.config.update("jax_default_matmul_precision", precision)


def get_mat_mul_precision() -> str:
    """Return the precision of matrix products.

    Examples:
        >>> xm.get_mat_mul_precision()
        'default'
    """
    config: Any = jax.config
    return config.jax_default_matmul_precision or "default"


def initialize_cache(path: str, readonly: bool = False) -> None:
    """Name the directory of snaprt's compile cache, as ``SNAPRT_CACHE_DIR`` does.

    Examples:
        >>> xm.initialize_cache("compiled")  # before anything is compiled
    """
    os.environ["SNAPRT_CACHE_DIR"] = str(named_path(path))
    if readonly:
        os.environ["SNAPRT_CACHE_MODE"] = "read-only"


def set_device_type(pjrt_device: str) -> None:
    """Check that the device is of a kind.

    Raises:
        UsageError: It is of another; JAX chooses it when it starts.

    Examples:
        >>> xm.set_device_type(xm.device_type())
    """
    if pjrt_device.upper() != placement.device_type():
        raise UsageError(
            f"the device is a {placement.device_type()}, not a {pjrt_device}",
            hint=f"set JAX_PLATFORMS={pjrt_device.lower()} before the program starts",
        )


def using_pjrt() -> bool:
    """Return True: JAX runs on PJRT.

    Examples:
        >>> xm.using_pjrt()
        True
    """
    return True


def is_bf16_supported() -> bool:
    """Return True: XLA computes in bfloat16 on every device.

    Examples:
        >>> xm.is_bf16_supported()
        True
    """
    return True


def is_spmd() -> bool:
    """Return False: tensors are not sharded.

    Examples:
        >>> xm.is_spmd()
        False
    """
    return False


metrics_report = metrics.metrics_report
short_metrics_report = metrics.short_metrics_report
counter_names = metrics.counter_names
counter_value = metrics.counter_value
metric_names = metrics.metric_names
metric_data = metrics.metric_data
clear_all = clear_counters = clear_metrics = metrics.clear_all

start_trace = jax.profiler.start_trace
stop_trace = jax.profiler.stop_trace
start_server = profile.start_server
Trace = profile.Trace
StepTrace = profile.StepTrace


def trace_detached(service_addr: str, logdir: str, duration_ms: int = 1000, **_: Any) -> None:
    """Profile this program for a time, or until it ends, while it goes on.

    Args:
        service_addr: Where the profiler listens: ``localhost:PORT``.
        logdir: The directory for the profile.
        duration_ms: For how long, in milliseconds.
        _: Options of PyTorch/XLA's profiler, which are ignored.

    Raises:
        UsageError: The address is that of another machine.

    Examples:
        >>> xm.trace_detached("localhost:9012", "profile", duration_ms=10)
    """
    if service_addr.rpartition(":")[0] not in ("", "localhost", "127.0.0.1", "[::1]"):
        raise UsageError(
            f"trace_detached profiles this program, and not the one at {service_addr}",
            hint="run python -m jax.collect_profile PORT MS there",
        )
    jax.profiler.start_trace(logdir)

    @functools.cache
    def stop() -> None:
        jax.profiler.stop_trace()

    timer = threading.Timer(duration_ms / 1000, stop)
    timer.daemon = True
    timer.start()
    atexit.register(stop)


def executed_fallback_ops() -> list[str]:
    """Return the operations that fell back to the CPU: none does.

    Examples:
        >>> xm.executed_fallback_ops()
        []
    """
    return []
