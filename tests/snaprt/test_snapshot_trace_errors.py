"""Errors raised while a lazy graph is recorded: what a snapshot says of them, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

import snaprt
from snaprt import jaxapi
from snaprt.snapshot.format import schema, trace_errors
from snaprt.snapshot.format.read import SnapshotFile, open_snapshot
from snaprt.snapshot.format.trace_errors import operation_text, raise_again, raises_the_same
from snaprt.snapshot.recorder.record import process_recorder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SNAPRT_RECORD", "error")
    monkeypatch.setenv("SNAPRT_DUMP_DIR", str(tmp_path))
    return tmp_path


def recorded(folder: Path) -> SnapshotFile:
    assert process_recorder().flush(60)
    (path,) = folder.glob("*.snap")
    return open_snapshot(path)


def error_of(file: SnapshotFile) -> schema.TraceErrorRecord:
    error = file.manifest.trace_error
    assert error is not None
    return error


def test_a_bad_shape_leaves_the_graph_so_far_and_the_operation_that_failed(folder: Path) -> None:
    x = jnp.ones((3, 4))
    with snaprt.lazy():
        h = jnp.tanh(x * 2)
        with pytest.raises(TypeError, match="got incompatible shapes"):
            jax.lax.add(h, h.T)
    file = recorded(folder)
    error = error_of(file)
    assert (error.kind, error.primitive) == ("builtins.TypeError", "add")
    assert operation_text(error) == "add(float32[3,4], float32[4,3])"
    assert (error.pending, error.left_out, error.unencodable) == (3, 0, ())
    assert file.manifest.execution.reason == "error"
    module = jaxapi.stablehlo_text(jaxapi.parse_module(file.module.stablehlo))
    assert "stablehlo.tanh" in module
    assert "stablehlo.add" not in module
    np.testing.assert_array_equal(file.array("arg0"), np.ones((3, 4), np.float32))


def test_a_callback_that_cannot_be_vectorized_is_recorded_and_says_what_is_missing(
    folder: Path,
) -> None:
    def double(h: jax.Array) -> Any:
        return jax.pure_callback(lambda a: a * 2, jax.ShapeDtypeStruct(h.shape, h.dtype), h)

    with snaprt.lazy(), pytest.raises(NotImplementedError, match="vmap is only supported"):
        jax.vmap(jax.jit(double))(jnp.ones((3, 4)))
    error = error_of(recorded(folder))
    assert error.primitive == "pure_callback"
    assert error.params["result_avals"]["tuple"][0]["aval"]["text"] == "float32[4]"
    assert "callback" in error.unencodable[0]


def fails_in_jit(h: jax.Array) -> Any:
    return jax.jit(lambda a: jax.lax.add(a, a.T))(h)


def fails_in_scan(h: jax.Array) -> Any:
    return jax.lax.scan(lambda c, _: (jax.lax.add(c, c.T), None), h, None, 3)


def fails_in_grad(h: jax.Array) -> Any:
    return jax.grad(lambda a: jax.lax.add(a, a.T).sum())(h)


def fails_in_vmap(h: jax.Array) -> Any:
    return jax.vmap(lambda a: jax.lax.add(a, h))(h)


@pytest.mark.parametrize("fails", [fails_in_jit, fails_in_scan, fails_in_grad, fails_in_vmap])
def test_the_operation_inside_a_transformation_is_the_one_that_is_recorded(
    fails: Any, folder: Path
) -> None:
    x = jnp.ones((3, 4))
    with snaprt.lazy(), pytest.raises(TypeError) as caught:
        fails(x + 1)
    error = error_of(recorded(folder))
    assert error.primitive == "add"
    assert error.message == str(caught.value)
    assert error.stack[-1].startswith(f"{__file__}:")
    assert f"({fails.__name__}" in error.stack[-1]
    assert any("test_the_operation_inside" in frame for frame in error.stack)
    again = raise_again(error)
    assert (again.kind, again.message) == (error.kind, error.message)


def test_the_user_gets_the_error_as_it_was(folder: Path) -> None:
    x = jnp.ones((3, 4))
    with pytest.raises(TypeError) as eager:
        jax.lax.concatenate([x, x.T], 0)
    with snaprt.lazy(), pytest.raises(TypeError) as lazy:
        jax.lax.concatenate([x, x.T], 0)
    assert str(lazy.value) == str(eager.value)
    assert error_of(recorded(folder)).message == str(eager.value)


def test_what_was_pending_goes_on_after_the_error(folder: Path) -> None:
    with snaprt.lazy():
        h = jnp.ones((3, 4)) + 1
        with pytest.raises(TypeError):
            jax.lax.add(h, h.T)
        assert float(h.sum()) == 24


def test_nothing_is_written_while_recording_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with snaprt.lazy(), pytest.raises(TypeError):
        jax.lax.add(jnp.ones((3, 4)), jnp.ones((4, 3)))
    process_recorder().flush(60)
    assert list(tmp_path.iterdir()) == []


def test_an_error_outside_of_the_lazy_scope_is_none_of_ours(folder: Path) -> None:
    with snaprt.lazy():
        pass
    with pytest.raises(TypeError):
        jax.jit(jax.lax.add)(jnp.ones((3, 4)), jnp.ones((4, 3)))
    process_recorder().flush(60)
    assert list(folder.iterdir()) == []


def test_a_directory_alone_is_enough(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SNAPRT_RECORD")
    with snaprt.lazy(), pytest.raises(TypeError):
        jax.lax.add(jnp.ones((3, 4)) + 1, jnp.ones((4, 3)))
    assert error_of(recorded(folder)).primitive == "add"


def test_a_primitive_of_the_users_own_is_named_and_what_cannot_be_written_too(folder: Path) -> None:
    own = Primitive("my_own")

    @own.def_abstract_eval
    def _(x: Any, *, function: Any, factor: float) -> Any:
        raise ValueError("my_own takes no arrays at all")

    mlir.register_lowering(own, lambda _, x, **params: [x])
    with snaprt.lazy(), pytest.raises(ValueError, match="no arrays at all"):
        own.bind(jnp.ones(3), function=print, factor=1.5)
    error = error_of(recorded(folder))
    assert error.unencodable == ("function (builtins.builtin_function_or_method)",)
    assert "this JAX has no primitive my_own" in raise_again(error).obstacle


CALLS = [
    ("jax.numpy.reshape", lambda x: jnp.reshape(x, (5,))),
    ("jax.lax.dot", lambda x: jax.lax.dot(x, x)),
    ("jax.numpy.split", lambda x: jnp.split(x, 5)),
    ("jax.numpy.linalg.inv", lambda x: jnp.linalg.inv(x)),
    ("jax.numpy.sum", lambda x: jnp.sum(x, axis=5, dtype=jnp.float32)),
    ("jax.nn.softmax", lambda x: jax.nn.softmax(x, axis=7)),
]


@pytest.mark.parametrize(("function", "call"), CALLS, ids=[name for name, _ in CALLS])
def test_where_python_refuses_a_call_the_public_function_stands_for_the_operation(
    function: str, call: Any, folder: Path
) -> None:
    x = jnp.ones((3, 4))
    with pytest.raises((TypeError, ValueError)) as caught, snaprt.lazy():
        call(x + 1)
    error = error_of(recorded(folder))
    assert (error.function, error.primitive) == (function, "")
    assert "float32[3,4]" in operation_text(error)
    assert error.message == str(caught.value)
    assert raises_the_same(error)


def test_a_call_that_has_deleted_its_argument_is_not_taken_for_one_without_it(
    folder: Path,
) -> None:
    with pytest.raises(jax.errors.ConcretizationTypeError), snaprt.lazy():
        jax.jit(jnp.nonzero)(jnp.array([1, 0, 2]) + 1)
    error = error_of(recorded(folder))
    assert "jnp.nonzero" in error.message
    assert not error.function or "a" in error.params  # JAX 0.12 keeps it


def test_an_error_of_the_users_own_code_is_none_of_recording(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError), snaprt.lazy():
        1 / 0  # noqa: B018
    process_recorder().flush(60)
    assert list(folder.iterdir()) == []


def test_a_function_that_jax_does_not_have_or_that_opens_files_is_not_called() -> None:
    for name in ("jax.numpy.load", "jax.numpy.save", "os.system", "jax.numpy.warp"):
        record = schema.TraceErrorRecord("builtins.TypeError", "", (), function=name)
        assert raise_again(record).obstacle == f"this JAX has no function {name}"


def test_64_bit_types_are_as_they_were(folder: Path) -> None:
    with jaxapi.x64(True), snaprt.lazy(), pytest.raises(TypeError):
        jax.lax.add(jnp.ones((3, 4), jnp.float64), jnp.ones((3, 4), jnp.int64))
    error = error_of(recorded(folder))
    assert error.x64
    again = raise_again(error)
    assert (again.kind, again.message) == (error.kind, error.message)
    assert "float64" in again.message


VALUES = [
    *(None, True, 7, -(1 << 70), "text", 1.5, float("inf"), 0.1, 2 - 3j, b"\x00\xff"),
    *((1, (2, "a")), [1, [2]], {"a": (1,), 2: None}),
    *(np.dtype("float32"), jnp.dtype("bfloat16"), np.int8, jax.random.key(0).dtype),
    *(
        jax.lax.GatherScatterMode.CLIP,
        jax.lax.Precision.HIGHEST,
        jax.lax.RoundingMethod.TO_NEAREST_EVEN,
    ),
    jax.lax.GatherDimensionNumbers((0,), (1,), (2,)),
    jax.lax.ConvDimensionNumbers((0, 1), (0, 1), (0, 1)),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_parameter_comes_back_as_it_was(value: Any) -> None:
    data = json.loads(json.dumps(trace_errors.encode(value)))
    assert not list(trace_errors.unencodable(data))
    again = trace_errors.decode(data)
    assert again == value
    assert type(again) is type(value)


def test_an_array_among_the_parameters_comes_back_bit_for_bit() -> None:
    value = np.array([[1.5, np.nan], [-0.0, 2]], jnp.bfloat16)
    again = trace_errors.decode(trace_errors.encode(value))
    assert (again.dtype, again.tobytes()) == (value.dtype, value.tobytes())


@pytest.mark.parametrize(
    "data",
    [
        {"enum": "Path", "name": "cwd"},
        {"object": "Popen", "fields": {"args": "true"}},
        {"scalar_type": "os"},
        {"array": "float32", "shape": [3], "hex": "00"},
        {"tuple": 3},
        {"unknown": 1},
        {},
    ],
)
def test_a_parameter_that_nobody_wrote_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="is not a parameter"):
        trace_errors.decode(data)


def test_what_could_not_be_written_says_so_when_it_is_read() -> None:
    data = trace_errors.encode({"a": (1, print)})
    assert list(trace_errors.unencodable(data)) == ["builtins.builtin_function_or_method"]
    with pytest.raises(trace_errors.NotEncodableError, match="could not be written"):
        trace_errors.decode(data)
