"""Compile and run a bare module, as replay does: StableHLO in, arrays in, arrays out.

It goes through the same persistent cache as recorded programs, and knows nothing of snapshots.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from snaprt_cache.misses import record_miss

from snaprt import jaxapi, metrics
from snaprt.errors import CompileError, ExecutionError
from snaprt.execute.compile import entry_metadata
from snaprt.execute.key import module_key
from snaprt.execute.once import compile_once, load_entry
from snaprt.execute.store import persistent_cache
from snaprt.execute.summary import summarise

_Type = tuple[tuple[int, ...], np.dtype]


@dataclass(frozen=True, eq=False)
class LoadedModule:
    """A compiled module, ready to run on one device.

    Attributes:
        parameters: (shape, dtype) of each parameter of ``main``.
        results: (shape, dtype) of each result of ``main``.
        device: Where it runs.
        from_cache: Whether the executable came from the persistent cache.
        compile_seconds: Seconds spent on compiling or loading it.
        executable: XLA's loaded executable.
    """

    parameters: tuple[_Type, ...]
    results: tuple[_Type, ...]
    device: jaxapi.Device
    from_cache: bool
    compile_seconds: float
    executable: Any

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run once and return the results as numpy arrays.

        Args:
            inputs: One array for each parameter, of its shape and dtype.

        Raises:
            ExecutionError: If the device reports an error.
        """
        try:
            with jaxapi.x64(True):  # or JAX would make 32-bit arrays of 64-bit inputs
                arrays = [jax.device_put(array, self.device) for array in inputs]
                results = jaxapi.run_module(self.executable, arrays)
                return [np.asarray(result) for result in results]
        except Exception as error:
            raise ExecutionError(f"the module failed while it ran on {self.device}: {error}") from (
                error
            )


def compile_module(
    stablehlo: bytes | str,
    *,
    device: jaxapi.Device,
    name: str = "",
    compiler_options: Mapping[str, str | bool | int | float] | None = None,
) -> LoadedModule:
    """Load a module's executable from the persistent cache, or compile it.

    Args:
        stablehlo: StableHLO as text, MLIR bytecode or a portable artifact, for one device.
        device: Where it will run.
        name: What the cache's index calls it.
        compiler_options: Values of ``xla_*`` options by name, without dashes.

    Raises:
        CompileError: If the module cannot be read or XLA refuses it or its options.
    """
    started = time.perf_counter()
    try:
        module = jaxapi.parse_module(stablehlo)
        parameters, results = jaxapi.module_signature(module)
        options = jaxapi.compile_options([device], compiler_options)
        executable, from_cache = _load_or_compile(module, device, name, compiler_options, options)
    except Exception as error:
        raise CompileError(f"the module cannot be compiled for {device}: {error}") from error
    return LoadedModule(
        parameters=tuple(parameters),
        results=tuple(results),
        device=device,
        from_cache=from_cache,
        compile_seconds=time.perf_counter() - started,
        executable=executable,
    )


def _load_or_compile(
    module: Any,
    device: jaxapi.Device,
    name: str,
    named_options: Mapping[str, Any] | None,
    options: Any,
) -> tuple[Any, bool]:
    def compile_here() -> Any:
        with metrics.timed("CompileTime"):
            return jaxapi.compile_module(module, device, options)

    cache = persistent_cache()
    if cache is None:
        return compile_here(), False
    stablehlo = jaxapi.bytecode_without_locations(module)
    key = module_key(stablehlo, [device], kind="module", options=named_options, folder=cache.folder)

    def load() -> Any:
        entry = cache.get(key)
        if entry is None:
            return None
        return load_entry(cache, key, entry, lambda content: jaxapi.load_module(content, device))

    def compile_and_put() -> tuple[Any, bool]:
        record_miss(cache, key, name)
        summary = summarise(module)
        started = time.perf_counter()
        executable = compile_here()
        seconds = time.perf_counter() - started
        payload = jaxapi.serialize_module(executable)
        told = {**entry_metadata(name, "module", seconds, device), "summary": summary}
        return executable, cache.put(key, payload, told)

    executable = load()
    if executable is not None:
        return executable, True
    return compile_once(cache, key, load, compile_and_put)[:2]
