"""A digest of a recorded program that is the same in every process and on every machine.

It is the first level of the cache's key: a program whose digest is known need not be lowered. So it
must never be equal for programs that differ. Whatever cannot be proved to mean the same elsewhere
(a Python function among the parameters, a primitive that is not JAX's own) makes a program
unstable, and the module that it lowers to decides.
"""

from __future__ import annotations

import dataclasses
import enum
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

import jax
import numpy as np
from blake3 import blake3

from snaprt import jaxapi
from snaprt.graph.operation import computing_params
from snaprt.graph.program import Node, Program

#: Goes up when a program is described in another way: digests of older versions then match nothing.
VERSION = 5

#: Constants larger than this are not fetched from the device to be hashed.
_MAX_CONSTANT_BYTES = 1 << 24

# Classes of JAX whose text form says all there is to them.
_TOLD_BY_TEXT = frozenset(
    {
        *(
            "AbstractMesh",
            "AutoLayout",
            "AutoLayoutSingleton",
            "Format",
            "JaxprEqnContext",
        ),
        *("Layout", "ManualAxisType", "PartitionSpec", "PyTreeDef"),
        *("UnconstrainedSingleton", "UnspecifiedValue"),
    }
)


class Unstable(Exception):  # noqa: N818 - a finding, caught by who asked for the digest
    """A program holds something whose identity cannot be proved stable; the message names it."""


def program_digest(program: Program, promoted: frozenset[int]) -> str:
    """Return 64 hexadecimal digits that stand for what ``program`` computes, and how.

    Args:
        program: The program, still with its nodes' parameters.
        promoted: The literals that are arguments; the values of the others take part.

    Raises:
        Unstable: It has no digest that another process could rely on.
    """
    content = bytearray()
    _encode((VERSION, jaxapi.configuration()), content)
    for node, wires in zip(program.nodes, program.wiring, strict=True):
        content += node_digest(node)
        content += _wires_form(wires)
    for index, literal in enumerate(program.literals):
        _encode((literal.aval, None if index in promoted else literal.key), content)
    placement = program.placement
    for x in program.inputs:
        # What is committed decides where a program runs: then all other arrays go there, from
        # whatever device they are on, which is another one in each process of a job.
        follows = bool(placement.devices) and not x.committed and len(x.sharding.device_set) == 1
        place = ("follows", x.sharding.memory_kind) if follows else x.sharding
        _encode((jaxapi.typeof(x), place, x.committed), content)
    _encode((program.outputs, sorted(promoted), program.donated), content)
    devices = [device.id for device in placement.devices]
    default = placement.default_device
    default_id = default.id if hasattr(default, "id") else default
    _encode((placement.committed, devices, default_id, placement.x64, placement.mesh), content)
    return blake3(bytes(content)).hexdigest()


def lowering_digest(lowering: jaxapi.Lowering) -> str:
    """Return 64 hexadecimal digits that stand for the module that JAX lowers a program to.

    Raises:
        Unstable: It has no digest that another process could rely on.
    """
    if " at 0x" in lowering.context:
        raise Unstable("the context")
    content = bytearray()
    _encode((VERSION, jaxapi.configuration(), lowering.context, lowering.names), content)
    _encode((lowering.jaxpr, lowering.arguments), content)
    return blake3(bytes(content)).hexdigest()


def node_digest(node: Node) -> bytes:
    """Return 32 bytes that stand for an operation whatever its operands; found once in a process.

    Raises:
        Unstable: It has no digest that another process could rely on.
    """
    outcome = node.operation.stable_digest
    if outcome is None:
        content = bytearray()
        try:
            _encode_operation(node.primitive, node.params, content)
            _encode(node.context, content)
            outcome = blake3(bytes(content)).digest()
        except Unstable as reason:
            outcome = reason
        node.operation.stable_digest = outcome
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _encode_operation(primitive: Any, params: dict[str, Any], out: bytearray) -> None:
    module = jaxapi.lowering_module(primitive)
    if module.partition(".")[0] not in ("jax", "jaxlib"):
        raise Unstable(f"primitive {primitive.name}")
    _text(module, primitive.name, out)
    for name, value in sorted(computing_params(primitive, params), key=itemgetter(0)):
        _text("", name, out)
        _encode(value, out)
    out += b";"


