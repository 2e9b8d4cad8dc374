"""Compile and run a bare module, as replay does: StableHLO in, arrays in, arrays out.

So the recorder runs a program of one device on another of the same kind, compiled there once.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Protocol

import jax
import numpy as np

from snaprt import jaxapi
from snaprt.compile.cached.store import persistent_cache
from snaprt.compile.key import module_digest
from snaprt.compile.obtain import Request, obtain, refuse_objects_of_another_process
from snaprt.errors import CompileError, ExecutionError
from snaprt.graph.artifacts import ModuleArtifacts, proof_of
from snaprt.graph.proof import Proof
from snaprt.host.interruptions import raise_if_interrupted

_Type = tuple[tuple[int, ...], np.dtype]
Index = tuple[tuple[int, int], ...]
"""Where a part begins and ends in each dimension of the whole."""


@dataclass(frozen=True, eq=False)
class LoadedModule:
    """A compiled module, ready to run."""

    parameters: tuple[_Type, ...]  # (shape, dtype) of each parameter of ``main``
    results: tuple[_Type, ...]  # (shape, dtype) of each result of ``main``
    memories: tuple[str | None, ...]  # the kind for each parameter; None: the device's own
    devices: tuple[jaxapi.Device, ...]  # where it runs, in the order of its partitions
    from_cache: bool  # whether the executable came from the persistent cache
    compile_seconds: float  # seconds spent on compiling or loading it
    executable: Any  # XLA's loaded executable

    @property
    def device(self) -> jaxapi.Device:
        """Where it runs, the first of several."""
        return self.devices[0]

    @cached_property
    def proof(self) -> Proof:
        """What tells the executable from others."""
        return proof_of(self.executable)

    @property
    def result_indices(self) -> list[list[Index]]:
        """For each result and device, which part of the whole the device holds."""
        return [
            [
                _normal(jaxapi.places_of_sharding(sharding, shape)[device], shape)
                for device in self.devices
            ]
            for sharding, (shape, _) in zip(self._shardings[1], self.results, strict=True)
        ]

    @cached_property
    def _shardings(self) -> tuple[list[jax.sharding.Sharding], list[jax.sharding.Sharding]]:
        return jaxapi.shardings_of_module(
            self.executable, self.devices, len(self.parameters), len(self.results)
        )

    @cached_property
    def _layouts(self) -> list[Any]:
        parts = [
            (sharding.shard_shape(shape), dtype)
            for sharding, (shape, dtype) in zip(self._shardings[0], self.parameters, strict=True)
        ]
        return jaxapi.layouts_of_parameters(self.executable, parts, self.device)

    def put(
        self, number: int, value: Any, device: jaxapi.Device, *, may_alias: bool | None = None
    ) -> jax.Array:
        """Put a device's part of a parameter there, in the layout and memory that it must have."""
        return jaxapi.put_on_device(
            value,
            device,
            layout=self._layouts[number],
            memory=self.memories[number],
            may_alias=may_alias,
        )

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run once, on one device, and return the results as numpy arrays.

        Args:
            inputs: One array for each parameter, of its shape and dtype.

        Raises:
            ExecutionError: If the device reports an error.
        """
        return [shards[0] for shards in self.run_sharded(inputs)]

    def run_sharded(
        self, inputs: Sequence[np.ndarray | Sequence[np.ndarray]]
    ) -> list[list[np.ndarray]]:
        """Run once and return, for each result, the part of it that each device holds.

        Args:
            inputs: For each parameter the whole array, of its shape and dtype, or the parts of it
                that the devices are to hold, one for each.

        Raises:
            ExecutionError: If the device reports an error.
        """
        try:
            with jaxapi.x64(True):  # or JAX would make 32-bit arrays of 64-bit inputs
                if len(self.devices) == 1:
                    arrays = [
                        self.put(number, value, self.device) for number, value in enumerate(inputs)
                    ]
                else:
                    arrays = [self._spread(number, value) for number, value in enumerate(inputs)]
                results = jaxapi.run_module(self.executable, arrays)
                # NumPy alone ends the process where an execution out of memory left nothing.
                return [
                    [np.asarray(shard.block_until_ready()) for shard in shards]
                    for shards in results
                ]
        except Exception as error:
            where = ", ".join(map(str, self.devices))
            raise ExecutionError(f"the module failed to run on {where}: {error}") from error

    def _spread(self, number: int, value: np.ndarray | Sequence[np.ndarray]) -> jax.Array:
        """Put the parts of a parameter where its sharding has them."""
        shape, sharding = self.parameters[number][0], self._shardings[0][number]
        if isinstance(value, np.ndarray):
            places = jaxapi.places_of_sharding(sharding, shape)
            value = [value[places[device]] for device in self.devices]
        parts = [
            self.put(number, part, device) for part, device in zip(value, self.devices, strict=True)
        ]
        memory = parts[0].sharding.memory_kind
        if memory is not None:
            sharding = sharding.with_memory_kind(memory)
        return jax.make_array_from_single_device_arrays(shape, sharding, parts)


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
    return compile_partitioned(
        stablehlo, devices=[device], name=name, compiler_options=compiler_options
    )


def compile_partitioned(
    stablehlo: bytes | str,
    *,
    devices: Sequence[jaxapi.Device],
    partitioning: jaxapi.Partitioning | None = None,
    name: str = "",
    compiler_options: Mapping[str, str | bool | int | float] | None = None,
) -> LoadedModule:
    """Load the executable of a module for several devices from the cache, or compile it.

    Args:
        stablehlo: As `compile_module` takes it.
        devices: Where it will run, in the order of its partitions.
        partitioning: How XLA was told to spread it when it was recorded.
        name: What the cache's index calls it.
        compiler_options: Values of ``xla_*`` options by name, without dashes.

    Raises:
        CompileError: If the module cannot be read or XLA refuses it or its options.
    """
    started = time.perf_counter()
    try:
        module = jaxapi.parse_module(stablehlo)
        jaxapi.without_scans(module, devices[0].platform)
        calls = jaxapi.custom_calls(module)
        refuse_objects_of_another_process(calls)
        parameters, results = jaxapi.module_signature(module)
        options = jaxapi.compile_options(devices, compiler_options)
        named_options = dict(compiler_options or {})
        if partitioning is not None:
            jaxapi.partition(options, partitioning)
            named_options["partitioning"] = str(partitioning)
        request: Request[Any] = Request(
            name=name,
            kind="module",
            module=module,
            calls=calls,
            devices=devices,
            digest=lambda: module_digest(jaxapi.bytecode_without_locations(module)),
            identity=lambda: {"options": named_options},
            compile=lambda: jaxapi.compile_module(module, devices, options),
            serialize=jaxapi.serialize_module,
            load=lambda payload: jaxapi.load_module(payload, devices),
        )
        obtained = obtain(request, persistent_cache())
    except CompileError:
        raise
    except Exception as error:
        raise_if_interrupted(error)
        where = ", ".join(map(str, devices))
        raise CompileError(
            f"the module failed to compile for {where}: {error}",
            hint=_how_to_compile(str(error), devices[0].platform),
        ) from error
    return LoadedModule(
        parameters=tuple(parameters),
        results=tuple(results),
        memories=tuple(jaxapi.parameter_memories(module, devices[0])),
        devices=tuple(devices),
        from_cache=obtained.from_cache,
        compile_seconds=time.perf_counter() - started,
        executable=obtained.loaded,
    )


_NO_FUNCTION: Final = re.compile(r"No FFI handler registered for (\S+)")


def _how_to_compile(error: str, platform: str) -> str:
    function = _NO_FUNCTION.search(error)
    if function is not None:
        return (
            f"the program calls {function[1]}, which is not there on a {platform}: run it on the "
            "platform that it was lowered for, or import the package that registers the function"
        )
    return (
        "`snaprt inspect --stablehlo` prints the module; another variant (--a, --b), device or "
        "version of jaxlib may compile it"
    )


def _normal(index: Sequence[slice], shape: Sequence[int]) -> Index:
    return tuple(span.indices(size)[:2] for span, size in zip(index, shape, strict=True))


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
        The module's results: for PRNG keys their data, as the module has them. Laid out as usual:
        JAX 0.10.2 moves others to another device and reads them wrong there.

    Raises:
        CompileError: The module cannot be compiled for the device.
    """
    loaded = _loaded(program, device)
    with jaxapi.x64(True):
        arrays = [
            loaded.put(number, jaxapi.data_of_keys(array), device, may_alias=False)
            for number, array in enumerate(inputs)
        ]
        results = [shards[0] for shards in jaxapi.run_module(loaded.executable, arrays)]
        return jaxapi.with_default_layouts(results) or results


@functools.lru_cache(maxsize=16)
def _loaded(program: _Program, device: jaxapi.Device) -> LoadedModule:
    return compile_module(program.artifacts().stablehlo, device=device, name=program.name)
