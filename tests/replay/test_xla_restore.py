"""Operations that only an optimized module has are said again in ones that XLA compiles."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from snaprt_replay.hlo.hlo_module import verify
from snaprt_replay.load.restore import restore
from snaprt_replay.load.xla_files import load_hlo_text

from snaprt import jaxapi
from snaprt.compile.module import compile_module
from snaprt.errors import SnapshotError
from snaprt.hlo import proto


def run(folder: Path, body: str, *inputs: np.ndarray) -> list[np.ndarray]:
    path = folder / "module.txt"
    path.write_text(f"HloModule m, is_scheduled=true\n\n{body}")
    loaded = load_hlo_text(path)
    return compile_module(loaded.stablehlo, device=jax.devices("cpu")[0]).run(inputs)


def parsed(body: str) -> proto.XlaMessage:
    text = f"HloModule m, is_scheduled=true\n\n{body}"
    return proto.parse(proto.HloModuleProto, jaxapi.parse_hlo_text(text), "test")


X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def test_a_bitcast_follows_the_bytes_under_both_layouts(tmp_path: Path) -> None:
    body = """ENTRY e {
  p = f32[2,3,4]{2,1,0} parameter(0)
  c = f32[2,3,4]{0,2,1} copy(p)
  b = f32[4,6]{0,1} bitcast(c)
  ROOT r = f32[4,6]{1,0} copy(b)
}
"""
    # The bytes of c lie in order of dimensions 1, 2, 0; those of b in order of 1, 0.
    expected = X.transpose(1, 2, 0).reshape(6, 4).T
    np.testing.assert_array_equal(run(tmp_path, body, X)[0], expected)


@pytest.mark.parametrize(
    ("element", "dimensions", "layout", "dtype"),
    [
        ("s32", "2,3,4", "2,1,0", np.int32),
        ("u8", "2,3,4,4", "3,2,1,0", np.uint8),
        ("u16", "2,3,8", "2,1,0", np.uint16),
        ("f64", "2,3,2", "2,1,0", np.float64),
    ],
)
def test_a_bitcast_to_another_type_reads_the_same_bytes(
    tmp_path: Path, element: str, dimensions: str, layout: str, dtype: type
) -> None:
    body = f"""ENTRY e {{
  p = f32[2,3,4]{{2,1,0}} parameter(0)
  ROOT b = {element}[{dimensions}]{{{layout}}} bitcast(p)
}}
"""
    shape = [int(size) for size in dimensions.split(",")]
    (result,) = run(tmp_path, body, X)
    assert result.tobytes() == X.tobytes()
    assert result.reshape(shape).dtype == dtype


def test_a_constant_keeps_its_values_when_its_layout_goes(tmp_path: Path) -> None:
    body = """ENTRY e {
  p = s32[2,3]{1,0} parameter(0)
  c = s32[2,3]{0,1} constant({{1, 2, -3}, {4, 5, 600000}})
  ROOT a = s32[2,3]{1,0} add(p, c)
}
"""
    (result,) = run(tmp_path, body, np.zeros((2, 3), np.int32))
    np.testing.assert_array_equal(result, [[1, 2, -3], [4, 5, 600000]])


def test_asynchronous_operations_become_plain_ones(tmp_path: Path) -> None:
    body = """wrapped {
  a = f32[2,3,4]{2,1,0} parameter(0)
  ROOT n = f32[2,3,4]{2,1,0} negate(a)
}

