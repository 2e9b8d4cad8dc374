"""Playing: a case runs here or in a process of its own, where a crash is an error like others."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from snaprt_replay.compare.results import IDENTICAL, MISMATCH, WITHIN_TOLERANCE
from snaprt_replay.load import sniff
from snaprt_replay.load.case import Case, name_arrays
from snaprt_replay.load.load import load
from snaprt_replay.run import devices, player
from snaprt_replay.run.rerun import replay
from snaprt_replay.run.variants.variants import Variant
from snaprt_replay.run.workers import Workers

from snaprt.compile.module import compile_module
from snaprt.errors import CompileError, DeviceError, ExecutionError, UsageError

Player = Callable[..., player.PlayResult]


@pytest.fixture(params=["here", "in a process of its own"])
def play(request: pytest.FixtureRequest, workers: Workers) -> Player:
    if request.param == "here":
        return player.play

    def isolated(case: Case, device: str | None = None, repeat: int = 1) -> player.PlayResult:
        return player.play_variant(case, Variant("", "device", device), repeat, workers)

    return isolated


def text_case(text: str, *inputs: np.ndarray) -> Case:
    return Case(
        Path("t.mlir"), sniff.MLIR_TEXT, "t", text.encode(), name_arrays(inputs, "arg"), None
    )


def test_a_recorded_step_replays_to_the_same_bits(play: Player, recorded: Path) -> None:
    case = load(recorded)
    result = play(case, repeat=3)
    assert case.outputs is not None
    assert [array.name for array in result.outputs] == [array.name for array in case.outputs]
    for left, right in zip(case.outputs, result.outputs, strict=True):
        assert left.value.tobytes() == right.value.tobytes()
        assert left.dtype == right.dtype
    assert result.agrees_with_itself is True
    assert len(result.execute_seconds) == 3
    assert result.environment["platform"] == "cpu"
    assert result.device == "cpu:0"


@pytest.mark.parametrize(
    "form", [sniff.MLIR_TEXT, sniff.MLIR_BYTECODE, sniff.HLO_TEXT, sniff.HLO_MODULE]
)
def test_every_form_of_a_module_gives_the_same_result(
    form: str, modules: Mapping[str, Path]
) -> None:
    case = load(modules[form], random_seed=5)
    x, w = (array.value for array in case.inputs or ())
    out, positive = player.play(case).outputs
    np.testing.assert_allclose(out.value, np.tanh(x @ w), rtol=1e-5)
    assert positive.value == (x.sum() > 0)


def test_xlas_own_snapshot_replays_to_its_recorded_results(xla_snapshot: Path) -> None:
    result = replay(xla_snapshot)
    assert result.played.isolated
    assert result.comparison is not None
    assert result.comparison.verdict == IDENTICAL


def test_the_second_replay_finds_its_executable_in_the_cache(recorded: Path) -> None:
    player.play(load(recorded))
    assert player.play(load(recorded)).from_cache


SELF = "stablehlo.add %a, %a : {kind}"
TOP_K = "stablehlo.custom_call @TopK(%a) : ({kind}) -> {kind}"


def unary(element: str, operation: str = SELF, shape: str = "3x") -> str:
    """Return a module of one operation whose operand and result are of one type."""
    kind = f"tensor<{shape}{element}>"
    body = f"%0 = {operation.format(kind=kind)} return %0 : {kind}"
    return f"module {{ func.func public @main(%a: {kind}) -> {kind} {{ {body} }} }}"


@pytest.mark.parametrize(
    ("mlir", "dtype"),
    [
        ("f64", np.float64),
        ("i64", np.int64),
        ("bf16", ml_dtypes.bfloat16),
        ("f8E4M3FN", ml_dtypes.float8_e4m3fn),
        ("i4", ml_dtypes.int4),
        ("complex<f64>", np.complex128),
    ],
)
def test_every_kind_of_element_goes_in_and_out(play: Player, mlir: str, dtype: type) -> None:
    value = np.array([1, 2, 3]).astype(dtype)
    (out,) = play(text_case(unary(mlir), value)).outputs
    assert out.dtype == value.dtype
    assert out.value.tolist() == (value + value).tolist()


@pytest.mark.parametrize("shape", [(), (0, 3)])
def test_scalars_and_empty_arrays_keep_their_shape(play: Player, shape: tuple[int, ...]) -> None:
    text = unary("f32", shape="".join(f"{size}x" for size in shape))
    (out,) = play(text_case(text, np.ones(shape, np.float32))).outputs
    assert out.shape == shape


def test_a_parameter_lies_in_the_memory_that_its_program_names() -> None:
    device = jax.devices()[0]
    other = next(m.kind for m in device.addressable_memories() if m != device.default_memory())
    loaded = compile_module(
        f"""func.func @main(%a: tensor<2xf32> {{mhlo.memory_kind = "{other}"}}, %b: tensor<2xf32>)
            -> tensor<2xf32> {{ return %b : tensor<2xf32> }}""",
        device=device,
    )
    placed = [loaded.put(number, np.zeros(2, np.float32), device) for number in range(2)]
    kinds = [array.sharding.memory_kind for array in placed]
    assert kinds == [other, device.default_memory().kind]


def test_a_crash_of_xla_is_an_error_that_quotes_it(workers: Workers) -> None:
    case = text_case(unary("f32", TOP_K), np.ones(3, np.float32))
    with pytest.raises(CompileError, match="compile crash in") as caught:
        player.play_variant(case, Variant("", "device"), 1, workers)
    assert "Check failed: state Expected a tuple shape" in caught.value.message
    assert "bug in XLA" in caught.value.hint


def test_an_error_of_xla_names_the_file(play: Player) -> None:
    case = text_case(unary("f32"), np.ones(3, np.float32))
    case = dataclasses.replace(case, compiler_options={"xla_no_such_option": True})
    with pytest.raises(CompileError, match=r"t\.mlir.*xla_no_such_option"):
        play(case)


def test_inputs_that_the_module_does_not_take_are_refused_before_xla_sees_them() -> None:
    with pytest.raises(ExecutionError, match=r"float32\[4\]"):
        player.play(text_case(unary("f32"), np.ones(4, np.float32)))


def test_an_absent_device_is_an_error_that_lists_those_present(
    play: Player, recorded: Path
) -> None:
    for name in ("tpu", "cpu:99"):
        with pytest.raises(DeviceError, match=f"no (tpu device|device {name}) here") as caught:
            play(load(recorded), device=name)
        assert "present: cpu:0" in caught.value.hint


def test_a_device_name_must_be_one() -> None:
    with pytest.raises(UsageError, match="unknown device"):
        devices.find_device("my gpu")
    assert devices.find_device("cpu") == jax.local_devices(backend="cpu")[0]


def test_a_case_without_inputs_says_how_to_give_them(modules: Mapping[str, Path]) -> None:
    with pytest.raises(UsageError) as caught:
        player.play(load(modules[sniff.MLIR_TEXT]))
    assert "--random" in caught.value.hint


def test_a_program_of_more_devices_than_there_are_is_refused(recorded: Path) -> None:
    with pytest.raises(DeviceError, match="runs on 4 devices"):
        player.play(dataclasses.replace(load(recorded), devices=4))


def test_a_planted_ulp_is_within_tolerance_and_a_planted_nan_is_not(
    rewritten: Callable[..., Path],
) -> None:
    def one_ulp(name: str, value: np.ndarray) -> np.ndarray:
        if value.dtype == np.float32:
            value.reshape(-1).view(np.int32)[1] += 1
        return value

    def one_nan(name: str, value: np.ndarray) -> np.ndarray:
        if value.dtype == np.float32:
            value.reshape(-1)[1] = np.nan
        return value

    for change, verdict in ((one_ulp, WITHIN_TOLERANCE), (one_nan, MISMATCH)):
        result = replay(rewritten(change))
        assert result.comparison is not None
        assert result.comparison.verdict == verdict
        assert sum(output.differing for output in result.comparison.outputs) == 1


def test_what_was_otherwise_at_recording_is_said() -> None:
    here = {"platform": "cpu", "jax": "0.12.0", "xla_flags": ""}
    assert devices.differences(here, here) == ()
    there = {"platform": "tpu", "jax": "0.10.2", "xla_flags": "--xla_dump_to=x --xla_a=1"}
    told = devices.differences(there, here)
    assert [one.split(",")[0] for one in told] == [
        "recorded with platform tpu",
        "recorded with jax 0.10.2",
        "recorded with XLA_FLAGS '--xla_dump_to=x --xla_a=1'",
    ]
    assert devices.differences({"platform": ""}, here) == ()
