"""snaprt: run eager JAX code lazily, cache what XLA compiles, record executions and replay them.

``import snaprt`` does not import JAX: a program may still set what JAX reads when it is imported.
Each name here is loaded at its first use.
"""

import contextlib
import importlib
from typing import TYPE_CHECKING

# At once, for they are small: metrics writes what SNAPRT_METRICS_FILE asks for when the process
# ends, and what logs shows may come from anywhere.
from snaprt import errors, logs, metrics

if TYPE_CHECKING:
    from snaprt import cache as cache
    from snaprt import replay as replay
    from snaprt.devices import get_xla_supported_devices as get_xla_supported_devices
    from snaprt.devices import wait_device_ops as wait_device_ops
    from snaprt.devices import xla_device as xla_device
    from snaprt.errors import CompileError as CompileError
    from snaprt.errors import DeviceError as DeviceError
    from snaprt.errors import ExecutionError as ExecutionError
    from snaprt.errors import GraphBreakError as GraphBreakError
    from snaprt.errors import NoCompileError as NoCompileError
    from snaprt.errors import ProcessError as ProcessError
    from snaprt.errors import RankError as RankError
    from snaprt.errors import SnaprtError as SnaprtError
    from snaprt.errors import SnapshotError as SnapshotError
    from snaprt.errors import UsageError as UsageError
    from snaprt.explain.cuts import explain as explain
    from snaprt.explain.no_compile import no_compile as no_compile
    from snaprt.explain.recompiles import CompilationProfiler as CompilationProfiler
    from snaprt.explain.times import compile_times as compile_times
    from snaprt.fleet.loader import MpDeviceLoader as MpDeviceLoader
    from snaprt.fleet.spawn import spawn as spawn
    from snaprt.processes import is_master_ordinal as is_master_ordinal
    from snaprt.processes import master_print as master_print
    from snaprt.random_keys import fork_rng as fork_rng
    from snaprt.random_keys import get_rng_state as get_rng_state
    from snaprt.random_keys import manual_seed as manual_seed
    from snaprt.random_keys import next_key as next_key
    from snaprt.random_keys import set_rng_state as set_rng_state
    from snaprt.runtime.closures import add_step_closure as add_step_closure
    from snaprt.runtime.jit import record as record
    from snaprt.runtime.lazy_scope import disable as disable
    from snaprt.runtime.lazy_scope import eager_mode as eager_mode
    from snaprt.runtime.lazy_scope import enable as enable
    from snaprt.runtime.lazy_scope import is_eager_mode as is_eager_mode
    from snaprt.runtime.lazy_scope import lazy as lazy
    from snaprt.runtime.optimizer import optimizer_step as optimizer_step
    from snaprt.runtime.profile import StepTrace as StepTrace
    from snaprt.runtime.profile import Trace as Trace
    from snaprt.runtime.profile import start_server as start_server
    from snaprt.runtime.step import mark_step as mark_step
    from snaprt.runtime.step import sync as sync
    from snaprt.snapshot.recorder.plan import (
        register_hlo_snapshot_callback as register_hlo_snapshot_callback,
    )
    from snaprt.snapshot.recorder.record import dump_now as dump_now

__version__ = "0.1.0"

__all__ = [
    "CompilationProfiler",
    "CompileError",
    "DeviceError",
    "ExecutionError",
    "GraphBreakError",
    "MpDeviceLoader",
    "NoCompileError",
    "ProcessError",
    "RankError",
    "SnaprtError",
    "SnapshotError",
    "StepTrace",
    "Trace",
    "UsageError",
    "__version__",
    "add_step_closure",
    "compile_times",
    "disable",
    "dump_now",
    "eager_mode",
    "enable",
    "explain",
    "fork_rng",
    "get_rng_state",
    "get_xla_supported_devices",
    "is_eager_mode",
    "is_master_ordinal",
    "lazy",
    "manual_seed",
    "mark_step",
    "master_print",
    "metrics",
    "next_key",
    "no_compile",
    "optimizer_step",
    "record",
    "register_hlo_snapshot_callback",
    "set_rng_state",
    "spawn",
    "start_server",
    "sync",
    "wait_device_ops",
    "xla_device",
]

# Public name -> "module:attribute", or the module that it is. `explain` is the package, which
# can be called: importing any part of it would put it in the place of whatever stood here.
_WHERE = {
    "CompilationProfiler": "snaprt.explain.recompiles:CompilationProfiler",
    "CompileError": "snaprt.errors:CompileError",
    "DeviceError": "snaprt.errors:DeviceError",
    "ExecutionError": "snaprt.errors:ExecutionError",
    "GraphBreakError": "snaprt.errors:GraphBreakError",
    "MpDeviceLoader": "snaprt.fleet.loader:MpDeviceLoader",
    "NoCompileError": "snaprt.errors:NoCompileError",
    "ProcessError": "snaprt.errors:ProcessError",
    "RankError": "snaprt.errors:RankError",
    "SnaprtError": "snaprt.errors:SnaprtError",
    "SnapshotError": "snaprt.errors:SnapshotError",
    "StepTrace": "snaprt.runtime.profile:StepTrace",
    "Trace": "snaprt.runtime.profile:Trace",
    "UsageError": "snaprt.errors:UsageError",
    "add_step_closure": "snaprt.runtime.closures:add_step_closure",
    "cache": "snaprt.cache",
    "compile_times": "snaprt.explain.times:compile_times",
    "disable": "snaprt.runtime.lazy_scope:disable",
    "dump_now": "snaprt.snapshot.recorder.record:dump_now",
    "eager_mode": "snaprt.runtime.lazy_scope:eager_mode",
    "enable": "snaprt.runtime.lazy_scope:enable",
    "explain": "snaprt.explain",
    "fork_rng": "snaprt.random_keys:fork_rng",
    "get_rng_state": "snaprt.random_keys:get_rng_state",
    "get_xla_supported_devices": "snaprt.devices:get_xla_supported_devices",
    "is_eager_mode": "snaprt.runtime.lazy_scope:is_eager_mode",
    "is_master_ordinal": "snaprt.processes:is_master_ordinal",
    "lazy": "snaprt.runtime.lazy_scope:lazy",
    "manual_seed": "snaprt.random_keys:manual_seed",
    "mark_step": "snaprt.runtime.step:mark_step",
    "master_print": "snaprt.processes:master_print",
    "next_key": "snaprt.random_keys:next_key",
    "no_compile": "snaprt.explain.no_compile:no_compile",
    "optimizer_step": "snaprt.runtime.optimizer:optimizer_step",
    "record": "snaprt.runtime.jit:record",
    "register_hlo_snapshot_callback": (
        "snaprt.snapshot.recorder.plan:register_hlo_snapshot_callback"
    ),
    "replay": "snaprt.replay",
    "set_rng_state": "snaprt.random_keys:set_rng_state",
    "spawn": "snaprt.fleet.spawn:spawn",
    "start_server": "snaprt.runtime.profile:start_server",
    "sync": "snaprt.runtime.step:sync",
    "wait_device_ops": "snaprt.devices:wait_device_ops",
    "xla_device": "snaprt.devices:xla_device",
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


with contextlib.suppress(errors.UsageError):  # the first cut raises it
    logs.follow_environment()
