"""Turns arrays, shardings and a module into the contents of a snapshot file.

What it does may take its time: it runs in the writer's thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from snaprt import jaxapi
from snaprt.graph.artifacts import ModuleArtifacts
from snaprt.hlo.wire import fields
from snaprt.snapshot.format import schema
from snaprt.snapshot.format.schema import ShardingRecord

_STACK_FRAME_INDEX = 17  # of HloModuleProto
_FILE_NAMES, _FUNCTION_NAMES, _FILE_LOCATIONS = 1, 2, 3  # of StackFrameIndexProto
_FILE_NAME_ID, _FUNCTION_NAME_ID, _LINE = 1, 2, 3  # of FileLocation; ids count from 1


@functools.lru_cache(maxsize=8)  # every execution of a program has the same
def source_locations(hlo: bytes, limit: int = 500) -> tuple[str, ...]:
    """Return ``file:line (function)`` for each line that a module's operations came from.

    Args:
        hlo: A serialized ``xla.HloModuleProto``.
        limit: How many locations to return at most.

    Returns:
        Each location once, in the module's order; none where the module has none or cannot be read.
    """
    try:
        index = next(
            value
            for number, value in fields(memoryview(hlo))
            if number == _STACK_FRAME_INDEX and not isinstance(value, int)
        )
        parts: dict[int, list[memoryview]] = {}
        for number, part in fields(index):
            if not isinstance(part, int):
                parts.setdefault(number, []).append(part)
        names = [
            [str(name, "utf-8", "replace") for name in parts.get(kind, ())]
            for kind in (_FILE_NAMES, _FUNCTION_NAMES)
        ]
        locations = [_location(part, *names) for part in parts.get(_FILE_LOCATIONS, ())]
    except (IndexError, ValueError, StopIteration):
        return ()
    return tuple(dict.fromkeys(locations))[:limit]


def _location(location: memoryview, files: Sequence[str], functions: Sequence[str]) -> str:
    numbers = {number: value for number, value in fields(location) if isinstance(value, int)}
    file = files[numbers[_FILE_NAME_ID] - 1] if _FILE_NAME_ID in numbers else "?"
    line = numbers.get(_LINE, 0)
    if _FUNCTION_NAME_ID not in numbers:
        return f"{file}:{line}"
    return f"{file}:{line} ({functions[numbers[_FUNCTION_NAME_ID] - 1]})"


@functools.lru_cache(maxsize=1024)
def describe_sharding(sharding: jax.sharding.Sharding, ndim: int) -> ShardingRecord:
    """Return a sharding of an array of ``ndim`` dimensions as the manifest holds it."""
    is_named = isinstance(sharding, jax.sharding.NamedSharding)
    return ShardingRecord(
        kind=type(sharding).__name__,
        devices=tuple(device.id for device in jaxapi.devices_of_sharding(sharding)),
        memory_kind=sharding.memory_kind or "",
        hlo=jaxapi.hlo_sharding_text(sharding, ndim),
        **(_of_mesh(sharding) if is_named else {}),
    )


def _of_mesh(sharding: Any) -> dict[str, Any]:
    mesh = sharding.mesh
    return {
        "axis_names": tuple(map(str, mesh.axis_names)),
        "axis_sizes": tuple(mesh.axis_sizes),
        "axis_types": tuple(kind.name for kind in mesh.axis_types),
        "spec": tuple(map(_axes, sharding.spec.partitions)),
    }


def _axes(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes that one entry of a ``PartitionSpec`` names."""
    if entry is None:
        return ()
    return tuple(map(str, entry)) if isinstance(entry, tuple) else (str(entry),)


def index_of(index: Sequence[slice], shape: Sequence[int]) -> schema.Index:
    """Return where a part begins and ends in each dimension of an array of ``shape``.

    Args:
        index: The part's slices; dimensions that it does not have are taken whole, and those that
            it has more (of the data of PRNG keys) are left out.
        shape: Of the whole array.
    """
    slices = [*index, *[slice(None)] * len(shape)][: len(shape)]
    return tuple(span.indices(size)[:2] for span, size in zip(slices, shape, strict=True))


