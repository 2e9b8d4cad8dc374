"""``--when recheck``: what computes wrong is found, told and recorded, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from broken_chips import faulty
from programs import SNAPRT, run_program
from recordings import recorded

import snaprt
from snaprt import metrics
from snaprt.cli.main import main
from snaprt.errors import UsageError
from snaprt.snapshot.format.read import SnapshotFile
from snaprt.snapshot.recorder import bits
from snaprt.snapshot.recorder.conditions import parse_conditions

COUNTERS = ("Rechecks", "RecheckMismatch", "RecheckNotDeterministic")


def counts() -> list[int]:
    return [int(metrics.counter_value(name) or 0) for name in COUNTERS]


# The words


def test_recheck_stands_alone_or_takes_device() -> None:
    same, other = parse_conditions("recheck, every=500; recheck=device, name=train")
    assert (same.value, same.every, other.value) == ("same", 500, "device")


@pytest.mark.parametrize("text", ["recheck=", "recheck=host", "recheck=same"])
def test_another_value_of_recheck_is_an_error_that_says_what_is_right(text: str) -> None:
    if text == "recheck=":
        assert parse_conditions(text)[0].value == "same"
        return
    with pytest.raises(UsageError) as caught:
        parse_conditions(text)
    assert "recheck=... takes device" in caught.value.hint


# The bits


DTYPES = [
    *("bool", "int8", "uint64", "float16", "float32", "float64", "complex64", "complex128"),
    *("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4", "int2", "float4_e2m1fn"),
]


def values_of(dtype: str) -> np.ndarray:
    kind = np.dtype(getattr(ml_dtypes, dtype)) if hasattr(ml_dtypes, dtype) else np.dtype(dtype)
    return np.arange(12).reshape(3, 4).astype(np.float32 if kind.kind == "V" else kind).astype(kind)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_other_bit_is_a_difference_in_arrays_of_any_type(dtype: str) -> None:
    devices = (jax.devices()[0],)
    with jax.enable_x64(True):
        value = values_of(dtype)
        other = value.copy()
        other[2, 1] = value[0, 0] if value[2, 1] != value[0, 0] else value[0, 1]
        array, same, flipped = (jax.device_put(one) for one in (value, value.copy(), other))
    table = bits.differences([array, array], [same, flipped], devices)
    assert table.tolist() == [[False, True]]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_the_bits_of_nan_and_the_sign_of_zero_count(dtype: str) -> None:
    devices = (jax.devices()[0],)
    with jax.enable_x64(True):
        value = np.zeros(4, values_of(dtype).dtype)
        value[1] = np.nan
        changes = []
        for place, bit in ((0, 0x80), (1, 0x01)):  # -0.0; another NaN
            words = value.copy()
            raw = words[place : place + 1].view(np.uint8)
            width = raw.size // (2 if dtype == "complex64" else 1)
            raw[width - 1 if bit == 0x80 else 0] ^= bit
            changes.append(jax.device_put(words))
        array = jax.device_put(value)
    assert bits.differences([array] * 3, [array, *changes], devices).tolist() == [
        [False, True, True]
    ]


def test_keys_and_empty_arrays_are_compared() -> None:
    devices = (jax.devices()[0],)
    one, other = jax.random.split(jax.random.key(0), 3), jax.random.split(jax.random.key(1), 3)
    empty = jnp.zeros((0, 3))
    table = bits.differences([one, one, empty], [one, other, empty], devices)
    assert table.tolist() == [[False, True, False]]


# Executions that compute wrong


def train(step: Callable[..., Any], mode: str, steps: int, donates: bool = False) -> list[float]:
    """Take some steps; return the losses."""
    weights = jnp.ones((4, 4))
    inputs = jnp.arange(16.0).reshape(4, 4) / 16
    losses = []
    if mode == "lazy":
        with snaprt.lazy():
            for _ in range(steps):
                weights, loss = step(weights, inputs)
                losses.append(loss)
                snaprt.mark_step()
    else:
        jitted = jax.jit(step, donate_argnums=0 if donates else ())
        for _ in range(steps):
            weights, loss = jitted(weights, inputs)
            losses.append(loss)
    return [float(loss) for loss in losses]


def step_with(fault: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(weights: jax.Array, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden = fault(jnp.tanh(inputs @ weights))
        return weights - 0.1 * (inputs.T @ hidden), jnp.sum(hidden)

    return step


@pytest.mark.parametrize("mode", ["jit", "lazy"])
@pytest.mark.parametrize(("call", "wrong_run"), [(4, 1), (5, 2)])
def test_a_fault_that_comes_once_is_found_and_recorded_with_both_outputs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str, call: int, wrong_run: int
) -> None:
    # Executions 0 and 3 run twice: their calls are 0 and 1, 4 and 5.
    step = step_with(faulty(lambda _, number: number == call))
    with snaprt.record("recheck, every=3", tmp_path):
        train(step, mode, 5)
    assert counts() == [2, 1, 0]
    (inputs,) = recorded(tmp_path)
    first, second = recorded(tmp_path, "outputs")
    assert [file.manifest.execution.run_number for file in (inputs, first, second)] == [1, 1, 2]
    recheck = inputs.manifest.execution.recheck
    assert recheck is not None
    assert recheck == first.manifest.execution.recheck == second.manifest.execution.recheck
    assert recheck.wrong_run == wrong_run
    assert [device.id for device in recheck.suspects] == [0]
    assert inputs.manifest.execution.execution_count == 3
    assert inputs.manifest.execution.host
    names = first.array_names
    assert all(not np.array_equal(first.array(name), second.array(name)) for name in names)
    assert f"run {wrong_run} differs from runs" in caplog.text
    assert "on cpu:0" in caplog.text


@pytest.mark.parametrize("mode", ["jit", "lazy", "donating"])
def test_re_checking_changes_no_result(tmp_path: Path, mode: str) -> None:
    how = "jit" if mode == "donating" else mode
    plain = train(step_with(lambda x: x), how, 8, mode == "donating")
    with snaprt.record("recheck, every=2", tmp_path):
        rechecked = train(step_with(lambda x: x), how, 8, mode == "donating")
    assert rechecked == plain
    assert counts() == [4, 0, 0]
    assert recorded(tmp_path) == []


def test_a_program_that_is_not_deterministic_accuses_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = step_with(faulty(lambda _, number: True))
    with snaprt.record("recheck", tmp_path):
        train(step, "jit", 4)
    assert counts() == [4, 0, 4]
    assert recorded(tmp_path) == []
    assert [record.message.count("is not deterministic") for record in caplog.records] == [1]


def test_a_program_with_effects_runs_once_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    @jax.jit
    def noting(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: calls.append(1))
        return x + 1

    with snaprt.record("recheck", tmp_path):
        for number in range(3):
            noting(jnp.float32(number))
        jax.effects_barrier()
    assert len(calls) == 3
    assert counts() == [0, 0, 0]
    assert [record.message.count("its effects") for record in caplog.records] == [1]


def test_a_failed_execution_is_not_run_again(tmp_path: Path) -> None:
    def fail(x: np.ndarray) -> np.ndarray:
        raise ValueError("broken")

    @jax.jit
    def failing(x: jax.Array) -> jax.Array:
        return jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with (
        snaprt.record("recheck", tmp_path),
        pytest.raises(jax.errors.JaxRuntimeError, match="broken"),
    ):
        failing(jnp.ones(3)).block_until_ready()
    assert counts() == [0, 0, 0]


def test_keys_and_several_types_go_through_a_program(tmp_path: Path) -> None:
    @jax.jit
    def program(key: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
        key, other = jax.random.split(key)
        return key, jax.random.normal(other, x.shape), x.astype(jnp.int4), x > 0, x.astype("c8")

    with snaprt.record("recheck", tmp_path):
        program(jax.random.key(0), jnp.arange(4.0))
    assert counts() == [1, 0, 0]


def test_programs_are_compiled_with_donation_while_recheck_alone_is_asked_for(
    tmp_path: Path,
) -> None:
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    with snaprt.record("recheck, every=2", tmp_path):
        first = jnp.ones(8)
        second = add(first)
        add(second)
        assert first.is_deleted()
        assert second.is_deleted()
    assert counts() == [1, 0, 0]


def check_many(count: int, folder: Path) -> None:
    """Re-check so many executions of programs that compute right."""
    step = jax.jit(step_with(lambda x: x))
    weights, inputs = jnp.ones((4, 4)), jnp.arange(16.0).reshape(4, 4) / 16
    with snaprt.record("recheck", folder):
        for _ in range(count):
            weights, _ = step(weights, inputs)
    assert counts() == [count, 0, 0]
    assert recorded(folder) == []


def test_clean_re_checks_accuse_nobody(tmp_path: Path) -> None:
    check_many(300, tmp_path)


@pytest.mark.full
def test_ten_thousand_clean_re_checks_accuse_nobody(tmp_path: Path) -> None:
    check_many(10_000, tmp_path)


# Another device


PERMANENT = """
import os, sys
sys.path.insert(0, {support!r})
import jax, jax.numpy as jnp
from broken_chips import permanent
import snaprt
from snaprt import metrics
permanent({broken}, "2.500000e-01", "2.500001e-01")
device = jax.devices()[{on}]
def step(w, x):
    h = jnp.tanh(x @ w) * 0.25
    return w - 0.1 * (x.T @ h), jnp.sum(h)
