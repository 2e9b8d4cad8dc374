"""Programs that fail are saved and minified by themselves, as SNAPRT_REPRO_AFTER asks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import run_program
from snaprt_replay.load.load import load

import snaprt
from snaprt import autoload, jaxapi
from snaprt.runtime import repro
from snaprt.snapshot.format.read import open_snapshot


def fail_to_compile() -> None:
    """Run a graph with a call that no compiler knows."""
    with snaprt.lazy():
        x = jnp.tanh(jnp.ones((8, 8)) * 3)
        y = jax.ffi.ffi_call("no_such_function", jax.ShapeDtypeStruct((8, 8), jnp.float32))(x)
        z = jnp.sin(y) + 1
        with pytest.raises(snaprt.CompileError):
            snaprt.mark_step()
        del y, z


def test_a_program_that_cannot_be_compiled_is_saved_and_minified_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SNAPRT_REPRO_AFTER", "compile")
    monkeypatch.setenv("SNAPRT_REPRO_DIR", str(tmp_path / "repro"))
    fail_to_compile()
    (folder,) = (tmp_path / "repro").iterdir()
    told = capfd.readouterr().err
    assert f"saved the failing program in {folder}" in told
    assert "minifying it before the program continues, for at most 300 s" in told
    assert f"the smallest program with this failure is in {folder / 'minified'}" in told
    text = (folder / "minified" / "minified.hlo.txt").read_text()
    assert "no_such_function" in text
    assert "tanh(" not in text


def test_where_nothing_fails_again_that_is_told(
    recorded: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sound = Path(shutil.copy(recorded, tmp_path / "failing.inputs.snap"))
    assert repro.repro_for(sound, repro.MINIFY) is None
    told = capfd.readouterr().err
    assert f"found no smaller program with this failure: see {tmp_path / 'minify.log'}" in told


@pytest.mark.parametrize(
    ("after", "level", "saved"), [("compile", "1", True), ("run", "1", True), (None, "1", False)]
)
def test_level_1_saves_a_program_that_can_be_replayed_and_does_no_more(
    after: str | None,
    level: str,
    saved: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if after is not None:
        monkeypatch.setenv("SNAPRT_REPRO_AFTER", after)
    monkeypatch.setenv("SNAPRT_REPRO_LEVEL", level)
    monkeypatch.setenv("SNAPRT_REPRO_DIR", str(tmp_path / "repro"))
    fail_to_compile()
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert [file.name for file in files] == (["failing.inputs.snap"] if saved else [])
    assert ("saved the failing program in" in capfd.readouterr().err) == saved
    for file in files:
        case = load(file)
        assert case.inputs is not None
        assert b"no_such_function" in case.stablehlo


# Compiled together, the product is not rounded before the difference is taken.
CONTRACTED = """
import sys, jax.numpy as jnp, numpy as np, snaprt
a, b = np.random.default_rng(0).normal(size=(2, 64)).astype(np.float32)
with snaprt.lazy():
    z = jnp.sin(jnp.asarray(a) * jnp.asarray(b) - jnp.asarray(a * b)) * 1e8
    snaprt.mark_step()
    sys.exit(7 if np.any(z) else 8)
"""


@pytest.mark.full
def test_level_4_minifies_a_graph_that_differs_from_its_operations_run_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_REPRO_AFTER", "run")
    monkeypatch.setenv("SNAPRT_REPRO_LEVEL", "4")
    monkeypatch.setenv("SNAPRT_REPRO_DIR", str(tmp_path / "repro"))
    done = run_program(CONTRACTED, status=None)
    if done.returncode == 8:
        pytest.skip("this processor has no fused multiply-add")
    assert done.returncode == 7, done.stderr
    (folder,) = (tmp_path / "repro").iterdir()
    assert f"the smallest program with this failure is in {folder / 'minified'}" in done.stderr
    text = (folder / "minified" / "minified.stablehlo.mlir").read_text()
    assert text.count("stablehlo.") == 2
    assert "stablehlo.multiply" in text
    assert "stablehlo.subtract" in text


# --- the same of plain `jax.jit` ---


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Look at jitted functions as in a process that JAX has asked for its plugins."""
    monkeypatch.setenv("SNAPRT_REPRO_AFTER", "run")
    monkeypatch.setenv("SNAPRT_REPRO_LEVEL", "1")
    monkeypatch.setenv("SNAPRT_REPRO_DIR", str(tmp_path / "repro"))
    autoload.initialize()
    yield tmp_path / "repro"
    jaxapi.set_process_watch(None)


@jax.jit
def uncompilable(x: jax.Array) -> jax.Array:
    y = jax.ffi.ffi_call("no_such_function", jax.ShapeDtypeStruct((8, 8), jnp.float32))(jnp.tanh(x))
    return jnp.sin(y) + 1


def test_a_jitted_function_that_cannot_be_compiled_is_minified_while_the_program_goes_on(
    watched: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SNAPRT_REPRO_LEVEL", "3")
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_function"):
            uncompilable(jnp.ones((8, 8)))
    (folder,) = watched.iterdir()
    assert not (folder / "minified" / "ISSUE.md").exists()
    assert jax.jit(lambda x: x + 1)(1) == 2
    repro._aside().submit(int).result(300)  # what Python waits for at its end
    told = capfd.readouterr().err
    assert told.count(f"saved the failing program in {folder}\n") == 1
    assert told.count(f"the smallest program with this failure is in {folder / 'minified'}") == 1
    assert "tanh(" not in (folder / "minified" / "minified.hlo.txt").read_text()
    case = load(folder / "failing.inputs.snap")
    assert b"no_such_function" in case.stablehlo
    manifest = open_snapshot(folder / "failing.inputs.snap").manifest.execution
    assert manifest.name == "uncompilable"
    assert "no_such_function" in manifest.error


def test_a_jitted_function_that_fails_while_it_runs_is_saved_with_what_it_was_to_consume(
    watched: Path,
) -> None:
    def fill(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 2, lambda _, a: a + x[0], jnp.zeros((1 << 21, 1 << 20)))[:8, 0]

    step, x = jax.jit(fill, donate_argnums=0), jnp.full(8, 3.0)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?i)out of memory"):
        step(x)
    (file,) = watched.glob("*/failing.inputs.snap")
    case = load(file)
    assert case.inputs is not None
    assert [one.value.tolist() for one in case.inputs] == [[3.0] * 8]


def test_after_compile_a_jitted_function_that_fails_while_it_runs_is_left_alone(
    watched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_REPRO_AFTER", "compile")
    grow = jax.jit(lambda x: jnp.cumsum(jnp.zeros((1 << 21, 1 << 20)) + x)[-1])
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?i)out of memory"):
        grow(jnp.float32(2)).block_until_ready()
    assert not watched.exists()


@pytest.mark.full
def test_level_4_minifies_a_jitted_function_that_differs_from_its_operations(
    watched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_REPRO_LEVEL", "4")
    a, b = np.random.default_rng(0).normal(size=(2, 64)).astype(np.float32)
    contracted = jax.jit(lambda a, b, c: jnp.sin(a * b - c) * 1e8)
    equal = jax.jit(lambda a: a + a)
    for _ in range(2):
        equal(a)
        if not np.any(contracted(a, b, a * b)):
            pytest.skip("this processor has no fused multiply-add")
    repro._aside().submit(int).result(300)
    (folder,) = watched.iterdir()
    text = (folder / "minified" / "minified.stablehlo.mlir").read_text()
    assert text.count("stablehlo.") == 2