ENTRY e {
  p = f32[2,3,4]{2,1,0} parameter(0)
  s = ((f32[2,3,4]{2,1,0}), f32[2,3,4]{2,1,0}, s32[]) async-start(p), calls=wrapped
  u = ((f32[2,3,4]{2,1,0}), f32[2,3,4]{2,1,0}, s32[]) async-update(s), calls=wrapped
  d = f32[2,3,4]{2,1,0} async-done(u), calls=wrapped
  cs = (f32[2,3,4]{2,1,0}, f32[2,3,4]{2,1,0}, u32[]) copy-start(d)
  ROOT cd = f32[2,3,4]{2,1,0} copy-done(cs)
}
"""
    np.testing.assert_array_equal(run(tmp_path, body, X)[0], -X)


def test_a_tuple_parameter_becomes_one_parameter_for_each_element(tmp_path: Path) -> None:
    body = """ENTRY e {
  p = (f32[2,3,4]{2,1,0}, f32[]) parameter(0)
  q = f32[] parameter(1)
  x = f32[2,3,4]{2,1,0} get-tuple-element(p), index=0
  y = f32[] get-tuple-element(p), index=1
  z = f32[] subtract(y, q)
  b = f32[2,3,4]{2,1,0} broadcast(z), dimensions={}
  ROOT m = f32[2,3,4]{2,1,0} multiply(x, b)
}
"""
    (result,) = run(tmp_path, body, X, np.float32(5), np.float32(2))
    np.testing.assert_array_equal(result, X * 3)


def test_a_custom_call_keeps_the_layouts_it_ran_with_and_its_configuration() -> None:
    module = parsed("""ENTRY e {
  p = f32[2,3]{0,1} parameter(0)
  ROOT c = f32[2,3]{0,1} custom-call(p), custom_call_target="f", backend_config="{x = 1 : ui8}"
}
""")
    restore(module)
    (call,) = (one for one in module.computations[0].instructions if one.opcode == "custom-call")
    assert call.constrain_layout
    assert list(call.operand_shapes_with_layout[0].layout.minor_to_major) == [0, 1]
    assert call.backend_config == b"{x = 1 : ui8}"


def test_a_module_that_talks_to_the_host_is_refused() -> None:
    module = parsed("""ENTRY e {
  t = token[] after-all()
  i = (f32[3]{0}, token[]) infeed(t)
  ROOT r = f32[3]{0} get-tuple-element(i), index=0
}
""")
    with pytest.raises(SnapshotError, match="infeed"):
        restore(module)


def test_new_instructions_have_ids_and_names_of_their_own() -> None:
    module = parsed("""ENTRY e {
  p = f32[2,3,4]{2,1,0} parameter(0)
  a = f32[2,3,4]{0,1,2} copy(p)
  b = f32[4,6]{0,1} bitcast(a)
  c = f32[24]{0} bitcast(b)
  ROOT d = f32[6,4]{0,1} bitcast(c)
}
""")
    restore(module)
    made = list(module.computations[0].instructions)
    assert len(made) > 5
    assert len({one.id & 0xFFFFFFFF for one in made}) == len(made)
    assert len({one.name for one in made}) == len(made)


def test_restoring_twice_changes_nothing_more() -> None:
    module = parsed("""ENTRY e {
  p = f32[2,3]{1,0} parameter(0)
  ROOT b = f32[3,2]{0,1} bitcast(p)
}
""")
    restore(module)
    once = proto.serialize(module)
    assert restore(module) == ()
    assert proto.serialize(module) == once


def _drop_operand(module: proto.XlaMessage) -> None:
    module.computations[0].instructions[-1].operand_ids[0] = 12345


def _forget_an_operand(module: proto.XlaMessage) -> None:
    module.computations[0].instructions[-1].operand_ids.pop()


def _drop_root(module: proto.XlaMessage) -> None:
    module.computations[0].root_id = 12345


def _share_an_id(module: proto.XlaMessage) -> None:
    first, second = module.computations[0].instructions[:2]
    second.id = first.id


def _drop_entry(module: proto.XlaMessage) -> None:
    module.entry_computation_id = 12345


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop_operand, "not defined yet"),
        (_forget_an_operand, "reads 1 values"),
        (_drop_root, "no root"),
        (_share_an_id, "has the same id"),
        (_drop_entry, "no entry"),
    ],
)
def test_a_malformed_module_is_refused_before_xla_sees_it(damage, message: str) -> None:
    module = parsed("""ENTRY e {
  p = f32[] parameter(0)
  q = f32[] parameter(1)
  ROOT a = f32[] add(p, q)
}
""")
    damage(module)
    with pytest.raises(SnapshotError, match=message):
        verify(module)
