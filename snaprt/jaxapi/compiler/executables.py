"""Compiles modules; loads, stores and runs executables; must not know jitted functions."""

from __future__ import annotations

import copyreg
from collections.abc import Sequence
from typing import Any

import jax
from jax._src import layout as _layout
from jax.experimental import serialize_executable

from snaprt.jaxapi.compiler.custom_calls import custom_calls, make_available
from snaprt.jaxapi.devices import Device, device_list

# JAX 0.12 pickles the sentinel `AutoLayout` as a new object, which equals nothing: the abstract
# values of a loaded executable's outputs then equal no others, and what uses them is traced anew.
if hasattr(_layout, "AutoLayoutSingleton"):
    copyreg.pickle(_layout.AutoLayoutSingleton, lambda _: "AutoLayout")


def load_compiled(
    payload: bytes, arguments: int, results: int, devices: Sequence[Device]
) -> jax.stages.Compiled:
    """Load what `serialize_compiled` returned, for calls with flat arguments and results."""
    return serialize_executable.deserialize_and_load(
        payload,
        jax.tree.structure(((0,) * arguments, {})),
        jax.tree.structure([0] * results),
        backend=devices[0].client,
        execution_devices=list(devices),
    )


def serialize_compiled(compiled: jax.stages.Compiled) -> bytes:
    """Return the executable as bytes; raises where it holds what cannot be stored."""
    return serialize_executable.serialize(compiled)[0]


def compile_module(module: Any, devices: Sequence[Device], options: Any) -> Any:
    """Compile an MLIR module for ``devices`` and load it, with the functions that it calls."""
    make_available(custom_calls(module).targets, devices[0].platform)
    return devices[0].client.compile_and_load(module, device_list(devices), options)


def load_module(payload: bytes, devices: Sequence[Device]) -> Any:
    """Load an executable that `serialize_module` stored."""
    return devices[0].client.deserialize_executable(payload, device_list(devices))


def serialize_module(executable: Any) -> bytes:
    """Return a loaded executable as bytes."""
    return executable.client.serialize_executable(executable)


def run_module(executable: Any, inputs: Sequence[jax.Array]) -> list[list[jax.Array]]:
    """Run a loaded executable on arrays that live on its devices; return each result's shards."""
    results = executable.execute_sharded(list(inputs))
    return results.disassemble_into_single_device_arrays()


def loaded_executable(compiled: Any) -> Any:
    """Return XLA's executable below a `jax.stages.Compiled`, None where there is none."""
    runtime = getattr(compiled, "runtime_executable", None)
    return None if runtime is None else runtime()
