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
from snaprt.snapshot.format import schema
from snaprt.snapshot.format.shardings import describe_sharding, index_of
from snaprt.snapshot.format.sources import source_locations


class Artifacts(Protocol):
    """The module of an executable, as ``layout.ModuleBytes`` describes its forms."""

    @property
    def stablehlo(self) -> bytes:
        """A portable artifact."""
        ...

    @property
    def hlo(self) -> bytes:
        """A serialized ``xla.HloModuleProto``."""
        ...

    @property
    def compile_options(self) -> bytes:
        """A serialized ``xla.CompileOptionsProto``."""
        ...

    @property
    def proof(self) -> Proof:
        """What tells the executable from others."""
        ...

    @property
    def trace_error(self) -> schema.TraceErrorRecord | None:
        """The error that ended the recording of the graph, if one did."""
        ...


class Proof(Protocol):
    """What tells an executable from others, as ``layout.ProofRecord`` describes it."""

    @property
    def fingerprint(self) -> str:
        """XLA's own of the executable."""
        ...

    @property
    def optimised_hlo(self) -> str:
        """Digest of the optimized module."""
        ...

    @property
    def aliases(self) -> tuple[str, ...]:
        """``result <- parameter`` for each result that takes a parameter's memory."""
        ...


def gather(
    execution: schema.Execution,
    artifacts: Callable[[], Artifacts],
    names: Sequence[str],
    arrays: Sequence[Any],
    device: jaxapi.Device,
) -> schema.Contents:
    """Gather what goes into a file.

    Args:
        execution: Which execution it is; its source locations are filled in here.
        artifacts: Returns the module; called once, and may lower it again.
        names: The names of ``arrays`` in the file.
        arrays: The inputs or the outputs, as `array_content` takes them.
        device: The device whose parts of them are wanted.
    """
    forms = artifacts()
    module = schema.ModuleBytes(forms.stablehlo, forms.hlo, forms.compile_options)
    fields = {**vars(execution), "source_locations": source_locations(module.hlo)}
    shardings: dict[schema.ShardingRecord, int] = {}
    contents = [
        array_content(name, array, device, shardings)
        for name, array in zip(names, arrays, strict=True)
    ]
    return schema.Contents(
        schema.Execution(**fields),
        module,
        contents,
        shardings=tuple(shardings),
        proof=schema.ProofRecord(
            forms.proof.fingerprint, forms.proof.optimised_hlo, forms.proof.aliases
        ),
        trace_error=forms.trace_error,
    )


def array_content(
    name: str,
    array: Any,
    device: jaxapi.Device,
    shardings: dict[schema.ShardingRecord, int] | None = None,
) -> schema.ArrayContent:
    """Describe one array, or the part of it that lies on ``device``, for a snapshot.

    Args:
        name: Its name in the file.
        array: A ``jax.Array``, PRNG keys included, or a NumPy array.
        device: Where the part lies; an array that has none there is taken whole.
        shardings: The file's shardings with their numbers; the array's is added if it is new.
    """
    if not isinstance(array, jax.Array):
        everything = tuple((0, size) for size in array.shape)
        return schema.ArrayContent(name, lambda: array, array.nbytes, index=everything)
    whole, shape = array, array.shape
    sharding = str(array.sharding)
    weak_type = bool(array.aval.weak_type)
    key_dtype = key_impl = ""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        key_dtype, key_impl = str(array.dtype), str(jax.random.key_impl(array))
        array = jax.random.key_data(array)
    parts = [(part, place) for at, place, part in jaxapi.parts_of_array(array) if at == device]
    part, place = parts[0] if parts else (array, ())
    number = -1
    if shardings is not None:
        described = describe_sharding(whole.sharding, len(shape))
        number = shardings.setdefault(described, len(shardings))
    return schema.ArrayContent(
        name=name,
        fetch=lambda: to_host(part),
        nbytes=part.nbytes,
        weak_type=weak_type,
        key_dtype=key_dtype,
        key_impl=key_impl,
        sharding=sharding,
        global_shape=shape,
        identity=(whole, device.id),
        sharding_number=number,
        index=index_of(place, shape),
    )


def to_host(array: jax.Array) -> np.ndarray:
    """Return an array's values; raise the error of the execution that should have computed them.

    NumPy alone takes the memory as it is, and XLA (jaxlib 0.10.2 and 0.12.0.1, on CPU) ends the
    process in a failed CHECK where an execution has run out of memory and left none.
    """
    return np.asarray(array.block_until_ready())
