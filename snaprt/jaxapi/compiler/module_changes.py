"""Changes the operations, types and names of an MLIR module."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import stablehlo

from snaprt.jaxapi.compiler.custom_calls import is_python_callback
from snaprt.jaxapi.compiler.modules import (
    main_of,
    module_to_hlo_proto,
    operations_within,
    parse_module,
    portable_artifact,
)


@contextmanager
def changing_module(module: Any) -> Iterator[None]:
    """Let what is inside change an MLIR module."""
    with module.context, ir.Location.unknown():
        yield


def element_of_type(kind: Any) -> str | None:
    """Return the element type of an MLIR tensor type, such as ``f32``; None if it is none."""
    return str(kind.element_type) if isinstance(kind, ir.RankedTensorType) else None


def with_element(kind: Any, element: str) -> Any:
    """Return an MLIR tensor type with another element type, such as ``bf16``."""
    return ir.RankedTensorType.get(kind.shape, ir.Type.parse(element), kind.encoding)


def convert_operand(
    operation: Any, index: int, kind: Any, bits: tuple[int, int] | None = None
) -> None:
    """Convert an operand of an MLIR operation to another type, before the operation."""
    value, where = operation.operands[index], operation.location
    with ir.InsertionPoint(operation):
        value = stablehlo.convert(kind, value, loc=where)
        if bits is not None:
            value = stablehlo.reduce_precision(value, *bits, loc=where)
        operation.operands[index] = value


def convert_result(value: Any, kind: Any, where: Any) -> None:
    """Convert an MLIR value to another type at the insertion point, for all who use it."""
    with where:
        converted = stablehlo.convert(kind, value, loc=value.location)
    value.replace_all_uses_except(converted, converted.owner.operation)


def integer_of_constant(operation: Any) -> int | None:
    """Return the number that all elements of an MLIR constant are; None where they are no such."""
    if not isinstance(operation.results[0].type.element_type, ir.IntegerType):
        return None  # jaxlib cannot read complex ones
    value: Any = operation.attributes["value"]
    return int(ir.IntegerAttr(value.get_splat_value()).value) if value.is_splat else None


def set_constant(operation: Any, number: int) -> None:
    """Let all elements of an MLIR constant be another number."""
    kind = operation.results[0].type
    element = ir.IntegerAttr.get(kind.element_type, number)
    operation.attributes["value"] = ir.DenseElementsAttr.get_splat(kind, element)


def after_operation(operation: Any) -> Any:
    """Return the insertion point after an MLIR operation."""
    return ir.InsertionPoint.after(operation)


def at_start_of_block(block: Any) -> Any:
    """Return the insertion point at the beginning of an MLIR block."""
    return ir.InsertionPoint.at_block_begin(block)


def set_function_type(function: Any, inputs: Sequence[Any], results: Sequence[Any]) -> None:
    """Give an MLIR function another type."""
    kind = ir.FunctionType.get(inputs, results, function.context)
    function.attributes["function_type"] = ir.TypeAttr.get(kind)


def function_type(function: Any) -> Any:
    """Return the type of an MLIR function, with its ``inputs`` and ``results``."""
    return ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)


def set_symbol(operation: Any, attribute: str, name: str) -> None:
    """Name an MLIR function, or the one that an operation calls."""
    kind = ir.StringAttr if attribute == "sym_name" else ir.FlatSymbolRefAttr
    operation.attributes[attribute] = kind.get(name, operation.context)


def without_tokens(module: Any) -> bool:
    """Make the tokens that ``main`` takes inside of it, and return none; say if there were any.

    A token only orders effects. No array can stand for it.

    Raises:
        ValueError: The module has no ``main``.
    """
    main = main_of(module)
    block = main.regions[0].blocks[0]
    taken = [number for number, argument in enumerate(block.arguments) if _is_token(argument)]
    last = list(block.operations)[-1]
    returned = [number for number, operand in enumerate(last.operands) if _is_token(operand)]
    if not taken and not returned:
        return False
    with changing_module(module):
        if taken:
            with ir.InsertionPoint.at_block_begin(block):
                token = stablehlo.after_all([])
            for number in reversed(taken):
                block.arguments[number].replace_all_uses_with(token)
                block.erase_argument(number)
        if returned:
            operands = [operand for operand in last.operands if not _is_token(operand)]
            with ir.InsertionPoint(last):
                ir.Operation.create("func.return", operands=operands)
            last.operation.erase()
            last = list(block.operations)[-1]
        kind = ir.FunctionType.get(
            [argument.type for argument in block.arguments],
            [operand.type for operand in last.operands],
        )
        main.attributes["function_type"] = ir.TypeAttr.get(kind)
        for name, removed in (("arg_attrs", taken), ("res_attrs", returned)):
            if name in main.attributes:
                numbered = enumerate(ir.ArrayAttr(main.attributes[name]))
                main.attributes[name] = ir.ArrayAttr.get(
                    [a for n, a in numbered if n not in removed]
                )
    return True


@dataclass(frozen=True)
class CallbacksTakenOut:
    """Which calls of Python `without_callbacks` took out of a module."""

    printing: bool  # that return no array, as of `jax.debug.print`
    in_branches: bool  # that return arrays in a branch of a conditional, as of Equinox's `error_if`


def without_callbacks(module: Any, float_instead: float, integer_instead: int) -> CallbacksTakenOut:
    """Remove the calls of Python that return no array, and replace those that a branch may skip.

    Calls that `main` always makes, and whose arrays it may therefore need, stay.

    Args:
        module: A StableHLO module.
        float_instead: What each element of a float or complex result becomes.
        integer_instead: What each element of an integer result becomes; a bool is true unless 0.
    """
    functions = {
        ir.StringAttr(view.operation.attributes["sym_name"]).value: view.operation
        for view in module.body
        if view.operation.name == "func.func"
    }
    always = _always_called(functions)
    printing: list[Any] = []
    in_branches: list[Any] = []
    for name, function in functions.items():
        for operation, in_branch in _with_branches(function):
            if not _calls_python(operation):
                continue
            kinds = [kind for result in operation.results for kind in _leaf_types(result.type)]
            if all(map(_is_token_type, kinds)):
                printing.append(operation)
            elif (in_branch or name not in always) and all(map(_can_be_filled, kinds)):
                in_branches.append(operation)
    with changing_module(module):
        for call in (*printing, *in_branches):
            # An ordered call returns a token: the one that it takes is used in its place.
            tokens = [operand for operand in call.operands if _is_token_type(operand.type)]

            def instead(kind: Any, tokens: Sequence[Any] = tokens) -> Any:
                if isinstance(kind, ir.TupleType):
                    return stablehlo.tuple([instead(element) for element in _elements(kind)])
                if _is_token_type(kind):
                    return tokens[0] if tokens else stablehlo.after_all([])
                return _filled(kind, float_instead, integer_instead)

            with ir.InsertionPoint(call):
                for result in call.results:
                    result.replace_all_uses_with(instead(result.type))
            call.erase()
    return CallbacksTakenOut(bool(printing), bool(in_branches))


def _calls_python(operation: Any) -> bool:
    return operation.name == "stablehlo.custom_call" and is_python_callback(
        ir.StringAttr(operation.attributes["call_target_name"]).value
    )


def _always_called(functions: Mapping[str, Any]) -> set[str]:
    """Return the names of the functions that ``main`` calls whatever branches it takes."""
    always: set[str] = set()
    waiting = ["main"]
    while waiting:
        name = waiting.pop()
        if name in always or name not in functions:
            continue
        always.add(name)
        for operation, in_branch in _with_branches(functions[name]):
            if not in_branch:
                waiting += _functions_called(operation)
    return always


def _with_branches(operation: Any, in_branch: bool = False) -> Iterator[tuple[Any, bool]]:
    """Yield the operations inside ``operation``, and whether a branch of a conditional has them."""
    in_branch = in_branch or operation.name in ("stablehlo.case", "stablehlo.if")
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation, in_branch
                yield from _with_branches(inner.operation, in_branch)


def _functions_called(operation: Any) -> Iterator[str]:
    for name in ("callee", "decomposition"):
        if name in operation.attributes:
            yield ir.FlatSymbolRefAttr(operation.attributes[name]).value
    if "called_computations" in operation.attributes:
        for reference in ir.ArrayAttr(operation.attributes["called_computations"]):
            yield ir.FlatSymbolRefAttr(reference).value


def _elements(kind: Any) -> Iterator[Any]:
    return (kind.get_type(number) for number in range(kind.num_types))


def _leaf_types(kind: Any) -> Iterator[Any]:
    """Yield the types of an MLIR type's arrays and tokens: XLA returns several in a tuple."""
    if isinstance(kind, ir.TupleType):
        for element in _elements(kind):
            yield from _leaf_types(element)
    else:
        yield kind


