"""The lazy array: what the user holds in place of a `jax.Array` while its value is not computed.

It knows its node and how to ask for its value; how values are computed is handed to it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from snaprt import jaxapi, metrics
from snaprt.errors import ExecutionError
from snaprt.lazy.breaks import HOST_TRANSFERS, READ_METHODS, READ_PROPERTIES, count_read
from snaprt.lazy.graph import Node


class LazyArray(jaxapi.Tracer):
    """An array whose value is computed when a step is marked, or when it is read.

    Shape, dtype and weak type are known at once, and asking for them costs nothing. Whatever needs
    the value (`print`, `float`, `bool`, `numpy.asarray`, `.item()`, `.sharding`, ...) computes
    what it needs, and no more; afterwards reading is free.
    """

    __slots__ = ("_index", "_node", "_origin", "_value")

    def __init__(self, trace: Any, aval: Any, node: Node, index: int) -> None:
        self._value: jax.Array | None = None
        self._trace = trace  # type: ignore[misc]  # a slot of the base
        self.aval = aval  # type: ignore[misc]
        self._node: Node | None = node
        self._index = index
        self._origin: Any = None

    def materialise(self, cause: str) -> jax.Array:
        """Return the value, computing it first if need be.

        Args:
            cause: What needs the value, as counted under ``host::CAUSE``.

        Raises:
            ExecutionError: If the graph that computes it fails, or failed before.
        """
        value = self._value
        if value is None:
            count_read(cause)
            self._trace.materialise(self, cause)
            value = self._value
            assert value is not None
        return value

    def full_lower(self) -> jax.Array:
        """Return the value: plain eager JAX calls this on every operand that is a tracer."""
        return self.materialise("eager")

    def to_concrete_value(self) -> jax.Array | None:
        """Return the value if it is there already or truly needed, else ``None``."""
        if self._value is None:
            cause = jaxapi.demanded_by()
            return None if cause is None else self.materialise(cause)
        return self._value

    def settle(self, value: jax.Array, origin: Any) -> None:
        """Take the value that the executable ``origin`` computes, and let go of the graph."""
        self._value = value
        self._origin = origin
        self._node = None
        metrics.counter_add("CreateDataHandles")

    def __del__(self, _finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._value is not None and not _finalizing():
            metrics.counter_add("DestroyDataHandles")

    @property
    def nbytes(self) -> int:
        """The size of the value in bytes; known without computing it."""
        return self.size * self.dtype.itemsize

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """Where the value lies. On one device that is known without computing it."""
        known = None if self._node is None else self._node.placement.known_sharding()
        return self.materialise("sharding").sharding if known is None else known

    @property
    def committed(self) -> bool:
        """Whether the value is pinned to its devices; known without computing it."""
        return (
            self.materialise("committed").committed
            if self._node is None
            else self._node.placement.committed
        )

    @property
    def device(self) -> Any:
        """The device of the value, or its sharding where it lies on several."""
        sharding = self.sharding
        return next(iter(sharding.device_set)) if len(sharding.device_set) == 1 else sharding

    @property
    def is_fully_addressable(self) -> bool:
        """Whether this process can read all of the value."""
        return self.sharding.is_fully_addressable

    @property
    def is_fully_replicated(self) -> bool:
        """Whether every device has all of the value."""
        return self.sharding.is_fully_replicated

    def devices(self) -> set[jaxapi.Device]:
        """Return the devices the value lies on."""
        return self.sharding.device_set

    def __copy__(self) -> LazyArray:
        return self

    def __deepcopy__(self, memo: Any) -> LazyArray:
        return self


def read_to_host(array: LazyArray) -> np.ndarray:
    """Return the value as a numpy array, as `jax.device_get` does."""
    return np.asarray(array)


def _reading_method(name: str, cause: str) -> Callable[..., Any]:
    def read(self: LazyArray, *args: Any, **kwargs: Any) -> Any:
        value = self.materialise(cause)
        started = time.perf_counter_ns()
        try:
            with jaxapi.evaluating():
                result = getattr(value, name)(*args, **kwargs)
        except jax.errors.JaxRuntimeError as error:  # the device found out after the call returned
            raise _failure(self, error) from error
        if cause in HOST_TRANSFERS:
            metrics.metric_add("TransferFromDeviceTime", time.perf_counter_ns() - started)
            metrics.metric_add("InboundData", self.nbytes)
        return self if result is value else result

    read.__name__ = name
    read.__doc__ = f"Compute the value and return its ``{name}``."
    return read


def _failure(array: LazyArray, error: Exception) -> ExecutionError:
    origin = array._origin
    graph = "a graph" if origin is None else f"graph {origin.name}.{origin.graph_id}"
    return ExecutionError(
        f"{graph} failed while it ran: {error}",
        hint="the arrays it was to compute cannot be used any more",
    )


def _reading_property(name: str, cause: str) -> property:
    def read(self: LazyArray) -> Any:
        return getattr(self.materialise(cause), name)

    read.__doc__ = f"Compute the value and return its ``{name}``."
    return property(read)


for _name, _cause in READ_METHODS.items():
    setattr(LazyArray, _name, _reading_method(_name, _cause))
for _name, _cause in READ_PROPERTIES.items():
    setattr(LazyArray, _name, _reading_property(_name, _cause))
