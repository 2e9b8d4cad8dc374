"""XLA's messages and literals survive being read and written."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snaprt import jaxapi
from snaprt.errors import SnapshotError
from snaprt.hlo import proto
from snaprt.hlo.literals import (
    ELEMENT_TYPES,
    array_to_literal,
    literal_to_array,
)

DTYPES = [row.dtype for row in ELEMENT_TYPES.values() if row.dtype is not None]
KNOWN_TO_JAX = [dtype for dtype in DTYPES if dtype.name not in ("int1", "uint1")]


def test_what_is_not_in_the_table_of_fields_comes_back_out() -> None:
    def program(x):
        return jnp.sort(jax.lax.conv_general_dilated(x, x, (1, 1), "SAME")), x.at[0].add(1.0)

    x = np.ones((2, 2, 5, 5), np.float32)
    content = jaxapi.hlo_proto(jax.jit(program).lower(x))
    message = proto.parse(proto.HloModuleProto, content, "test")
    again = proto.serialize(message)
    assert len(again) == len(content)
    assert jaxapi.hlo_text(again) == jaxapi.hlo_text(content)


def test_a_message_that_is_cut_short_is_refused() -> None:
    content = jaxapi.hlo_proto(jax.jit(jnp.sin).lower(1.0))
    with pytest.raises(SnapshotError, match=r"FILE: not a complete xla\.HloModuleProto"):
        proto.parse(proto.HloModuleProto, content[:-1], "FILE")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_literal_of_any_type_gives_its_array_back(dtype: np.dtype) -> None:
    whole = np.arange(-6, 6) if np.dtype(dtype).kind == "i" else np.arange(12)
    value = whole.reshape(3, 4).astype(dtype)
    literal = proto.LiteralProto()
    literal.ParseFromString(proto.serialize(array_to_literal(value)))
    back = literal_to_array(literal)
    assert back.dtype == value.dtype
    assert back.shape == value.shape
    np.testing.assert_array_equal(back.astype(np.complex128), value.astype(np.complex128))


@pytest.mark.parametrize("dtype", KNOWN_TO_JAX, ids=str)
def test_xla_reads_the_literals_that_are_written_here(dtype: np.dtype) -> None:
    value = np.arange(8).reshape(2, 4).astype(dtype)
    literal = array_to_literal(value)
    content = jaxapi.parse_hlo_text("HloModule m\nENTRY e {\n  ROOT c = f32[] constant(0)\n}\n")
    module = proto.parse(proto.HloModuleProto, content, "test")
    (constant,) = module.computations[0].instructions
    constant.literal.CopyFrom(literal)
    for shape in (
        constant.shape,
        module.computations[0].program_shape.result,
        module.host_program_shape.result,
    ):
        shape.CopyFrom(literal.shape)
    stored = jaxapi.parse_hlo_text(jaxapi.hlo_text(proto.serialize(module)))
    again = proto.parse(proto.HloModuleProto, stored, "test").computations[0].instructions[0]
    np.testing.assert_array_equal(
        literal_to_array(again.literal).astype(np.complex128), value.astype(np.complex128)
    )


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_integers_of_every_length_survive(values: list[int]) -> None:
    array = np.array(values, np.int64)
    np.testing.assert_array_equal(literal_to_array(array_to_literal(array)), array)


def test_elements_lie_in_the_order_of_the_literals_own_layout() -> None:
    value = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    literal = array_to_literal(np.ascontiguousarray(value.transpose(1, 2, 0)))
    # The bytes now run over dimensions 1, 2, 0 of the value: the minor-most is 0.
    literal.shape.dimensions[:] = [2, 3, 4]
    literal.shape.layout.minor_to_major[:] = [0, 2, 1]
    np.testing.assert_array_equal(literal_to_array(literal), value)


def test_packed_narrow_integers_are_read_too() -> None:
    literal = array_to_literal(np.zeros(5, ELEMENT_TYPES[22].dtype))
    literal.u4s = bytes([0x21, 0x43, 0x05])
    assert [int(one) for one in literal_to_array(literal)] == [1, 2, 3, 4, 5]


def test_a_literal_with_elements_missing_is_refused() -> None:
    for dtype in (np.int32, np.float32, np.bool_):
        literal = array_to_literal(np.ones(5, dtype))
        literal.shape.dimensions[:] = [6]
        with pytest.raises(SnapshotError, match="holds 5 elements, not 6"):
            literal_to_array(literal)
