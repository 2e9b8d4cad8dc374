"""The lazy array: what the user holds in place of a `jax.Array` while its value is not computed.

With the table of what reads its value, and the copies between host and device.
"""

from __future__ import annotations

import operator
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import jax
import numpy as np

from snaprt import jaxapi, metrics
from snaprt.errors import CompileError, ExecutionError
from snaprt.host.after_import import call_after_import
from snaprt.trace.failures import failed_later
from snaprt.trace.recording import DataHandle, Recording
from snaprt.trace.trie import Result

#: Attributes of a lazy array that need its value, and the cause that is counted for each.
READ_METHODS: dict[str, str] = {
    "__array__": "array",
    "__bool__": "bool",
    "__buffer__": "array",  # Python 3.12
    "__bytes__": "tobytes",
    "__complex__": "complex",
    "__dlpack__": "dlpack",
    "__dlpack_device__": "dlpack",
    "__float__": "float",
    "__format__": "format",
    "__hex__": "hex",
    "__index__": "index",
    "__int__": "int",
    "__oct__": "oct",
    "__reduce__": "pickle",
    "__repr__": "repr",
    "__str__": "repr",
    "addressable_data": "addressable_data",
    "block_until_ready": "block_until_ready",
    "clone": "clone",
    "copy_to_host_async": "device_get",
    "delete": "delete",
    "is_deleted": "is_deleted",
    "is_ready": "is_ready",
    "item": "item",
    "on_device_size_in_bytes": "on_device_size_in_bytes",
    "tobytes": "tobytes",
    "tolist": "tolist",
    "unsafe_buffer_pointer": "unsafe_buffer_pointer",
    "unsafe_raw_buffer": "unsafe_buffer_pointer",  # JAX 0.12
}

#: Of these methods, those for which Python does more than call the value's own: a random key is no
#: number, and the bytes of an integer are as many zeros.
_ASKED_BY: dict[str, Callable[[Any], Any]] = {
    "__bytes__": bytes,
    "__complex__": complex,
    "__float__": float,
    "__index__": operator.index,
    "__int__": int,
}

#: Properties of a lazy array that need its value.
READ_PROPERTIES: dict[str, str] = {
    "addressable_shards": "addressable_shards",
    "format": "layout",
    "global_shards": "global_shards",
    "layout": "layout",
    "traceback": "traceback",
}

#: Of these methods, those after which nobody holds the value or a view of it.
HANDING_NOTHING_OUT = frozenset(
    {"block_until_ready", "is_deleted", "is_ready", "on_device_size_in_bytes"}
)

#: The causes above that copy the value to the host.
HOST_TRANSFERS = frozenset(
    {"array", "bool", "complex", "float", "format", "hex", "index", "int", "item", "oct"}
    | {"pickle", "repr", "tobytes", "tolist"}
)


def count_read(cause: str) -> None:
    """Count one read that switched to the host, as ``host::CAUSE``."""
    metrics.counter_add(f"host::{cause}")


def send(value: Any) -> jax.Array:
    """Return a host value as an array on the default device."""
    return counted_transfer(lambda: [jaxapi.to_device(value)])[0]


def counted_transfer(copy: Callable[[], list[jax.Array]]) -> list[jax.Array]:
    """Return the arrays that ``copy`` makes, and count their bytes and the time."""
    with metrics.timed("TransferToDeviceTime"):
        arrays = copy()
    metrics.metric_add("OutboundData", sum(array.nbytes for array in arrays))
    return arrays