def _encode(value: Any, out: bytearray) -> None:
    """Append a form of ``value`` from which it could be told apart from every other value."""
    kind = type(value)
    encoder = _ENCODERS.get(kind)
    if encoder is not None:
        encoder(value, out)
        return None
    ours = kind.__module__.partition(".")[0] in ("jax", "jaxlib")
    if jaxapi.is_extended_dtype(value):
        return _encode_key_type(value, out)
    if ours and kind.__name__ in _TOLD_BY_TEXT:
        text = repr(value)
        if " at 0x" in text:
            raise Unstable(f"{kind.__module__}.{kind.__qualname__}")
        return _text(kind.__name__, text, out)
    if ours and kind.__name__ == "PRNGImpl":
        return _encode_key_type(value, out)
    for base, encoder in _ENCODERS_OF_BASES:
        if isinstance(value, base):
            if isinstance(value, np.dtype):  # of which programs are full
                _ENCODERS[kind] = encoder
            return encoder(value, out)
    if ours and kind.__module__.endswith(".flattree"):  # of JAX 0.12
        return _items(kind.__name__, vars(value).items(), out)
    if ours and dataclasses.is_dataclass(value):
        fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
        return _items(kind.__name__, fields, out)
    raise Unstable(f"{kind.__module__}.{kind.__qualname__}")


def _text(kind: str, text: str, out: bytearray) -> None:
    content = text.encode()
    out += f"{kind}:{len(content)}:".encode()
    out += content


def _wires_form(wires: Iterable[tuple[int, int]]) -> bytes:
    """Return what `_encode` makes of them, in a sixth of the time: most of a program is wires."""
    forms = [
        f"tuple[2int:{len(str(origin))}:{origin}int:{len(str(index))}:{index}]"
        for origin, index in wires
    ]
    return f"tuple[{len(forms)}{''.join(forms)}]".encode()


def _items(kind: str, items: Iterable[Any], out: bytearray) -> None:
    items = list(items)
    out += f"{kind}[{len(items)}".encode()
    for item in items:
        _encode(item, out)
    out += b"]"


def _encode_key_type(value: Any, out: bytearray) -> None:
    name = jaxapi.own_key_type(value)
    if name is None:
        raise Unstable("PRNG keys of a user-defined implementation")
    _text(type(value).__name__, name, out)


def _encode_array(value: Any, out: bytearray) -> None:
    if value.size * value.dtype.itemsize > _MAX_CONSTANT_BYTES:
        raise Unstable("a large constant")
    if jax.numpy.issubdtype(value.dtype, jax.dtypes.extended):
        raise Unstable("a constant of an extended dtype")
    host = np.asarray(value)
    _encode((jaxapi.typeof(value), host.tobytes()), out)


def _encode_sharding(sharding: Any, out: bytearray) -> None:
    if isinstance(sharding, jax.sharding.NamedSharding):
        _encode(("named", sharding.mesh, repr(sharding.spec), sharding.memory_kind), out)
    elif isinstance(sharding, jax.sharding.SingleDeviceSharding):
        ids = [getattr(device, "id", None) for device in sharding.device_set]
        _encode(("single", ids, sharding.memory_kind), out)
    else:
        raise Unstable(type(sharding).__name__)


def _encode_mesh(mesh: Any, out: bytearray) -> None:
    # The empty mesh has one device, which is None.
    ids = [getattr(device, "id", None) for device in mesh.devices.flat]
    _encode(("mesh", mesh.axis_names, mesh.axis_sizes, repr(mesh.axis_types), ids), out)


# JAX has one object for equal ones: the variables of a program have few types.
_aval_forms: weakref.WeakKeyDictionary[Any, bytes] = weakref.WeakKeyDictionary()