def _can_be_filled(kind: Any) -> bool:
    return _is_token_type(kind) or (isinstance(kind, ir.RankedTensorType) and kind.has_static_shape)


def _filled(kind: Any, float_value: float, integer_value: int) -> Any:
    """Return an array of an MLIR type, at the insertion point, whose elements are all one value."""
    if isinstance(kind.element_type, ir.IntegerType):
        element: Any = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), integer_value)
    else:
        element = ir.FloatAttr.get(ir.F32Type.get(), float_value)
    scalar = ir.RankedTensorType.get([], element.type)
    value = stablehlo.constant(ir.DenseElementsAttr.get_splat(scalar, element))
    value = stablehlo.convert(ir.RankedTensorType.get([], kind.element_type), value)
    return stablehlo.broadcast_in_dim(kind, value, ir.DenseI64ArrayAttr.get([]))


def without_scans(module: Any, platform: str = "") -> None:
    """Make loops of scans, such as a cumulative sum, where they are to run on a platform.

    JAX lowers them for a GPU to an operation of their own from 0.11 on, and XLA ends the process
    when it compiles that for a CPU (tried with jaxlib 0.10.2, 0.11.2 and 0.12.0).
    """
    if platform == "gpu":
        return
    scans = [
        operation
        for operation in operations_within(module.operation)
        if operation.name == "stablehlo.composite"
        and ir.StringAttr(operation.attributes["name"]).value == "chlo.scan"
    ]
    with changing_module(module):
        for scan in scans:
            call = ir.Operation.create(
                "func.call",
                [result.type for result in scan.results],
                list(scan.operands),
                {"callee": scan.attributes["decomposition"]},
                loc=scan.location,
                ip=ir.InsertionPoint(scan),
            )
            for result, instead in zip(scan.results, call.results, strict=True):
                result.replace_all_uses_with(instead)
            scan.erase()


