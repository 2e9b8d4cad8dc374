"""snaprt: run eager JAX code lazily, cache what XLA compiles, record executions and replay them."""

import importlib
from types import ModuleType

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
from snaprt.snapshot.policy import register_hlo_snapshot_callback

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
    "register_hlo_snapshot_callback",
]

# Facades that are imported at their first use: most programs need neither.
_FACADES = ("cache", "replay")


def __getattr__(name: str) -> ModuleType:
    if name in _FACADES:
        return importlib.import_module(f"snaprt.{name}")
    raise AttributeError(f"module 'snaprt' has no attribute {name!r}")