w = jax.device_put(jnp.ones((4, 4)), device)
x = jax.device_put(jnp.arange(16.0).reshape(4, 4) / 16, device)
if {lazy}:
    with snaprt.lazy():
        for _ in range(3):
            w, loss = step(w, x)
            snaprt.mark_step()
else:
    step = jax.jit(step)
    for _ in range(3):
        w, loss = step(w, x)
print("mismatches", metrics.counter_value("RecheckMismatch"), loss.devices())
"""


def run_permanent(
    folder: Path, *, on: int, broken: int, devices: int, lazy: bool = False
) -> tuple[str, list[SnapshotFile]]:
    support = str(Path(__file__).parents[1] / "support")
    script = folder / "train.py"
    script.write_text(PERMANENT.format(support=support, on=on, broken=broken, lazy=lazy))
    words = ["--lazy"] if lazy else []
    words += ["--when", "recheck=device, every=2", "--dump", str(folder / "dump")]
    done = run_program((*SNAPRT, "run", *words, "--", str(script)), devices=devices)
    return done.stdout + done.stderr, recorded(folder / "dump")


@pytest.mark.parametrize(("on", "lazy"), [(0, False), (2, True)])
def test_a_device_that_always_computes_wrong_is_found_by_another(
    tmp_path: Path, on: int, lazy: bool
) -> None:
    said, files = run_permanent(tmp_path, on=on, broken=2, devices=4, lazy=lazy)
    # From device 0, executions 0 and 2 run again on devices 2 and 1: one of them is the broken one.
    assert files
    for file in files:
        recheck = file.manifest.execution.recheck
        assert recheck is not None
        assert [device.id for device in recheck.suspects] == [2]
        assert recheck.wrong_run == (1 if on == 2 else 2)
        assert 2 in [device.id for device in recheck.ran_on]
    assert "cpu:2" in said


def test_of_two_devices_that_differ_neither_is_accused(tmp_path: Path) -> None:
    said, files = run_permanent(tmp_path, on=0, broken=1, devices=2)
    assert "one of the two is wrong" in said
    rechecks = [file.manifest.execution.recheck for file in files]
    assert [(one.wrong_run, one.suspects) for one in rechecks if one] == [(0, ())] * 2


def test_where_there_is_no_other_device_that_is_said(tmp_path: Path) -> None:
    said, files = run_permanent(tmp_path, on=0, broken=-1, devices=1)
    assert said.count("this process has no other cpu device") == 1
    assert files == []


MEMORIES = """
import jax, jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding
device = jax.devices()[0]
own = device.default_memory().kind
other = next(m.kind for m in device.addressable_memories() if m.kind != own)
there = SingleDeviceSharding(device, memory_kind=other)
columns_first = Format(Layout((1, 0)), SingleDeviceSharding(device))
x = jax.device_put(jnp.arange(6.0).reshape(2, 3), columns_first)
f = jax.jit(lambda x: (x * 2, x.sum(0), x + 1), out_shardings=(columns_first, None, there))
g = jax.jit(lambda y: jax.device_put(y, SingleDeviceSharding(device)) @ y.T.reshape(3, 2))
for _ in range(2):
    print(f(x)[2].sharding.memory_kind == other, g(f(x)[0]).shape)