class LazyArray(jaxapi.ArrayOfTrace):
    """An array whose value is computed when a step is marked, or when it is read.

    Shape, dtype and weak type are known at once, and asking for them costs nothing. Whatever needs
    the value (`print`, `float`, `bool`, `numpy.asarray`, `.item()`, `.sharding`, ...) computes
    what it needs, and no more; afterwards reading is free.
    """

    __slots__ = ("__dict__", "_handle", "_origin", "_recording", "_result", "_value")

    # ``_origin`` is the executable that computed the value, or the error in its place.
    _handle: DataHandle
    _origin: Any

    def __init__(self, trace: Any, recording: Recording | None, result: Result) -> None:
        self._trace = trace
        self.aval = result.aval
        self._recording = recording
        self._result: Result | None = result
        self._value: jax.Array | None = None

    @classmethod
    def failed(cls, trace: Any, aval: Any, error: BaseException) -> LazyArray:
        """Return an array whose value can never be computed because of ``error``."""
        array = cls.__new__(cls)
        array._trace = trace
        array.aval = aval
        array._value = None
        array.fail(error)
        return array

    def materialize(self, cause: str) -> jax.Array:
        """Return the value, computing it first if need be; from then on it may have other holders.

        Args:
            cause: What needs the value, as counted under ``host::CAUSE``.

        Raises:
            ExecutionError: If the graph that computes it fails, or failed before.
        """
        value = self.compute(cause)
        self._handle.exposed = True
        return value

    def compute(self, cause: str) -> jax.Array:
        """Return the value as `materialize`, for a caller that hands it to nobody."""
        value = self._value
        if value is None:
            count_read(cause)
            self._trace.materialize(self, cause)
            value = self._value
            assert value is not None
        return value

    def full_lower(self) -> jax.Array:
        """Return the value: plain eager JAX calls this on every operand that is a tracer."""
        return self.materialize("eager")

    def to_concrete_value(self) -> jax.Array | None:
        """Return the value if it is truly needed, else ``None``, be it there already or not."""
        cause = jaxapi.demanded_by()
        if cause is None:
            return None
        self._trace.interruptions += 1  # what is recorded now may depend on the value
        return self.materialize(cause)

    def settle(self, value: jax.Array, handle: DataHandle, origin: Any) -> None:
        """Take the value that the executable ``origin`` computed, and let go of the recording."""
        self._handle = handle
        self._origin = origin
        self._value = value
        self._recording = self._result = None

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` at every read from now on."""
        self._origin = error
        self._recording = self._result = None

    def has_failed(self) -> bool:
        """Return whether the value can never be computed."""
        return self._recording is None and self._value is None

    @property
    def nbytes(self) -> int:
        """The size of the value in bytes; known without computing it."""
        return self.size * self.dtype.itemsize

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """Where the value lies. On one device that is mostly known without computing it."""
        result = self._result
        stored = None if result is None else result.known_sharding()
        return self.compute("sharding").sharding if stored is None else stored

    @property
    def committed(self) -> bool:
        """Whether the value is pinned to its devices; known without computing it."""
        result = self._result
        return (
            self.compute("committed").committed
            if result is None
            else result.point.placement.committed
        )

    _committed = committed

    @property
    def weak_type(self) -> bool:
        """Whether the type gives way to that of another operand; known without computing it."""
        return self.aval.weak_type

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
        """Return the devices the value lies on; known without computing it."""
        result = self._result
        devices = () if result is None else result.point.placement.devices
        return set(devices) or self.sharding.device_set

    def __iter__(self) -> Iterator[Any]:
        if not self.ndim:
            return super().__iter__()  # an error
        return self._elements()  # nothing is computed before one is asked for

    def _elements(self) -> Iterator[Any]:
        if self.committed and len(self.devices()) > 1:
            value = self.materialize("iter")
            with jaxapi.evaluating():
                elements = list(value)  # as eager JAX: from the host
            yield from elements
        else:
            yield from super().__iter__()

    def platform(self) -> str:
        """Return the kind of the devices that the value lies on, such as ``"cpu"``."""
        return next(iter(self.devices())).platform

    def _short_repr(self) -> str:
        """Return the text of the value, which is part of that of JAX's tracers of derivatives."""
        return str(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the value: whoever loads it needs no snaprt."""
        return self.materialize("pickle").__reduce_ex__(protocol)


def read_to_host(array: LazyArray) -> np.ndarray | jax.Array:
    """Return what `jax.device_get` does: a numpy array, but random keys as they are."""
    if jaxapi.is_extended_dtype(array.dtype):
        return array.materialize("device_get")
    return np.asarray(array)


def read_for_executable(array: LazyArray) -> jax.Array:
    """Return the value, for an executable that JAX's ahead-of-time API compiled."""
    return array.materialize("compiled")


def _buffer(self: LazyArray, flags: int) -> Any:
    """Compute the value and return its buffer.

    NumPy asks for that first, and goes on to ``__array__`` whatever it raises. The error of an
    effect, which is raised once, would be lost.
    """
    try:
        return _buffer_of_value(self, flags)
    except (CompileError, ExecutionError) as error:
        self._trace.unseen_error = (self, error)
        raise


def _array(self: LazyArray, *args: Any, **kwargs: Any) -> Any:
    """Compute the value and return it as a numpy array."""
    array, error = self._trace.unseen_error
    self._trace.unseen_error = (None, None)
    if array is self:
        raise error
    return _array_of_value(self, *args, **kwargs)


def _reading_method(name: str, cause: str) -> Callable[..., Any]:
    ask = _ASKED_BY.get(name)

    def read(self: LazyArray, *args: Any, **kwargs: Any) -> Any:
        value = (self.compute if name in HANDING_NOTHING_OUT else self.materialize)(cause)
        started = time.perf_counter_ns()
        try:
            with jaxapi.evaluating():
                result = getattr(value, name)(*args, **kwargs) if ask is None else ask(value)
        except jax.errors.JaxRuntimeError as error:
            if _is_computed(value):  # it cannot be had in this form, such as int4 through DLPack
                raise
            raise _failure(self, error) from error
        if cause in HOST_TRANSFERS:
            metrics.metric_add("TransferFromDeviceTime", time.perf_counter_ns() - started)
            metrics.metric_add("InboundData", self.nbytes)
        return self if result is value else result

    read.__name__ = name
    read.__doc__ = f"Compute the value and return its ``{name}``."
    return read


def wait_for(arrays: Sequence[LazyArray]) -> None:
    """Wait until devices have computed what has run of some arrays.

    Raises:
        ExecutionError: A program failed after the call that started it had returned.
    """
    try:
        jax.block_until_ready([array._value for array in arrays])
    except jax.errors.JaxRuntimeError:
        for array in arrays:
            try:
                jax.block_until_ready(array._value)
            except jax.errors.JaxRuntimeError as error:
                raise _failure(array, error) from error
        raise


def _is_computed(value: jax.Array) -> bool:
    """Return whether the device did not find out after the call had returned that it fails."""
    try:
        jax.block_until_ready(value)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _failure(array: LazyArray, error: Exception) -> ExecutionError:
    """Return the error of a device that found out after the call had returned."""
    origin = array._origin
    graph = "a graph" if origin is None else f"graph {origin.name}.{origin.graph_id}"
    return failed_later(error, graph)


def _reading_property(name: str, cause: str) -> property:
    def read(self: LazyArray) -> Any:
        return getattr(self.materialize(cause), name)

    read.__doc__ = f"Compute the value and return its ``{name}``."
    return property(read)


for _name, _cause in READ_METHODS.items():
    setattr(LazyArray, _name, _reading_method(_name, _cause))
_buffer_of_value = LazyArray.__dict__["__buffer__"]
_array_of_value = LazyArray.__dict__["__array__"]
for _name, _method in {"__buffer__": _buffer, "__array__": _array}.items():
    setattr(LazyArray, _name, _method)
for _name, _cause in READ_PROPERTIES.items():
    setattr(LazyArray, _name, _reading_property(_name, _cause))


#: Modules that compare ``type(array)`` of two arrays; all they do with ``type`` is to call it.
_COMPARING = ("equinox._serialisation", "equinox._tree")


def type_of_value(value: object) -> type:
    """Return the type of an object, of a lazy array that of its value."""
    return value.__class__ if type(value) is LazyArray else type(value)


@cache
def answer_for_exact_types() -> None:
    """Let the modules that compare types of arrays take lazy ones for others, once imported."""
    for name in _COMPARING:
        call_after_import(name, partial(_shadow, name))


def _shadow(name: str) -> None:
    vars(sys.modules[name])["type"] = type_of_value
