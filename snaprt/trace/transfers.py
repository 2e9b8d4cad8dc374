"""Copies host values to the device, and counts it; must not know what they are for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from snaprt import jaxapi, metrics


def send(value: Any) -> jax.Array:
    """Return a host value as an array on the default device."""
    return counted_transfer(lambda: [jaxapi.to_device(value)])[0]


def counted_transfer(copy: Callable[[], list[jax.Array]]) -> list[jax.Array]:
    """Return the arrays that ``copy`` makes, and count their bytes and the time."""
    with metrics.timed("TransferToDeviceTime"):
        arrays = copy()
    metrics.metric_add("OutboundData", sum(array.nbytes for array in arrays))
    return arrays
