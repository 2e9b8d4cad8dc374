"""Describes how arrays are spread over devices, for the manifest; must not know files."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from snaprt import jaxapi
from snaprt.snapshot.format.schema import ShardingRecord


@functools.lru_cache(maxsize=1024)
def describe_sharding(sharding: jax.sharding.Sharding, ndim: int) -> ShardingRecord:
    """Return a sharding of an array of ``ndim`` dimensions as the manifest holds it."""
    named = isinstance(sharding, jax.sharding.NamedSharding)
    return ShardingRecord(
        kind=type(sharding).__name__,
        devices=tuple(device.id for device in jaxapi.devices_of_sharding(sharding)),
        memory_kind=sharding.memory_kind or "",
        hlo=jaxapi.hlo_sharding_text(sharding, ndim),
        **(_of_mesh(sharding) if named else {}),
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


def index_of(index: Sequence[slice], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return where a part begins and ends in each dimension of an array of ``shape``.

    Args:
        index: The part's slices; dimensions that it does not have are taken whole, and those that
            it has more (of the data of PRNG keys) are left out.
        shape: Of the whole array.
    """
    slices = [*index, *[slice(None)] * len(shape)][: len(shape)]
    return tuple(one.indices(size)[:2] for one, size in zip(slices, shape, strict=True))
