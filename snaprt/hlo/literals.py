"""XLA's element types, and its literals as numpy arrays and back."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import ml_dtypes
import numpy as np

from snaprt.errors import SnapshotError
from snaprt.hlo import proto
from snaprt.hlo.proto import LiteralProto, ShapeProto, XlaMessage

_LENGTH = 8  # the bytes of the length that precedes a literal that XLA serialized
TUPLE = 13
OPAQUE = 14
TOKEN = 17


@dataclasses.dataclass(frozen=True)
class ElementType:
    """One row of XLA's enumeration PrimitiveType (xla/xla_data.proto)."""

    number: int  # its value on the wire
    name: str  # XLA's name for it in HLO text
    dtype: np.dtype | None  # numpy's, or ml_dtypes' own; None where this ml_dtypes has none
    bits: int  # the width of an element
    varint: bool  # whether a literal holds the elements as protobuf varints, not as plain bytes

    @property
    def literal_field(self) -> str:
        """Return the field of LiteralProto that holds elements of this type."""
        return f"{self.name}s"


_VARINTS = ("s32", "s64", "u32", "u64")


def _element_type(number: int, name: str, dtype_name: str) -> ElementType:
    width = re.match(r"[a-z]+(\d*)", name)
    bits = int(width[1]) if width and width[1] else 8
    scalar = getattr(ml_dtypes, dtype_name, None) or getattr(np, dtype_name, None)
    dtype = None if scalar is None else np.dtype(scalar)
    return ElementType(number, name, dtype, bits, name in _VARINTS)


ELEMENT_TYPES: Mapping[int, ElementType] = MappingProxyType(
    {number: _element_type(number, name, dtype) for number, name, dtype, _ in proto.ELEMENT_TYPES}
)
_BY_DTYPE = {row.dtype: row for row in ELEMENT_TYPES.values() if row.dtype is not None}


_NEWER_XLA = "The file is damaged, or a newer XLA wrote it."
#: Numbers of the enumeration that are no elements of arrays: what they are, and what to do.
_NO_ARRAYS = {
    0: ("0 stands for no type", "The file is damaged; dump it again, or record with snaprt."),
    TUPLE: ("a tuple", "The file is damaged: XLA splits tuples."),
    OPAQUE: ("opaque", "Only the device can read such a value; replay a part without it."),
    TOKEN: ("a token", "A token orders effects and has no value; dump the module without it."),
}


def element_type_of(shape: XlaMessage) -> ElementType:
    """Return the element type of an array's ShapeProto.

    Raises:
        SnapshotError: It is not an array, or of a type unknown here or to the installed ml_dtypes.
    """
    row = ELEMENT_TYPES.get(shape.element_type)
    if row is None or row.dtype is None:
        number = shape.element_type
        type_name, hint = _NO_ARRAYS.get(number, (f"number {number}", _NEWER_XLA))
        if row is not None:
            type_name, hint = (
                row.name,
                "A newer ml_dtypes may support it: pip install -U ml_dtypes.",
            )
        raise SnapshotError(
            f"its XLA element type, {type_name}, has no NumPy equivalent.", hint=hint
        )
    return row


def dtype_of(shape: XlaMessage) -> np.dtype:
    """Return the numpy dtype of an array's ShapeProto; raise SnapshotError if it has none."""
    dtype = element_type_of(shape).dtype
    assert dtype is not None  # element_type_of has looked
    return dtype


def leaf_shapes(shape: XlaMessage) -> Iterator[XlaMessage]:
    """Yield the shapes of a possibly nested tuple that are not tuples, in order."""
    if shape.element_type == TUPLE:
        for element in shape.tuple_shapes:
            yield from leaf_shapes(element)
    else:
        yield shape


