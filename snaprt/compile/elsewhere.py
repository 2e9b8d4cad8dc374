"""Runs a program of one device on another device of the same kind, compiled there once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax

from snaprt import jaxapi
from snaprt.compile.module import LoadedModule, compile_module
from snaprt.graph.artifacts import ModuleArtifacts


class _Program(Protocol):
    @property
    def name(self) -> str: ...

    def artifacts(self) -> ModuleArtifacts: ...

    def __hash__(self) -> int: ...


def run_elsewhere(
    program: _Program, inputs: Sequence[Any], device: jaxapi.Device
) -> list[jax.Array]:
    """Run a program's module on a device; return its results, there.

    Args:
        program: Runs on one device and is pure.
        inputs: What it takes, wherever that lies; it is copied.
        device: Of the kind that the program is compiled for.

    Returns:
        The module's results: for PRNG keys their data, as the module has them.

    Raises:
        CompileError: The module cannot be compiled for the device.
    """
    loaded = _loaded(program, device)
    with jaxapi.x64(True):
        arrays = [
            jax.device_put(jaxapi.data_of_keys(array), device, may_alias=False) for array in inputs
        ]
        return [shards[0] for shards in jaxapi.run_module(loaded.executable, arrays)]


@functools.lru_cache(maxsize=16)
def _loaded(program: _Program, device: jaxapi.Device) -> LoadedModule:
    return compile_module(program.artifacts().stablehlo, device=device, name=program.name)
