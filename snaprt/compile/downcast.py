"""Lets a lowered module compute in narrower types, as XLA_USE_BF16 and others ask.

An array of a wide type becomes one of a narrow type, from the arguments, which are converted at the
start, to the results, which are converted back at the end: who calls the module sees no difference.
An operation is left as it is, between conversions, where it would not mean the same in the narrow
type: where some of its arrays stay wide, where it looks at bits or calls foreign code, and in the
functions of `jax.random`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import jax

from snaprt import jaxapi, settings


@dataclass(frozen=True, eq=False)
class Narrowing:
    """One replacement of types."""

    name: str  # stands for it in keys
    elements: Mapping[str, str]  # the narrow element type of each wide one
    # Whether scalars become narrow too. They cost no memory, and hyperparameters such as ``1 -
    # 0.999**step`` need their digits.
    scalars: bool
    excluded: frozenset[str]  # the operations that are left as they are
    # Whether operations that fold arrays with a function of scalars (sums, sorting, scattering)
    # become narrow, and not only what they take and give.
    folds: bool
    # To how many bits of exponent and of mantissa results of a wide type are rounded, for XLA may
    # leave out a conversion there and back.
    bits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    # What stands for a constant that is the least or the largest number of a wide type, where a
    # fold begins, as a number of that type.
    limits: Mapping[int, int] = field(default_factory=dict)

    def of(self, kind: Any) -> Any:
        """Return the narrow type that stands for a type; the type itself where none does."""
        element = self.elements.get(jaxapi.element_of_type(kind) or "")
        if element is None or not (self.scalars or kind.rank):
            return kind
        return jaxapi.with_element(kind, element)


_FOREIGN: Final = frozenset(
    {
        *("stablehlo.bitcast_convert", "stablehlo.constant", "stablehlo.custom_call"),
        *("stablehlo.rng_bit_generator", "mhlo.custom_call"),
    }
)

_BITS: Final = {"bf16": (8, 7), "f32": (8, 23)}


def _narrow_floats(name: str, elements: Mapping[str, str]) -> Narrowing:
    excluded = {"stablehlo.cholesky", "stablehlo.reduce_precision", "stablehlo.triangular_solve"}
    bits = {wide: _BITS[narrow] for wide, narrow in elements.items()}
    return Narrowing(
        name, elements, scalars=False, excluded=_FOREIGN | excluded, folds=False, bits=bits
    )


#: Setting -> what it asks for.
_ASKED_BY: Final = {
    "XLA_USE_BF16": _narrow_floats("bf16", {"f32": "bf16", "f64": "bf16"}),
    "XLA_DOWNCAST_BF16": _narrow_floats("downcast", {"f32": "bf16", "f64": "f32"}),
    "XLA_USE_32BIT_LONG": Narrowing(
        "32-bit long",
        {"i64": "i32", "ui64": "ui32"},
        scalars=True,
        excluded=_FOREIGN | {"chlo.mulhi", "stablehlo.count_leading_zeros", "stablehlo.popcnt"},
        folds=True,
        limits={2**63 - 1: 2**31 - 1, -(2**63): -(2**31)},
    ),
}
_texts: Final = settings.Texts(*_ASKED_BY)
_seen: tuple[list[Any], tuple[Narrowing, ...]] = ([None] * len(_ASKED_BY), ())


def narrowings() -> tuple[Narrowing, ...]:
    """Return what the environment asks for now."""
    global _seen
    now = _texts.now()
    before, requested = _seen
    if now != before:
        requested = tuple(narrowing for name, narrowing in _ASKED_BY.items() if settings.get(name))
        _seen = now, requested
    return requested


def names_of(narrowings: Iterable[Narrowing]) -> str:
    """Return what stands for them in a key: "" for none."""
    return "".join(f" {narrowing.name}" for narrowing in narrowings)


def narrowed(lowered: jax.stages.Lowered, narrowings: Iterable[Narrowing]) -> jax.stages.Lowered:
    """Let a lowered program compute in narrow types; its arguments and results stay as they are."""
    module = jaxapi.parse_module(jaxapi.bytecode(lowered))  # JAX knows its own one by identity
    with jaxapi.changing_module(module):
        for narrowing in narrowings:
            _narrow_module(module, narrowing)
        module.operation.verify()
    return jaxapi.with_module(lowered, module)


# Operations that hand arrays on one by one, each in a type of its own.
_HANDING_ON: Final = frozenset(
    {
        *("func.call", "func.return", "stablehlo.case", "stablehlo.composite", "stablehlo.if"),
        *("stablehlo.convert", "stablehlo.optimization_barrier", "stablehlo.return"),
        *("stablehlo.while", "sdy.manual_computation", "sdy.named_computation", "sdy.return"),
    }
)
_CALLS: Final = {"func.call": "callee", "stablehlo.composite": "decomposition"}
_UNNUMBERED: Final = re.compile(r"_\d+$")


def _narrow_module(module: Any, narrowing: Narrowing) -> None:
    functions = {
        str(view.operation.attributes["sym_name"].value): view.operation
        for view in module.body.operations
        if view.operation.name == "func.func"
    }
    unchanged = _keep_as_they_are(functions, narrowing)
    for name, function in functions.items():
        if name not in unchanged:
            _narrow_function(function, narrowing, unchanged, is_main=name == "main")


def _keep_as_they_are(functions: dict[str, Any], narrowing: Narrowing) -> frozenset[str]:
    """Return the functions that stay as they are, and what these call.

    They are those of `jax.random`, and those inside of the program that look at the bits of what
    would have fewer of them. What others call as well is copied for them first.
    """
    calls = {name: _callees(function) for name, function in functions.items()}
    roots = {
        name
        for name, function in functions.items()
        if _UNNUMBERED.sub("", name) in _random_names()
        or (name != "main" and _looks_at_bits(function, narrowing))
    }
    callees = _reachable(roots, calls)
    shared = (callees - roots) & _reachable({"main"}, calls, without=roots)
    copies = {name: f"{name}_kept" for name in shared}
    for name, copy in copies.items():
        clone = functions[name].clone(jaxapi.after_operation(functions[name]))
        jaxapi.set_symbol(clone, "sym_name", copy)
        functions[copy] = clone.operation
    unchanged = frozenset((callees - shared) | set(copies.values()))
    for name in unchanged:
        for operation in jaxapi.operations_within(functions[name]):
            attribute = _CALLS.get(operation.name)
            if attribute is not None and operation.attributes[attribute].value in copies:
                copy = copies[operation.attributes[attribute].value]
                jaxapi.set_symbol(operation, attribute, copy)
    return unchanged


@functools.cache
def _random_names() -> frozenset[str]:
    return jaxapi.random_function_names()


def _callees(function: Any) -> set[str]:
    return {
        operation.attributes[_CALLS[operation.name]].value
        for operation in jaxapi.operations_within(function)
        if operation.name in _CALLS
    }


def _looks_at_bits(function: Any, narrowing: Narrowing) -> bool:
    return any(
        jaxapi.element_of_type(value.type) in narrowing.elements
        for operation in jaxapi.operations_within(function)
        if operation.name == "stablehlo.bitcast_convert"
        for value in (*operation.operands, *operation.results)
    )


def _reachable(
    roots: Iterable[str], calls: Mapping[str, set[str]], without: Iterable[str] = ()
) -> set[str]:
    reached = set(roots)
    ahead = list(reached)
    while ahead:
        new = calls.get(ahead.pop(), set()) - reached - set(without)
        reached |= new
        ahead += new
    return reached


@dataclass(frozen=True)
class _Step:
    """An operation to be changed."""

    operation: Any
    operands: tuple[Any, ...]  # the types of its operands before any change
    is_narrow: bool  # whether it becomes narrow, or is put between conversions


def _narrow_function(
    function: Any, narrowing: Narrowing, unchanged: frozenset[str], *, is_main: bool
) -> None:
    # First of all what there is: the changes put conversions between.
    steps = list(_steps(function, narrowing, unchanged))
    if is_main:
        for argument in function.regions[0].blocks[0].arguments:
            start = jaxapi.at_start_of_block(function.regions[0].blocks[0])
            _convert(argument, narrowing, start)
    else:
        _narrow_blocks(function, narrowing)
        kind = jaxapi.function_type(function)
        inputs, results = (map(narrowing.of, part) for part in (kind.inputs, kind.results))
        jaxapi.set_function_type(function, list(inputs), list(results))
    for step in steps:
        if is_main and step.operation.name == "func.return":
            _put_between_conversions(step, narrowing, rounded=True)
        elif step.is_narrow:
            _narrow_blocks(step.operation, narrowing)
            for result in step.operation.results:
                result.set_type(narrowing.of(result.type))
        else:
            _put_between_conversions(step, narrowing)


def _steps(operation: Any, narrowing: Narrowing, unchanged: frozenset[str]) -> Iterator[_Step]:
    """Yield what is inside of an operation, but not what is inside of what is left as it is."""
    for region in operation.regions:
        for block in region.blocks:
            for view in block.operations:
                inner = view.operation
                is_narrow = _becomes_narrow(inner, narrowing, unchanged)
                yield _Step(inner, tuple([operand.type for operand in inner.operands]), is_narrow)
                if is_narrow:
                    yield from _steps(inner, narrowing, unchanged)


def _becomes_narrow(operation: Any, narrowing: Narrowing, unchanged: frozenset[str]) -> bool:
    if operation.name in _CALLS:
        return operation.attributes[_CALLS[operation.name]].value not in unchanged
    if operation.name in _HANDING_ON:
        return True
    if operation.name in narrowing.excluded or "algorithm" in operation.attributes:
        return False
    if len(operation.regions) and not narrowing.folds:
        return False
    kinds = [value.type for value in (*operation.operands, *operation.results)]
    elements = [jaxapi.element_of_type(kind) or "" for kind in kinds]
    if any(element.startswith("complex") for element in elements):
        return False
    wide = [
        kind for kind, element in zip(kinds, elements, strict=True) if element in narrowing.elements
    ]
    return all(narrowing.of(kind) != kind for kind in wide)


def _narrow_blocks(operation: Any, narrowing: Narrowing) -> None:
    for region in operation.regions:
        for block in region.blocks:
            for argument in block.arguments:
                argument.set_type(narrowing.of(argument.type))


def _put_between_conversions(step: _Step, narrowing: Narrowing, *, rounded: bool = False) -> None:
    for index, kind in enumerate(step.operands):
        if step.operation.operands[index].type != kind:
            bits = narrowing.bits.get(jaxapi.element_of_type(kind) or "") if rounded else None
            jaxapi.convert_operand(step.operation, index, kind, bits)
    if step.operation.name == "stablehlo.constant":
        limit = narrowing.limits.get(jaxapi.integer_of_constant(step.operation) or 0)
        if limit is not None:
            jaxapi.set_constant(step.operation, limit)
    for result in step.operation.results:
        _convert(result, narrowing, jaxapi.after_operation(step.operation))


def _convert(value: Any, narrowing: Narrowing, where: Any) -> None:
    kind = narrowing.of(value.type)
    if kind != value.type:
        jaxapi.convert_result(value, kind, where)