def gather(
    execution: schema.ExecutionRecord,
    artifacts: Callable[[], ModuleArtifacts],
    names: Sequence[str],
    arrays: Sequence[Any],
    device: jaxapi.Device,
    fetch: Callable[[int], np.ndarray] | None = None,
) -> schema.Contents:
    """Gather what goes into a file.

    Args:
        execution: Which execution it is; its source locations are filled in here.
        artifacts: Returns the module; called once, and may lower it again.
        names: The names of ``arrays`` in the file.
        arrays: The inputs or the outputs, as `array_content` takes them.
        device: The device whose parts of them are wanted.
        fetch: Returns the values of one, by its number; by default, as `array_content` does.
    """
    forms = artifacts()
    module = schema.ModuleBytes(forms.stablehlo, forms.hlo, forms.compile_options)
    execution = schema.changed(execution, source_locations=source_locations(module.hlo))
    shardings: dict[schema.ShardingRecord, int] = {}
    contents = [
        array_content(
            name,
            array,
            device,
            shardings,
            None if fetch is None else functools.partial(fetch, number),
        )
        for number, (name, array) in enumerate(zip(names, arrays, strict=True))
    ]
    return schema.Contents(
        execution,
        module,
        contents,
        shardings=tuple(shardings),
        proof=forms.proof,
        trace_error=forms.trace_error,
    )


def array_content(
    name: str,
    array: Any,
    device: jaxapi.Device,
    shardings: dict[schema.ShardingRecord, int] | None = None,
    fetch: Callable[[], np.ndarray] | None = None,
) -> schema.ArrayContent:
    """Describe one array, or the part of it that lies on ``device``, for a snapshot.

    Args:
        name: Its name in the file.
        array: A ``jax.Array``, PRNG keys included, or a NumPy array.
        device: Where the part lies; an array that has none there is taken whole.
        shardings: The file's shardings with their numbers; the array's is added if it is new.
        fetch: Returns the values in the place of `fetch_part`.
    """
    if not isinstance(array, jax.Array):
        everything = tuple((0, size) for size in array.shape)
        return schema.ArrayContent(name, fetch or (lambda: array), array.nbytes, index=everything)
    shape, key_dtype, key_impl = array.shape, "", ""
    if _is_of_keys(array.dtype):
        key_dtype, key_impl = str(array.dtype), str(jax.random.key_impl(array))
    part, place = _part_on(array, device)
    number = -1
    if shardings is not None:
        described = describe_sharding(array.sharding, len(shape))
        number = shardings.setdefault(described, len(shardings))
    return schema.ArrayContent(
        name=name,
        fetch=fetch or (lambda: to_host(part)),
        nbytes=part.nbytes,
        weak_type=bool(array.aval.weak_type),
        key_dtype=key_dtype,
        key_impl=key_impl,
        sharding=_sharding_text(array.sharding),
        global_shape=shape,
        identity=(array, device.id),
        sharding_number=number,
        index=place,
    )


@functools.cache
def _is_of_keys(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


@functools.lru_cache(maxsize=1024)
def _sharding_text(sharding: jax.sharding.Sharding) -> str:
    return str(sharding)


def fetch_part(array: Any, device: jaxapi.Device) -> np.ndarray:
    """Return the values of the part of an array that `array_content` describes."""
    return to_host(_part_on(array, device)[0]) if isinstance(array, jax.Array) else array


def _part_on(array: jax.Array, device: jaxapi.Device) -> tuple[jax.Array, schema.Index]:
    """Return the part of an array on a device, of PRNG keys their data; and where it lies in it."""
    shape = array.shape
    if _is_of_keys(array.dtype):
        array = jax.random.key_data(array)
    for at, place, part in jaxapi.parts_of_array(array):
        if at == device:
            return part, index_of(place, shape)
    return array, index_of((), shape)


def to_host(array: jax.Array) -> np.ndarray:
    """Return an array's values; raise the error of the execution that should have computed them.

    NumPy alone takes the memory as it is, and XLA (jaxlib 0.10.2 and 0.12.0.1, on CPU) ends the
    process in a failed CHECK where an execution has run out of memory and left none.
    """
    return np.asarray(array.block_until_ready())
