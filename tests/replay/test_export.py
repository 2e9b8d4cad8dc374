"""Executions in the forms of others: each is read back by who is meant to read it."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import sparse
from programs import run_program
from recordings import record
from snaprt_replay.export import FORMS, export, write_hlo_snapshot
from snaprt_replay.load.load import load
from snaprt_replay.run.rerun import replay

from snaprt.errors import CompileError, UsageError


def step(
    x: jax.Array, w: jax.Array, n: jax.Array, half: jax.Array, narrow: jax.Array, key: jax.Array
) -> dict[str, jax.Array]:
    y = jnp.tanh(x @ w)
    return {
        "y": y,
        "half": (y[:2] * half[:2]).astype(jnp.bfloat16),
        "count": n + narrow.astype(jnp.int32).sum(),
        "positive": y > 0,
        "noise": jax.random.normal(key, (3,)),
        "values": jnp.linalg.eigh(w.T @ w)[0],
    }


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    arguments = {
        "x": jnp.linspace(-1, 1, 12).reshape(4, 3),
        "layer/w": jnp.linspace(-1, 2, 6).reshape(3, 2),
        "n": jnp.asarray([1, -7, 300]),
        "half": jnp.ones((4, 2), jnp.bfloat16) * 0.3,
        "narrow": jnp.asarray([-8, 7], jnp.int4),
        "key": jax.random.key(3),
    }
    return record(tmp_path_factory.mktemp("recorded"), step, arguments)


@pytest.mark.parametrize("form", FORMS)
def test_a_path_that_is_taken_is_left_alone(form: str, recorded: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("precious")
    with pytest.raises(UsageError, match="already exists"):
        export(recorded, form, out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert out.read_text() == "precious"


@pytest.mark.parametrize("form", FORMS)
def test_a_pipe_or_a_device_is_never_replaced(form: str, recorded: Path, tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for out in (pipe, link):
        with pytest.raises(UsageError, match=f"{out}: it is a pipe or a device"):
            export(recorded, form, out, replace=True)
    assert pipe.is_fifo()
    assert link.is_symlink()


def test_what_a_killed_export_left_goes_with_the_next_one(recorded: Path, tmp_path: Path) -> None:
    killed = """
    import os, signal, sys
    from pathlib import Path
    from snaprt_replay import export
    def die(case, path):
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    form = export.ExportFormat(die, True, False, "")
    export.FORMS = {"npz": form}
    export.export(Path(sys.argv[1]), "npz", Path(sys.argv[2]))
    """
    out = tmp_path / "out.npz"
    run_program(textwrap.dedent(killed), recorded, out, status=-signal.SIGKILL)
    assert len(list(tmp_path.iterdir())) == 1
    export(recorded, "npz", out)
    assert list(tmp_path.iterdir()) == [out]


def test_xlas_snapshot_replays_with_the_same_results(recorded: Path, tmp_path: Path) -> None:
    export(recorded, "hlo-snapshot", tmp_path / "step.pb")
    before, after = load(recorded), load(tmp_path / "step.pb")
    for mine, theirs in ((before.inputs, after.inputs), (before.outputs, after.outputs)):
        assert mine is not None
        assert theirs is not None
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert one.dtype == other.dtype
            assert np.array_equal(one.value, other.value)
    comparison = replay(tmp_path / "step.pb", isolated=False).comparison
    assert comparison is not None
    assert comparison.verdict in ("identical", "within tolerance")


def test_a_single_result_is_no_tuple_in_xlas_snapshot(tmp_path: Path) -> None:
    path = record(tmp_path, lambda x: x * 2, {"x": jnp.arange(3.0)})
    export(path, "hlo-snapshot", tmp_path / "double.pb")
    comparison = replay(tmp_path / "double.pb", isolated=False).comparison
    assert comparison is not None
    assert comparison.verdict == "identical"


def test_what_is_too_large_for_xlas_snapshot_is_refused(recorded: Path, tmp_path: Path) -> None:
    case = load(recorded)
    assert case.inputs is not None
    huge = np.broadcast_to(np.float32(0), (1 << 29, 1))  # 2 GiB that take no memory
    inputs = (dataclasses.replace(case.inputs[0], value=huge), *case.inputs[1:])
    with pytest.raises(UsageError, match=r"bytes, more than XLA's HloSnapshot can hold \(2 GiB\)"):
        write_hlo_snapshot(dataclasses.replace(case, inputs=inputs), tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_numpy_reads_the_npz(recorded: Path, tmp_path: Path) -> None:
    export(recorded, "npz", tmp_path / "step.npz")
    case = load(recorded)
    with np.load(tmp_path / "step.npz") as arrays:
        names = [f"inputs/{one.name}" for one in case.inputs or ()]
        names += [f"outputs/{one.name}" for one in case.outputs or ()]
        assert arrays.files == names
        assert np.allclose(arrays["inputs/layer/w"], np.linspace(-1, 2, 6).reshape(3, 2))
        half = arrays["inputs/half"]
        assert half.dtype == np.uint16
        assert np.all(half.view(ml_dtypes.bfloat16) == ml_dtypes.bfloat16(0.3))


def test_safetensors_reads_its_own(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    arguments = {
        "w": jnp.linspace(-1, 1, 6).reshape(3, 2),
        "half": jnp.ones((2,), jnp.bfloat16),
        "n": jnp.asarray(5),
    }
    path = record(tmp_path, lambda w, half, n: (w.T, half[0] * n), arguments)
    out = tmp_path / "step.safetensors"
    export(path, "safetensors", out)
    export(path, "npz", tmp_path / "step.npz")
    assert out.stat().st_mode == (tmp_path / "step.npz").stat().st_mode
    with safetensors.safe_open(out, "numpy") as file:
        assert set(file.keys()) == {
            *("inputs/w", "inputs/half", "inputs/n", "outputs/out0", "outputs/out1"),
        }
        assert np.array_equal(file.get_tensor("outputs/out0"), np.asarray(arguments["w"].T))
        assert file.get_slice("inputs/half").get_dtype() == "BF16"
        assert file.get_slice("inputs/n").get_shape() == []


def test_what_safetensors_cannot_hold_is_an_error(recorded: Path, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    with pytest.raises(
        UsageError, match=r"safetensors cannot hold the arrays .* no name for the dtype of"
    ):
        export(recorded, "safetensors", tmp_path / "step.safetensors")  # int4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["step.mlir", "step.mlirbc"])
def test_the_module_can_be_replayed_as_text_and_as_bytecode(
    name: str, recorded: Path, tmp_path: Path
) -> None:
    export(recorded, "stablehlo", tmp_path / name)
    is_text = (tmp_path / name).read_bytes().startswith(b"module @")
    assert is_text == name.endswith(".mlir")
    result = replay(tmp_path / name, random_seed=0, isolated=False)
    assert len(result.played.outputs) == 6


def run_script(folder: Path, status: int = 0) -> str:
    """Run the script as a stranger would, somewhere else and without snaprt; return its output."""
    options = {"folder": folder.parent, "without": ["PYTHONPATH"], "PYTHONSAFEPATH": 1}
    return run_program(folder / "run.py", status=status, **options).stdout


def test_the_script_runs_with_jax_and_numpy_alone_and_compares(
    recorded: Path, tmp_path: Path
) -> None:
    export(recorded, "python", tmp_path / "step")
    assert {path.name for path in (tmp_path / "step").iterdir()} == {
        *("run.py", "module.mlirbc", "arrays.npz"),
    }
    assert "snaprt" not in (tmp_path / "step" / "run.py").read_text()
    verdicts = [line.split()[0] for line in run_script(tmp_path / "step").splitlines()[1:]]
    assert len(verdicts) == 6
    assert set(verdicts) <= {"identical", "close"}
    shutil.move(tmp_path / "step" / "arrays.npz", tmp_path / "arrays.npz")
    with np.load(tmp_path / "arrays.npz") as arrays:
        changed = {name: arrays[name] for name in arrays.files}
    changed["input0"] = changed["input0"] + np.float32(1)
    np.savez(tmp_path / "step" / "arrays.npz", **changed)
    assert "DIFFERENT" in run_script(tmp_path / "step", status=1)


def test_the_script_registers_the_functions_that_only_a_lowering_does(tmp_path: Path) -> None:
    def product(values: jax.Array, columns: jax.Array, rows: jax.Array, x: jax.Array) -> jax.Array:
        return sparse.BCSR((values, columns, rows), shape=(2, 2)) @ x

    arguments = {
        "values": jnp.asarray([2.0, 3.0]),
        "columns": jnp.asarray([0, 1]),
        "rows": jnp.asarray([0, 1, 2]),
        "x": jnp.asarray([1.0, 2.0]),
    }
    export(record(tmp_path, product, arguments), "python", tmp_path / "product")
    assert "identical" in run_script(tmp_path / "product")


def test_a_program_that_calls_back_into_python_has_no_script(tmp_path: Path) -> None:
    def call_back(x: jax.Array) -> jax.Array:
        return jax.pure_callback(np.sin, x, x)

    path = record(tmp_path, call_back, {"x": jnp.ones(2)})
    with pytest.raises(CompileError, match="needs a Python callback"):
        export(path, "python", tmp_path / "called")


def test_a_bare_module_has_nothing_but_its_module_to_export(recorded: Path, tmp_path: Path) -> None:
    export(recorded, "stablehlo", tmp_path / "step.mlir")
    with pytest.raises(UsageError, match="holds a module without arrays"):
        export(tmp_path / "step.mlir", "npz", tmp_path / "step.npz")
    export(tmp_path / "step.mlir", "stablehlo", tmp_path / "again.mlirbc")
    assert (tmp_path / "again.mlirbc").read_bytes().startswith(b"ML\xefR")
