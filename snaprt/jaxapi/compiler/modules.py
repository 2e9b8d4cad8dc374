"""Parses, prints, describes, converts and interprets MLIR modules."""

from __future__ import annotations

import functools
import hashlib
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src.interpreters import mlir as _mlir
from jaxlib import _hlo  # type: ignore[attr-defined]
from jaxlib import _jax as _jaxlib  # pyright: ignore[reportAttributeAccessIssue]
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import stablehlo

from snaprt.jaxapi.compiler import parse_alone

PARSE_ALONE = Path(parse_alone.__file__)
"""A script that parses the module in a file within some seconds of processor time, or ends."""


def parse_module(module: bytes | str) -> Any:
    """Parse StableHLO text, MLIR bytecode or a portable artifact into an MLIR module.

    Raises:
        ValueError: If it is none of them. The message names line and column of text.
    """
    try:
        return parse_alone.parse(module, _mlir.make_ir_context())
    except ir.MLIRError as error:
        raise ValueError("; ".join(map(_as_sentence, error.error_diagnostics))) from None


_PLACE = re.compile(r'"-":([1-9]\d*):(\d+)')  # bytecode has 0:0
_OF_XLA = re.compile(r"[A-Z_]+: (?:\S*?:\d+:\d+: error: )?(.*)")


def _as_sentence(diagnostic: Any) -> str:
    place = _PLACE.search(str(diagnostic.location))
    where = f"line {place[1]}, column {place[2]}: " if place else ""
    return where + diagnostic.message


def _first_of_xla(error: Exception) -> str:
    """Return what XLA says first, without its status code and the place in its own copy."""
    text = str(error)
    match = _OF_XLA.match(text)
    return match[1] if match else text


def module_signature(module: Any) -> tuple[list[Any], list[Any]]:
    """Return the (shape, dtype) of each parameter and of each result of ``main``.

    A dynamic size is -1.
    """
    kind = main_of(module).function_type.value
    return [_tensor(t) for t in kind.inputs], [_tensor(t) for t in kind.results]


def parameter_memories(module: Any, device: Any) -> list[str | None]:
    """Return the kind of memory of each parameter of ``main``, ``None`` for the device's own.

    As JAX writes it when it lowers; a program that is made from HLO names none. ``None`` as well
    for a kind that ``device`` does not have.
    """
    main = main_of(module)
    parameters = len(main.function_type.value.inputs)
    if "arg_attrs" not in main.attributes:
        return [None] * parameters
    kinds = {memory.kind for memory in device.addressable_memories()}
    attributes = map(ir.DictAttr, ir.ArrayAttr(main.attributes["arg_attrs"]))
    named = [
        ir.StringAttr(of["mhlo.memory_kind"]).value if "mhlo.memory_kind" in of else None
        for of in attributes
    ]
    return [kind if kind in kinds else None for kind in named]


def main_of(module: Any) -> Any:
    """Return the function ``main`` of a module, with its body.

    Raises:
        ValueError: There is none.
    """
    main = next(filter(_is_main, module.body.operations), None)
    if main is None:
        raise ValueError("the module has no function 'main'")
    return main


def _is_main(operation: Any) -> bool:
    attributes = operation.attributes
    has_name = "sym_name" in attributes and ir.StringAttr(attributes["sym_name"]).value == "main"
    return has_name and len(operation.regions[0].blocks) > 0


def _tensor(kind: Any) -> tuple[tuple[int, ...], np.dtype]:
    if not isinstance(kind, ir.RankedTensorType):
        raise ValueError(f"a parameter or result of type {kind} cannot be passed as an array")
    return tuple(-1 if size < 0 else size for size in kind.shape), _mlir_dtype(
        str(kind.element_type)
    )


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
        return bytecode_of(stripped)


def bytecode_of(operation: Any) -> bytes:
    """Return an MLIR operation as bytecode, with its source locations if it has them."""
    buffer = io.BytesIO()
    operation.write_bytecode(file=buffer)
    return buffer.getvalue()


