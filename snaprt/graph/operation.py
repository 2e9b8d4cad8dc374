"""What recording knows of an operation apart from its operands, found once and then looked up.

Above all its signature: two operations with equal signatures and equal operands compute the same.
Jaxprs that JAX traces anew at every step (the body of a `scan` written as a lambda) are compared by
structure, so that a step that repeats is recognized although none of its objects is the same.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from blake3 import blake3

from snaprt import jaxapi
from snaprt.host.identities import identity


@dataclass(frozen=True, eq=False, slots=True)
class Evaluation:
    """What is known of an operation on operands of some abstract values."""

    results: tuple[Any, ...]  # the abstract values
    effects: Any
    weight: int  # how many equations it is: see `jaxapi.extent`
    work: float  # its floating point operations, estimated
    nbytes: int  # of the results
    symbol: int  # equal for one operation with operands and results of the same abstract values
    runs_anywhere: bool  # whether any number of devices will do
    refusal: str | None  # why a graph cannot hold it


class Operation:
    """A primitive with its parameters and the context that lowering needs.

    Attributes:
        signature: Stands for it within this process.
        stable_digest: Stands for it everywhere, or why nothing can; ``None`` until asked for.
        named: What its parameters say of where it runs.
        is_placed: Whether they say anything.
        constant_bytes: What the jaxprs among them close over.
        evaluations: What came of operands, by JAX's settings and their abstract values; for who
            records it.
    """

    __slots__ = (
        *("constant_bytes", "evaluations", "is_placed", "named", "signature", "stable_digest"),
    )

    def __init__(self, params: dict[str, Any]) -> None:
        self.signature = next(_numbers)
        self.stable_digest: bytes | Exception | None = None
        self.named = jaxapi.named_shardings(params)
        self.is_placed = self.named != jaxapi.NamedShardings()
        self.constant_bytes = jaxapi.constant_bytes(params)
        self.evaluations: dict[Any, Evaluation] = {}

    def evaluate(self, primitive: Any, avals: Sequence[Any], params: dict[str, Any]) -> Evaluation:
        """Return what comes of operands of these abstract values.

        Raises:
            Exception: Whatever JAX raises for operands that do not fit.
        """
        with jaxapi.evaluating():
            results, effects = jaxapi.abstract_evaluate(primitive, avals, params)
            jaxapi.refuse_if_lowering_refuses(primitive, avals, params)
        results = tuple(results)
        weight, work = jaxapi.extent(primitive, params, avals, results)
        if self.named.ends_program:
            pairs = zip(results, self.named.results, strict=True)
            results = tuple([jaxapi.type_with_sharding(*pair) for pair in pairs])
        refusal = _refusal(primitive, params, results, effects)
        return Evaluation(
            results,
            effects,
            weight,
            work,
            nbytes=0 if refusal else sum(r.size * r.dtype.itemsize for r in results),
            symbol=0 if refusal else _symbols.setdefault((self, *avals, *results), len(_symbols)),
            runs_anywhere="exported" not in params
            and all(refusal or result.sharding.mesh.empty for result in results),
            refusal=refusal,
        )


def _refusal(
    primitive: Any, params: dict[str, Any], results: Sequence[Any], effects: Any
) -> str | None:
    if not all(map(jaxapi.is_array_aval, results)):
        return "ref"
    if not jaxapi.can_wait(effects):
        return "effect"
    if effects and "inspect_sharding" in jaxapi.names_within(primitive, params):
        return "sharding"
    return "float0" if any(map(jaxapi.has_no_values, results)) else None


_symbols: dict[Any, int] = {}


_numbers = itertools.count()
_operations: dict[Any, Operation] = {}
_jaxpr_tokens: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_jaxpr_structures: dict[Any, int] = {}

# Operations that carry a jaxpr, by the identity of their parameters, which JAX hands over unchanged
# at every call of a jitted function, or in new tuples. They are held, so that no address is used
# again.
_by_identity: dict[Any, tuple[Any, Operation]] = {}
_MAX_BY_IDENTITY = 8192


def operation(primitive: Any, params: dict[str, Any], context: Any) -> Operation:
    """Return what is known of an operation, whatever its operands."""
    jaxpr = params.get("jaxpr")
    if jaxpr is None or getattr(jaxpr, "consts", None):  # constants may be large: not held here
        return _by_value(primitive, params, context)
    key = (primitive, context, tuple(params), tuple(map(_identities, params.values())))
    cached = _by_identity.get(key)
    if cached is None:
        if len(_by_identity) >= _MAX_BY_IDENTITY:
            _by_identity.clear()
        cached = (tuple(params.values()), _by_value(primitive, params, context))
        _by_identity[key] = cached
    return cached[1]


def _identities(parameter: Any) -> Any:
    if type(parameter) is tuple:
        return tuple(map(identity, parameter))
    return identity(parameter)


# By primitive, the parameters that say how to transform an operation, and nothing of what it
# computes. They are functions, made anew whenever JAX or the user's code traces the operation.
_FOR_TRANSFORMATIONS: dict[str, frozenset[str]] = {
    "checkpoint": frozenset({"policy"}),
    "custom_jvp_call": frozenset({"jvp_jaxpr_fun"}),
    "custom_vjp_call": frozenset({"bwd", "fwd_jaxpr_thunk", "out_trees"}),
    "linear_call": frozenset({"transpose_thunk"}),
    "reduce": frozenset({"computation"}),  # its jaxpr says it, too
    "remat2": frozenset({"policy"}),
}


def computing_params(primitive: Any, params: dict[str, Any]) -> Collection[tuple[str, Any]]:
    """Return the names and values of the parameters that say what an operation computes."""
    hidden = _FOR_TRANSFORMATIONS.get(primitive.name)
    if hidden is None:
        return params.items()
    return [(name, value) for name, value in params.items() if name not in hidden]


def is_known(primitive: Any, params: dict[str, Any], context: Any) -> bool:
    """Return whether an operation has been asked for before."""
    return _key(primitive, params, context) in _operations


def _key(primitive: Any, params: dict[str, Any], context: Any) -> Any:
    of_params = [(name, _parameter_key(v)) for name, v in computing_params(primitive, params)]
    return (primitive, context, tuple(of_params))


def _by_value(primitive: Any, params: dict[str, Any], context: Any) -> Operation:
    key = _key(primitive, params, context)
    cached = _operations.get(key)
    if cached is None:
        cached = _operations[key] = Operation(params)
    return cached


_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_INTEGERS = frozenset({int})


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
        return Identity(value)
    return value


class Identity:
    """Equal to what stands for the same living object; does not keep an array alive."""

    __slots__ = ("address", "referent")

    def __init__(self, value: Any) -> None:
        self.address = id(value)
        try:
            self.referent: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self.referent = lambda: value

    def __hash__(self) -> int:
        return self.address

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identity):
            return False
        referent = self.referent()
        return referent is not None and referent is other.referent()


def _sequence_key(value: Any) -> Any:
    if _INTEGERS.issuperset(map(type, value)):  # most are shapes and axes
        return (type(value), "integers", *value)
    return (type(value), *map(_parameter_key, value))


def _mapping_key(value: dict[Any, Any]) -> Any:
    return (dict, *((_parameter_key(k), _parameter_key(v)) for k, v in value.items()))


def _jaxpr_key(jaxpr: Any) -> Any:
    token = _jaxpr_tokens.get(jaxpr)
    if token is None:
        structure = _jaxpr_structure(jaxpr, _parameter_key, _constant_key)
        token = _jaxpr_structures.get(structure)
        if token is None:
            token = _jaxpr_structures[structure] = next(_numbers)
        _jaxpr_tokens[jaxpr] = token
    return ("jaxpr", token)


def is_same_program(jaxpr: Any, other: Any) -> bool:
    """Return whether two jaxprs have the same operations and constants of equal values."""
    return _key_by_values(jaxpr) == _key_by_values(other)


def _key_by_values(value: Any) -> Any:
    """Return a key as `_parameter_key` does, of which constants take part by their values."""
    kind = type(value)
    if kind in (jaxapi.Jaxpr, jaxapi.ClosedJaxpr):
        return _jaxpr_structure(value, _key_by_values, _constant_key_by_values)
    if isinstance(value, tuple | list):
        return (kind, *map(_key_by_values, value))
    return _parameter_key(value)


def _constant_key_by_values(value: Any) -> Any:
    if (
        jaxapi.is_traced_reference(value)
        or jaxapi.host_literal(value)
        or jaxapi.is_extended_dtype(value.dtype)
    ):
        return _constant_key(value)
    return (jaxapi.typeof(value), np.asarray(value).tobytes())


def _jaxpr_structure(
    closed: Any, parameter_key: Callable[[Any], Any], constant_key: Callable[[Any], Any]
) -> Any:
    """Return a jaxpr as nested tuples with its variables numbered in order of appearance."""
    consts = getattr(closed, "consts", ())
    jaxpr = getattr(closed, "jaxpr", closed)
    numbers: dict[Any, int] = {}

    def variable(atom: Any) -> Any:
        if isinstance(atom, jaxapi.JaxprLiteral):
            return ("literal", atom.aval, constant_key(atom.val))
        return numbers.setdefault(atom, len(numbers))

    def binders(variables: Any) -> Any:
        return tuple([(variable(v), v.aval) for v in variables])

    def parameters(equation: Any) -> Any:
        params = computing_params(equation.primitive, equation.params)
        return tuple([(name, parameter_key(value)) for name, value in params])

    inputs = binders([*jaxpr.constvars, *jaxpr.invars])
    equations = tuple(
        [
            (
                equation.primitive,
                equation.ctx,
                tuple([variable(atom) for atom in equation.invars]),
                parameters(equation),
                binders(equation.outvars),
            )
            for equation in jaxpr.eqns
        ]
    )
    outputs = tuple([variable(atom) for atom in jaxpr.outvars])
    return (inputs, equations, outputs, tuple(map(constant_key, consts)))


def _constant_key(value: Any) -> Any:
    if jaxapi.is_traced_reference(value):  # of a kernel, whose operand it is as well
        return jaxapi.typeof(value)
    if jaxapi.host_literal(value):
        return (type(value), jaxapi.typeof(value), jaxapi.literal_bytes(value))
    if isinstance(value, np.ndarray):  # each trace has a copy of its own
        return (jaxapi.typeof(value), blake3(jaxapi.literal_bytes(value)).digest())
    return Identity(value)


_CONVERSIONS: dict[type, Callable[[Any], Any]] = {
    jaxapi.Jaxpr: _jaxpr_key,
    jaxapi.ClosedJaxpr: _jaxpr_key,
    list: _sequence_key,
    tuple: _sequence_key,
    dict: _mapping_key,
}
