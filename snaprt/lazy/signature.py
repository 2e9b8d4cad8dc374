"""Signatures: a small integer for each distinct (operation, parameters, context) of this process.

Two operations with equal signatures and equal operands compute the same. Jaxprs that JAX traces
anew at every step (the body of a `scan` written as a lambda) are compared by structure, so that
a step that repeats is recognised although none of its objects is the same.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

from snaprt import jaxapi

_numbers = itertools.count()
_signatures: dict[Any, int] = {}
_jaxpr_tokens: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_jaxpr_structures: dict[Any, int] = {}

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def signature(primitive: Any, params: dict[str, Any], context: Any) -> int:
    """Return the integer that stands for an operation, whatever its operands."""
    key = (primitive, context, tuple([(name, _parameter_key(v)) for name, v in params.items()]))
    number = _signatures.get(key)
    if number is None:
        number = _signatures[key] = next(_numbers)
    return number


def _parameter_key(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        # The type takes part: 1, 1.0 and True are equal to Python and not to XLA. A float
        # enters by its bits, so that NaN equals itself and 0.0 is not -0.0.
        return (kind, value.hex()) if kind is float else (kind, value)
    convert = _CONVERSIONS.get(kind)
    if convert is not None:
        return convert(value)
    if isinstance(value, tuple):
        return (kind, *map(_parameter_key, value))
    try:
        hash(value)
    except TypeError:
        return _Identity(value)
    return value


class _Identity:
    """Equal to itself alone; holds the object, so that its address is not given to another."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value


def _sequence_key(value: Any) -> Any:
    return (type(value), *map(_parameter_key, value))


def _mapping_key(value: dict[Any, Any]) -> Any:
    return (dict, *((_parameter_key(k), _parameter_key(v)) for k, v in value.items()))


def _jaxpr_key(jaxpr: Any) -> Any:
    token = _jaxpr_tokens.get(jaxpr)
    if token is None:
        structure = _jaxpr_structure(jaxpr)
        token = _jaxpr_structures.get(structure)
        if token is None:
            token = _jaxpr_structures[structure] = next(_numbers)
        _jaxpr_tokens[jaxpr] = token
    return ("jaxpr", token)


def _jaxpr_structure(closed: Any) -> Any:
    """Return a jaxpr as nested tuples with its variables numbered in order of appearance."""
    consts = getattr(closed, "consts", ())
    jaxpr = getattr(closed, "jaxpr", closed)
    numbers: dict[Any, int] = {}

    def variable(atom: Any) -> Any:
        if isinstance(atom, jaxapi.JaxprLiteral):
            return ("literal", atom.aval, _constant_key(atom.val))
        return numbers.setdefault(atom, len(numbers))

    def binders(variables: Any) -> Any:
        return tuple([(variable(v), v.aval) for v in variables])

    inputs = binders([*jaxpr.constvars, *jaxpr.invars])
    equations = tuple(
        [
            (
                equation.primitive,
                equation.ctx,
                tuple([variable(atom) for atom in equation.invars]),
                tuple([(name, _parameter_key(v)) for name, v in equation.params.items()]),
                binders(equation.outvars),
            )
            for equation in jaxpr.eqns
        ]
    )
    outputs = tuple([variable(atom) for atom in jaxpr.outvars])
    return (inputs, equations, outputs, tuple(map(_constant_key, consts)))


def _constant_key(value: Any) -> Any:
    if jaxapi.host_literal(value):
        return (type(value), jaxapi.typeof(value), jaxapi.literal_bytes(value))
    return _Identity(value)


_CONVERSIONS: dict[type, Callable[[Any], Any]] = {
    jaxapi.Jaxpr: _jaxpr_key,
    jaxapi.ClosedJaxpr: _jaxpr_key,
    list: _sequence_key,
    tuple: _sequence_key,
    dict: _mapping_key,
}