def portable_artifact(module: Any) -> bytes:
    """Return an MLIR module as a portable StableHLO artifact, as `portable_stablehlo` does.

    It has the form of `jax.export.Exported.mlir_module_serialized` (tried with 0.10.2 and 0.12.0).

    The recorder's thread asks for the modules of other threads, and jaxlib serializes without the
    GIL, while such a thread goes on in the module's MLIR context: since 0.11, a thread lowers up to
    ten programs into one. With 0.11.2 that ended one process with SIGSEGV, here, which was not seen
    again. So jaxlib gets bytecode, written under the GIL, and parses it into a context of its own.

    Raises:
        ValueError: The module uses an operation that StableHLO cannot store.
    """
    version = stablehlo.get_current_version()
    try:
        return _jaxlib.mlir.serialize_portable_artifact(
            bytecode_of(module.operation), version, True
        )
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(_first_of_xla(error)) from None


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


def module_to_hlo_proto(module: Any) -> bytes:
    """Convert a StableHLO module to a serialized, unoptimized ``xla.HloModuleProto``.

    Raises:
        ValueError: XLA has no HLO for something in it.
    """
    try:
        bytecode = bytecode_of(module.operation)
        computation = _jaxlib.mlir.mlir_module_to_xla_computation(bytecode)
    except Exception as error:  # of several types, by version and cause
        raise ValueError(_first_of_xla(error)) from None
    return computation.as_serialized_hlo_module_proto()


def hlo_to_stablehlo(proto: bytes) -> bytes:
    """Convert a serialized ``xla.HloModuleProto`` to StableHLO, as MLIR bytecode.

    Raises:
        ValueError: It is none, or something in it has no StableHLO.
    """
    try:
        return _jaxlib.mlir.hlo_to_stablehlo(proto)
    except Exception as error:  # of several types, by version and cause
        raise ValueError(str(error)) from None


def hlo_text(proto: bytes) -> str:
    """Return a serialized ``xla.HloModuleProto`` as HLO text.

    Raises:
        ValueError: It is none, or XLA does not accept it.
    """
    try:
        return _hlo.HloModule.from_serialized_hlo_module_proto(proto).to_string()
    except Exception as error:
        raise ValueError(str(error)) from None


def parse_hlo_text(text: str) -> bytes:
    """Parse HLO text into a serialized ``xla.HloModuleProto``.

    Raises:
        ValueError: XLA's parser refuses it; the message names the first line and column.
    """
    try:
        return _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    except Exception as error:
        first = _HLO_PLACE.search(str(error))
        message = f"line {first[1]}, column {first[2]}: {first[3]}" if first else str(error)
        raise ValueError(message) from None


_HLO_PLACE = re.compile(r"was parsing (\d+):(\d+): error: (.*)")


def interpret(module: Any, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Evaluate an MLIR module with StableHLO's reference interpreter.

    Args:
        module: Its results are real numbers of types that Python's buffers have.
        inputs: One array for each parameter of ``main``, of any dtype that XLA has.

    Raises:
        ValueError: The interpreter does not know an operation of it.
    """
    (main,) = [
        o for o in module.body.operations if o.operation.attributes["sym_name"].value == "main"
    ]
    with module.context, ir.Location.unknown():
        _generalize_dots(module)
        arguments = [
            ir.DenseElementsAttr.get(np.ascontiguousarray(array).tobytes(), type=kind)
            for array, kind in zip(inputs, main.function_type.value.inputs, strict=True)
        ]
        try:
            results = stablehlo.eval_module(module, arguments)
        except Exception as error:  # of several types, by version and cause
            raise ValueError(str(error)) from None
        return [np.asarray(result) for result in results]


def _generalize_dots(module: Any) -> None:
    """Replace ``stablehlo.dot``, which `hlo_to_stablehlo` makes and the interpreter refuses."""
    for dot in list(operations_within(module.operation)):
        if dot.name != "stablehlo.dot":
            continue
        left, right = dot.operands
        contracted = ir.RankedTensorType(left.type).rank - 1
        numbers = stablehlo.DotDimensionNumbers.get([], [], [contracted], [0])
        with ir.InsertionPoint(dot):
            general = stablehlo.dot_general(dot.results[0].type, left, right, numbers)
        dot.results[0].replace_all_uses_with(general)
        dot.erase()