def stablehlo_to_hlo(module: bytes) -> bytes:
    """Convert StableHLO to a serialized ``xla.HloModuleProto`` that XLA compiles for any platform.

    Raises:
        ValueError: It cannot be parsed, or XLA has no HLO for something in it.
    """
    parsed = parse_module(module)
    without_scans(parsed)
    return module_to_hlo_proto(parsed)


def _is_token(value: Any) -> bool:
    return _is_token_type(value.type)


def _is_token_type(kind: Any) -> bool:
    return str(kind) == "!stablehlo.token"


def without_locations_or_names(module: bytes, *, names: bool) -> bytes:
    """Return a module, as a portable artifact, without what tells where it came from.

    Args:
        module: StableHLO in any form.
        names: Whether to give neutral names to the module, its functions and the axes of its meshes
            too, and take out JAX's notes on arguments and results.

    Raises:
        ValueError: It cannot be parsed.
    """
    parsed: Any = parse_module(module)
    with parsed.context, ir.Location.unknown():
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(parsed.operation)
        if names:
            _take_out_names(parsed)
            text = _with_neutral_axes(parsed.operation.get_asm(enable_debug_info=False))
            parsed = ir.Module.parse(text)
        return portable_artifact(parsed)


def _take_out_names(module: Any) -> None:
    whole = module.operation
    whole.attributes["sym_name"] = ir.StringAttr.get("graph")
    functions = [view.operation for view in module.body if view.operation.name == "func.func"]
    for number, function in enumerate(functions):
        name = ir.StringAttr(function.attributes["sym_name"]).value
        if name != "main":
            neutral = f"snaprt_function{number}"
            ir.SymbolTable.replace_all_symbol_uses(name, neutral, whole)
            ir.SymbolTable.set_symbol_name(function, neutral)
        for side in ("arg_attrs", "res_attrs"):
            if side in function.attributes:
                cleaned = [
                    _without_notes(attributes)
                    for attributes in ir.ArrayAttr(function.attributes[side])
                ]
                function.attributes[side] = ir.ArrayAttr.get(cleaned)


def _without_notes(attributes: Any) -> Any:
    """Return an argument's attributes without JAX's own, but for the one that has a meaning."""
    entries: Any = ir.DictAttr(attributes)
    return ir.DictAttr.get(
        {
            attribute.name: attribute.attr
            for attribute in entries
            if not attribute.name.startswith("jax.") or attribute.name == "jax.buffer_donor"
        }
    )


_AXIS = re.compile(r'(?<=[<,\[ ])"([^"]+)"=\d+')


def _with_neutral_axes(text: str) -> str:
    lines = text.splitlines()
    meshes = [line for line in lines if line.lstrip().startswith("sdy.mesh ")]
    axes = list(dict.fromkeys(name for line in meshes for name in _AXIS.findall(line)))
    neutral = {f'"{name}"': f'"axis{number}"' for number, name in enumerate(axes)}
    if not neutral:
        return text
    quoted = re.compile("|".join(map(re.escape, neutral)))
    return "\n".join(
        quoted.sub(lambda match: neutral[match[0]], line) if "sdy." in line else line
        for line in lines
    )


def mesh_axes(module: bytes) -> tuple[str, ...]:
    """Return the names of the axes of a StableHLO module's meshes, in their order there."""
    parsed: Any = parse_module(module)
    text = "\n".join(
        view.operation.get_asm() for view in parsed.body if view.operation.name == "sdy.mesh"
    )
    return tuple(dict.fromkeys(_AXIS.findall(text)))
