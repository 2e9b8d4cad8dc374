"""snaprt: run eager JAX code lazily, cache what XLA compiles, record executions and replay them.

``import snaprt`` does not import JAX: a program may still set what JAX reads when it is imported.
Each name here is loaded at its first use.
"""

import importlib
from typing import TYPE_CHECKING

# At once, for it is small and writes what SNAPRT_METRICS_FILE asks for when the process ends.
from snaprt import metrics

if TYPE_CHECKING:
    from snaprt import cache as cache
    from snaprt import replay as replay
    from snaprt.errors import CompileError as CompileError
    from snaprt.errors import DeviceError as DeviceError
    from snaprt.errors import ExecutionError as ExecutionError
    from snaprt.errors import GraphBreakError as GraphBreakError
    from snaprt.errors import SnaprtError as SnaprtError
    from snaprt.errors import SnapshotError as SnapshotError
    from snaprt.errors import UsageError as UsageError
    from snaprt.explain.times import compile_times as compile_times
    from snaprt.jit.scope import record as record
    from snaprt.lazy.scope import disable as disable
    from snaprt.lazy.scope import enable as enable
    from snaprt.lazy.scope import lazy as lazy
    from snaprt.lazy.step import mark_step as mark_step
    from snaprt.snapshot.policy import (
        register_hlo_snapshot_callback as register_hlo_snapshot_callback,
    )
    from snaprt.snapshot.record import dump_now as dump_now

    from snaprt.lazy.scope import eager_mode as eager_mode
__version__ = "0.1.0"
    from snaprt.lazy.scope import is_eager_mode as is_eager_mode

__all__ = [
    "CompileError",
    "DeviceError",
    "ExecutionError",
    "GraphBreakError",
    "SnaprtError",
    "SnapshotError",
    "UsageError",
    "__version__",
    "compile_times",
    "disable",
    "dump_now",
    "enable",
    "lazy",
    "mark_step",
    "metrics",
    "record",
    "register_hlo_snapshot_callback",
]

# Public name -> "module:attribute", or the module that it is. `lazy` is the package, which can be
# called (see there): importing any part of it would put it in the place of whatever stood here.
_WHERE = {
    "CompileError": "snaprt.errors:CompileError",
    "DeviceError": "snaprt.errors:DeviceError",
    "ExecutionError": "snaprt.errors:ExecutionError",
    "GraphBreakError": "snaprt.errors:GraphBreakError",
    "SnaprtError": "snaprt.errors:SnaprtError",
    "SnapshotError": "snaprt.errors:SnapshotError",
    "eager_mode",
    "UsageError": "snaprt.errors:UsageError",
    "explain",
    "fork_rng",
    "get_rng_state",
    "get_xla_supported_devices",
    "is_eager_mode",
    "is_master_ordinal",
    "cache": "snaprt.cache",
    "compile_times": "snaprt.explain.times:compile_times",
    "disable": "snaprt.lazy.scope:disable",
    "dump_now": "snaprt.snapshot.record:dump_now",
    "enable": "snaprt.lazy.scope:enable",
    "lazy": "snaprt.lazy",
    "mark_step": "snaprt.lazy.step:mark_step",
    "record": "snaprt.jit.scope:record",
    "register_hlo_snapshot_callback": "snaprt.snapshot.policy:register_hlo_snapshot_callback",
    "replay": "snaprt.replay",
}

if not TYPE_CHECKING:  # Type checkers would take every name for one that is here.

    def __getattr__(name: str) -> object:
        where = _WHERE.get(name)
        if where is None:
            raise AttributeError(f"module 'snaprt' has no attribute {name!r}")
        module_name, _, attribute = where.partition(":")
        module = importlib.import_module(module_name)
        value = globals()[name] = getattr(module, attribute) if attribute else module
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
    "eager_mode": "snaprt.lazy.scope:eager_mode",
    "explain": "snaprt.explain",
    "fork_rng": "snaprt.random_keys:fork_rng",
    "get_rng_state": "snaprt.random_keys:get_rng_state",
    "get_xla_supported_devices": "snaprt.devices:get_xla_supported_devices",
    "is_eager_mode": "snaprt.lazy.scope:is_eager_mode",
    "is_master_ordinal": "snaprt.processes:is_master_ordinal",