def minor_to_major(shape: XlaMessage) -> tuple[int, ...]:
    """Return an array shape's layout, fastest varying dimension first; row-major if it has none.

    Raises:
        SnapshotError: The layout is not an ordering of the shape's dimensions.
    """
    rank = len(shape.dimensions)
    order = tuple(shape.layout.minor_to_major)
    if not order:
        return tuple(reversed(range(rank)))
    if sorted(order) != list(range(rank)):
        raise SnapshotError(f"The layout {list(order)} does not fit an array of {rank} dimensions.")
    return order


def array_shape(dtype: np.dtype, dimensions: tuple[int, ...]) -> XlaMessage:
    """Return the ShapeProto of a row-major array; raise SnapshotError if XLA has no such type."""
    row = _BY_DTYPE.get(dtype)
    if row is None:
        raise SnapshotError(f"XLA has no element type for numpy's {dtype}.")
    shape = ShapeProto(element_type=row.number, dimensions=dimensions)
    shape.is_dynamic_dimension.extend([False] * len(dimensions))
    shape.layout.minor_to_major.extend(reversed(range(len(dimensions))))
    return shape


def literal_leaves(literal: XlaMessage) -> Iterator[XlaMessage]:
    """Yield the array literals of a possibly nested tuple literal, in order."""
    if literal.shape.element_type == TUPLE:
        for element in literal.tuple_literals:
            yield from literal_leaves(element)
    elif literal.shape.element_type != TOKEN:
        yield literal


def literal_to_array(literal: XlaMessage) -> np.ndarray:
    """Return an array literal's elements in C order.

    Args:
        literal: A LiteralProto of an array. Its elements lie in the order of its own layout.

    Returns:
        An array of the literal's dimensions; read-only where it shares the message's bytes.

    Raises:
        SnapshotError: It has too few or too many elements, or a type that numpy cannot hold.
    """
    row = element_type_of(literal.shape)
    dtype = dtype_of(literal.shape)
    dimensions = tuple(literal.shape.dimensions)
    count = int(np.prod(dimensions, dtype=np.int64))
    content = getattr(literal, row.literal_field)
    if row.varint:
        flat = _decode_varints(content, dtype)
    else:
        flat = _read_bytes(row, dtype, content, count)
    if flat.size != count:
        raise SnapshotError(
            f"A literal {row.name}{list(dimensions)} holds {flat.size} elements, not {count}.",
            hint="The file is damaged; dump it again.",
        )
    return _in_c_order(flat, literal.shape)


def _in_c_order(flat: np.ndarray, shape: XlaMessage) -> np.ndarray:
    """Return an array of a shape, given its elements in the order of the shape's layout."""
    dimensions = tuple(shape.dimensions)
    major_to_minor = tuple(reversed(minor_to_major(shape)))
    physical = flat.reshape([dimensions[dimension] for dimension in major_to_minor])
    return np.ascontiguousarray(physical.transpose(np.argsort(major_to_minor))).reshape(dimensions)


