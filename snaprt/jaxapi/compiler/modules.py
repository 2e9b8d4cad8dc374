"""Parses, prints and describes MLIR modules; must not know what made them or runs them."""

from __future__ import annotations

import functools
import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jax._src.interpreters import mlir as _mlir
from jaxlib import _jax as _jaxlib  # pyright: ignore[reportAttributeAccessIssue]
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import stablehlo

from snaprt.jaxapi.compiler import parse_alone

PARSE_ALONE = Path(parse_alone.__file__)
"""A script that parses the module in a file within some seconds of processor time, or ends."""


def parse_module(module: bytes | str) -> Any:
    """Parse StableHLO text, MLIR bytecode or a portable artifact into an MLIR module.

    Raises:
        ValueError: If it is none of them.
    """
    try:
        return parse_alone.parse(module, _mlir.make_ir_context())
    except ir.MLIRError as error:
        raise ValueError(str(error).strip()) from None


def module_signature(module: Any) -> tuple[list[Any], list[Any]]:
    """Return the (shape, dtype) of each parameter and of each result of ``main``."""
    for operation in module.body.operations:
        if operation.operation.name == "func.func" and operation.sym_name.value == "main":
            kind = operation.function_type.value
            return [_tensor(t) for t in kind.inputs], [_tensor(t) for t in kind.results]
    raise ValueError("the module has no function 'main'")


def _tensor(kind: Any) -> tuple[tuple[int, ...], np.dtype]:
    if not isinstance(kind, ir.RankedTensorType):
        raise ValueError(f"a parameter or result of type {kind} cannot be given as an array")
    return tuple(kind.shape), _mlir_dtype(str(kind.element_type))


def _mlir_dtype(name: str) -> np.dtype:
    dtype = _element_types().get(name)
    if dtype is None:
        raise ValueError(f"arrays of element type {name} are not supported")
    return dtype


@functools.cache
def _element_types() -> dict[str, np.dtype]:
    """Return MLIR's element type names and their dtypes, as JAX itself maps them."""
    dtypes = [d for d in map(np.dtype, _mlir._dtype_to_ir_type) if d.name not in _NOT_ELEMENTS]
    with _mlir.make_ir_context(), ir.Location.unknown():
        return {str(_mlir.dtype_to_ir_type(dtype)): dtype for dtype in dtypes}


# float0 has no element; the one-bit integers share MLIR's i1 with bool.
_NOT_ELEMENTS = ("float0", "int1", "uint1")


def bytecode_without_locations(module: Any) -> bytes:
    """Return an MLIR module as bytecode after ``strip-debuginfo``: equal for equal programs."""
    with module.context:
        stripped = module.operation.clone()
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(stripped)
        buffer = io.BytesIO()
        stripped.write_bytecode(file=buffer)
        return buffer.getvalue()


def portable_artifact(module: Any) -> bytes:
    """Return an MLIR module as a portable StableHLO artifact, as `portable_stablehlo` does.

    It has the form of `jax.export.Exported.mlir_module_serialized` (tried with 0.10.2 and 0.12.0).
    """
    return _jaxlib.mlir.serialize_portable_artifact(module, stablehlo.get_current_version(), True)


def stablehlo_text(module: Any) -> str:
    """Return an MLIR module as text, without source locations."""
    return module.operation.get_asm(enable_debug_info=False)


def stablehlo_with_locations(module: Any, largest_constant: int) -> str:
    """Return an MLIR module as text with source locations, for people to compare.

    Args:
        module: The program.
        largest_constant: A constant with more elements than this loses its value, and the digests
            of those values stand at the end, each in a line ``// constant DIGEST``, in order.
    """
    return _text_to_compare(module, largest_constant, locations=True)


def stablehlo_to_compare(module: Any, largest_constant: int) -> str:
    """Do what `stablehlo_with_locations` does, but for the locations."""
    return _text_to_compare(module, largest_constant, locations=False)


def _text_to_compare(module: Any, largest_constant: int, *, locations: bool) -> str:
    text = module.operation.get_asm(
        enable_debug_info=locations, large_elements_limit=largest_constant
    )
    if "__elided__" not in text:
        return text
    digests = [
        f"// constant {_digest_of_constant(operation.attributes['value'])}"
        for operation in operations_within(module.operation)
        if operation.name == "stablehlo.constant"
        and len(operation.attributes["value"]) > largest_constant
        and not operation.attributes["value"].is_splat
    ]
    return "\n".join([text, *digests])


def operations_within(operation: Any) -> Iterator[Any]:
    """Yield the operations inside ``operation``, in the order in which MLIR prints them."""
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from operations_within(inner.operation)


def _digest_of_constant(value: Any) -> str:
    try:
        content = memoryview(value).tobytes()
    except BufferError:  # an element type that Python's buffers do not have, such as bf16
        content = str(value).encode()
    return hashlib.blake2b(content, digest_size=8).hexdigest()