"""


def test_what_lies_in_another_memory_or_layout_runs_again_alike_elsewhere(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(MEMORIES)
    words = ["--when", "recheck=device", "--dump", str(tmp_path / "dump")]
    done = run_program((*SNAPRT, "run", *words, "--", str(script)), devices=2)
    assert done.stdout.split("\n")[:2] == ["True (2, 2)"] * 2
    assert "Error" not in done.stderr
    assert recorded(tmp_path / "dump") == []


# What else reads it


def test_ls_and_replay_tell_the_two_runs_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Replay runs on device 0, which computes right, as run 2 did on device 2.
    run_permanent(tmp_path, on=1, broken=1, devices=3)
    assert main(["ls", str(tmp_path / "dump")]) == 0
    assert "0 (run 2)" in capsys.readouterr().out
    for role in ("inputs", "outputs"):
        path = next((tmp_path / "dump").glob(f"*execution000000*.{role}.snap"))
        main(["replay", str(path)])
        said = capsys.readouterr().out
        assert "the replay agrees with run 2, so run 1" in said
        assert "re-checked during recording: execution 0 of step" in said
    main(["replay", str(path), "--json"])
    assert json.loads(capsys.readouterr().out)["reports"][0]["agrees_with_run"] == 2
    main(["inspect", str(path)])
    assert "re-checked" in capsys.readouterr().out