def read_literal(content: memoryview) -> Iterator[np.ndarray]:
    """Yield the arrays of a literal as XLA's ``Literal::Serialize`` writes it.

    Args:
        content: The length of a ShapeProto in 8 bytes, the ShapeProto, and the bytes of each array
            of it, those of elements under a byte packed, low bits first.

    Yields:
        The arrays, in C order; read-only where they share the content's bytes.

    Raises:
        SnapshotError: It is cut short, or has a type that numpy cannot hold.
    """
    end = _LENGTH + int.from_bytes(content[:_LENGTH], "little")
    shape = proto.parse(ShapeProto, content[_LENGTH:end], "a literal")
    for leaf in leaf_shapes(shape):
        if leaf.element_type == TOKEN:
            continue
        row, dtype = element_type_of(leaf), dtype_of(leaf)
        count = math.prod(leaf.dimensions)
        start, end = end, end + -(-count * row.bits // 8)
        if end > len(content) or min(leaf.dimensions, default=0) < 0:
            raise SnapshotError(
                f"A literal {row.name}{list(leaf.dimensions)} is cut short or damaged.",
                hint="Dump the file again.",
            )
        yield _in_c_order(_read_bytes(row, dtype, content[start:end], count), leaf)


def array_to_literal(value: np.ndarray) -> XlaMessage:
    """Return the row-major LiteralProto of an array; raise SnapshotError for a foreign dtype."""
    literal = LiteralProto(shape=array_shape(value.dtype, value.shape))
    row = _BY_DTYPE[value.dtype]
    flat = np.ascontiguousarray(value).reshape(-1)
    if row.varint:
        content = _encode_varints(flat)
    elif row.bits < 8:
        content = (flat.view(np.uint8) & (2**row.bits - 1)).tobytes()
    else:
        content = flat.tobytes()
    setattr(literal, row.literal_field, content)
    return literal


def _read_bytes(
    row: ElementType, dtype: np.dtype, content: bytes | memoryview, count: int
) -> np.ndarray:
    if row.bits < 8:
        return _widen(row, np.frombuffer(content, np.uint8), count).view(dtype)
    if row.name == "pred":
        return np.frombuffer(content, np.uint8).astype(np.bool_)
    if len(content) % dtype.itemsize:
        raise SnapshotError(
            f"A literal of {row.name} holds {len(content)} bytes, not a whole number of elements.",
            hint="The file is damaged; dump it again.",
        )
    return np.frombuffer(content, dtype)


def _widen(row: ElementType, stored: np.ndarray, count: int) -> np.ndarray:
    """Return one byte per element, in its low bits as ml_dtypes has it, of types under a byte.

    XLA writes such literals with one element a byte, and once wrote them packed, low bits first.
    """
    per_byte = 8 // row.bits
    if stored.size != count and stored.size == -(-count // per_byte):
        shifts = np.arange(per_byte, dtype=np.uint8) * row.bits
        stored = (stored[:, None] >> shifts).reshape(-1)[:count]
    return stored & (2**row.bits - 1)


def _decode_varints(content: bytes, dtype: np.dtype) -> np.ndarray:
    """Decode packed protobuf varints: 7 bits a byte, low ones first, top bit set but on the last.

    A negative number is sign-extended to 64 bits first, which makes ten bytes of it.
    """
    stored = np.frombuffer(content, np.uint8)
    if stored.size and stored[-1] & 0x80:
        raise SnapshotError(
            "A literal ends in the middle of a number.", hint="The file is damaged."
        )
    ends = np.flatnonzero(stored < 0x80)
    starts = np.concatenate([[0], ends[:-1] + 1]) if ends.size else ends
    lengths = ends - starts + 1
    if lengths.size and lengths.max() > 10:
        raise SnapshotError(
            "A literal has a number of more than ten bytes.", hint="The file is damaged."
        )
    values = np.zeros(ends.size, np.uint64)
    for position in range(int(lengths.max(initial=0))):
        longer = lengths > position
        part = (stored[starts[longer] + position] & 0x7F).astype(np.uint64)
        values[longer] |= part << np.uint64(7 * position)
    return values.astype(dtype)


def _encode_varints(flat: np.ndarray) -> bytes:
    wide = flat.astype(np.int64) if flat.dtype.kind == "i" else flat
    values = wide.astype(np.uint64)
    lengths = np.ones(values.size, np.int64)
    for position in range(1, 10):
        lengths += values >> np.uint64(7 * position) != 0
    ends = np.cumsum(lengths)
    stored = np.zeros(int(ends[-1]) if ends.size else 0, np.uint8)
    starts = ends - lengths
    for position in range(int(lengths.max(initial=0))):
        longer = lengths > position
        part = (values[longer] >> np.uint64(7 * position)).astype(np.uint8) & np.uint8(0x7F)
        more = np.where(lengths[longer] > position + 1, np.uint8(0x80), np.uint8(0))
        stored[starts[longer] + position] = part | more
    return stored.tobytes()
