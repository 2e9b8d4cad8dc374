"""Why a graph was cut: the table of reads.

It knows names and counters, nothing of graphs.
"""

from __future__ import annotations

from snaprt import metrics

#: Attributes of a lazy array that need its value, and the cause that is counted for each.
READ_METHODS: dict[str, str] = {
    "__array__": "array",
    "__bool__": "bool",
    "__buffer__": "array",  # Python 3.12
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