def _encode_aval(aval: Any, out: bytearray) -> None:
    form = _aval_forms.get(aval)
    if form is None:
        content = bytearray()
        varying = repr(getattr(aval, "manual_axis_type", None))
        parts = (aval.shape, aval.dtype, aval.weak_type, varying, repr(aval.memory_space))
        layout = jaxapi.layout_of_type(aval)
        _encode(("aval", parts, aval.sharding, *(() if layout is None else (layout,))), content)
        form = _aval_forms[aval] = bytes(content)
    out += form


_jaxpr_digests: weakref.WeakKeyDictionary[Any, bytes] = weakref.WeakKeyDictionary()


def _encode_jaxpr(closed: Any, out: bytearray) -> None:
    digest = _jaxpr_digests.get(closed)
    if digest is None:
        content = bytearray()
        _encode_equations(closed, content)
        digest = _jaxpr_digests[closed] = blake3(bytes(content)).digest()
    _encode(("jaxpr", digest), out)


def _encode_equations(closed: Any, out: bytearray) -> None:
    jaxpr = getattr(closed, "jaxpr", closed)
    numbers: dict[Any, int] = {}

    def encode_atoms(kind: str, atoms: Sequence[Any]) -> None:
        out.extend(f"{kind}{len(atoms)}|".encode())
        for atom in atoms:
            is_literal = isinstance(atom, jaxapi.JaxprLiteral)
            number = None if is_literal else numbers.get(atom)
            if number is not None:
                out.extend(b"%d:" % number)
                continue
            if is_literal:
                out.extend(b"=")
                _encode(atom.val, out)
            else:
                numbers[atom] = len(numbers)
                out.extend(b":")
            _encode(atom.aval, out)

    encode_atoms("in", [*jaxpr.constvars, *jaxpr.invars])
    _encode(list(getattr(closed, "consts", ())), out)
    contexts: dict[int, bytearray] = {}  # most operations share one
    for equation in jaxpr.eqns:
        context = contexts.get(id(equation.ctx))
        if context is None:
            context = contexts[id(equation.ctx)] = bytearray()
            _encode(equation.ctx, context)
        _encode_operation(equation.primitive, equation.params, out)
        out += context
        encode_atoms("of", equation.invars)
        encode_atoms("to", equation.outvars)
    encode_atoms("out", jaxpr.outvars)


_Encoder = Callable[[Any, bytearray], None]

_ENCODERS: dict[type, _Encoder] = {
    type(None): lambda value, out: _text("none", "", out),
    bool: lambda value, out: _text("bool", repr(value), out),
    int: lambda value, out: _text("int", repr(value), out),
    float: lambda value, out: _text("float", value.hex(), out),
    complex: lambda value, out: _text("complex", f"{value.real.hex()} {value.imag.hex()}", out),
    str: lambda value, out: _text("str", value, out),
    bytes: lambda value, out: _text("bytes", value.hex(), out),
    tuple: lambda value, out: _items("tuple", value, out),
    list: lambda value, out: _items("list", value, out),
    dict: lambda value, out: _items("dict", value.items(), out),
    jaxapi.Jaxpr: _encode_jaxpr,
    jaxapi.ClosedJaxpr: _encode_jaxpr,
    jaxapi.ShapedArray: _encode_aval,
}

_ENCODERS_OF_BASES: tuple[tuple[type, _Encoder], ...] = (
    (enum.Enum, lambda value, out: _text(type(value).__qualname__, value.name, out)),
    (np.dtype, lambda value, out: _text("dtype", str(value), out)),
    (np.generic, _encode_array),
    (np.ndarray, _encode_array),
    (jax.Array, _encode_array),
    (jax.sharding.Sharding, _encode_sharding),
    (jax.sharding.Mesh, _encode_mesh),
    (float, lambda value, out: _items(type(value).__name__, (float(value), value.dtype), out)),
    (int, lambda value, out: _items(type(value).__name__, (int(value), value.dtype), out)),
    (complex, lambda value, out: _items(type(value).__name__, (complex(value), value.dtype), out)),
    (tuple, lambda value, out: _items(type(value).__qualname__, value, out)),
)
