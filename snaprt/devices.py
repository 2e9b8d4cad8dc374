"""The devices of this process, under the names of PyTorch/XLA."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from snaprt import jaxapi
from snaprt.errors import DeviceError, ExecutionError


def xla_device(n: int | None = None) -> Any:
    """Return a `jax.Device` of this process, for `jax.device_put` or `jax.default_device`.

    You need not put arrays on a device: JAX creates them on the default one.

    Args:
        n: Its index in `get_xla_supported_devices`; None for JAX's default device.

    Raises:
        DeviceError: There is no device with this index.

    Examples:
        >>> x = jax.device_put(np.ones(3), snaprt.xla_device(0))
        >>> x.devices() == {snaprt.xla_device(0)}
        True
    """
    default = jaxapi.default_device()
    if n is None and default is not None and not isinstance(default, str):
        return default
    devices = jax.local_devices(backend=default if isinstance(default, str) and n is None else None)
    number = n or 0
    if number not in range(len(devices)):
        raise DeviceError(
            f"no device {n!r}: this process has {len(devices)}",
            hint="snaprt.get_xla_supported_devices() lists them, starting at 0",
        )
    return devices[number]


def get_xla_supported_devices(
    devkind: str | None = None, max_devices: int | None = None
) -> list[Any]:
    """Return the devices of this process, each a `jax.Device`.

    Args:
        devkind: ``cpu``, ``gpu`` (or ``cuda``, ``rocm``) or ``tpu``, in upper or lower case; None
            for the kind that JAX prefers here.
        max_devices: The maximum number of devices to return; None for all.

    Returns:
        The devices in order of their numbers; an empty list if there are none of that kind.

    Examples:
        >>> snaprt.get_xla_supported_devices("cpu", max_devices=1)
        [CpuDevice(id=0)]
        >>> snaprt.get_xla_supported_devices("TPU")
        []
    """
    try:
        devices = jax.local_devices(backend=devkind.lower() if devkind else None)
    except RuntimeError:  # so JAX says that there are none
        return []
    return list(devices[:max_devices])


def wait_device_ops(devices: Iterable[Any] | Any | None = None) -> None:
    """Wait until all work that was started on some devices has finished.

    This covers every live array, and every effect such as `jax.debug.print`. Work that is only
    recorded has not started; `mark_step` starts it.

    Args:
        devices: A `jax.Device` or several; None for all devices of this process.

    Raises:
        ExecutionError: Some of the work has failed.
        DeviceError: An argument is not a `jax.Device`.

    Examples:
        >>> y = jnp.ones(1000).sum()  # may still run
        >>> snaprt.wait_device_ops()
    """
    if devices is None:
        chosen = None
    else:
        # The names that PyTorch/XLA has would match nothing, and nothing would be waited for.
        is_several = isinstance(devices, Iterable) and not isinstance(devices, str)
        chosen = set(devices) if is_several else {devices}
        for device in chosen:
            if not isinstance(device, jax.Device):
                raise DeviceError(
                    f"{device!r} is not a jax.Device",
                    hint="pass a result of snaprt.xla_device(n), or nothing for all devices",
                )
    try:
        with jaxapi.evaluating():
            for array in jax.live_arrays():
                if chosen is None or chosen & array.devices():
                    _wait_for(array)
            jax.effects_barrier()
    except jax.errors.JaxRuntimeError as error:
        raise ExecutionError(f"work on a device failed: {error}") from error


def _wait_for(array: jax.Array) -> None:
    try:
        array.block_until_ready()
    except RuntimeError:
        if not array.is_deleted():  # another thread may give it away meanwhile
            raise
