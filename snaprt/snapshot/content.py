"""Turns arrays and a module into the contents of a snapshot file; must not know when or where.

What it does may take its time: it runs in the writer's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from snaprt import jaxapi
from snaprt.snapshot import layout
from snaprt.snapshot.sources import source_locations


class Artifacts(Protocol):
    """The module of an executable, as ``layout.ModuleBytes`` describes its forms."""

    @property
    def stablehlo(self) -> bytes:
        """A portable artifact."""

    @property
    def hlo(self) -> bytes:
        """A serialised ``xla.HloModuleProto``."""

    @property
    def compile_options(self) -> bytes:
        """A serialised ``xla.CompileOptionsProto``."""


def gather(
    execution: layout.Execution,
    artifacts: Callable[[], Artifacts],
    names: Sequence[str],
    arrays: Sequence[Any],
    device: jaxapi.Device,
) -> layout.Contents:
    """Gather what goes into a file.

    Args:
        execution: Which execution it is; its source locations are filled in here.
        artifacts: Returns the module; called once, and may lower it again.
        names: The names of ``arrays`` in the file.
        arrays: The inputs or the outputs, as `array_content` takes them.
        device: The device whose parts of them are wanted.
    """
    forms = artifacts()
    module = layout.ModuleBytes(forms.stablehlo, forms.hlo, forms.compile_options)
    fields = {**vars(execution), "source_locations": source_locations(module.hlo)}
    return layout.Contents(
        layout.Execution(**fields),
        module,
        [array_content(name, array, device) for name, array in zip(names, arrays, strict=True)],
    )


def array_content(name: str, array: Any, device: jaxapi.Device) -> layout.ArrayContent:
    """Describe one array, or the part of it that lies on ``device``, for a snapshot.

    Args:
        name: Its name in the file.
        array: A ``jax.Array``, PRNG keys included, or a NumPy array.
        device: Where the part lies; an array that has none there is taken whole.
    """
    if not isinstance(array, jax.Array):
        return layout.ArrayContent(name, lambda: array, array.nbytes)
    shape = array.shape
    sharding = str(array.sharding)
    weak_type = bool(array.aval.weak_type)
    key_dtype = key_impl = ""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        key_dtype, key_impl = str(array.dtype), str(jax.random.key_impl(array))
        array = jax.random.key_data(array)
    parts = [shard.data for shard in array.addressable_shards if shard.device == device]
    part = parts[0] if parts else array
    return layout.ArrayContent(
        name=name,
        fetch=lambda: np.asarray(part),
        nbytes=part.nbytes,
        weak_type=weak_type,
        key_dtype=key_dtype,
        key_impl=key_impl,
        sharding=sharding,
        global_shape=shape,
    )
