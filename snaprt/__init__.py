"""snaprt: run eager JAX code lazily, cache what XLA compiles, record executions and replay them."""

from snaprt import metrics
from snaprt.errors import (
    CompileError,
    DeviceError,
    ExecutionError,
    SnaprtError,
    SnapshotError,
    UsageError,
)
from snaprt.lazy.scope import disable, enable, lazy
from snaprt.lazy.step import mark_step

__version__ = "0.1.0"

__all__ = [
    "CompileError",
    "DeviceError",
    "ExecutionError",
    "SnaprtError",
    "SnapshotError",
    "UsageError",
    "__version__",
    "disable",
    "enable",
    "lazy",
    "mark_step",
    "metrics",
]
