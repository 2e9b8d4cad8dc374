"""Files that jaxlib dumps from plain `jax.jit` programs are replayed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from programs import run_program
from snaprt_replay.load import contents
from snaprt_replay.load.case import Case, NamedArray, name_arrays
from snaprt_replay.load.sniff import HLO_UNOPTIMIZED_SNAPSHOT, sniff
from snaprt_replay.load.xla_files import (
    load_hlo_module,
    load_hlo_snapshot,
    load_hlo_text,
    load_unoptimized_snapshot,
)
from snaprt_replay.run.rerun import replay

from snaprt.compile.module import compile_module
from snaprt.errors import CompileError, SnapshotError

PROGRAMS = Path(__file__).parent.parent / "support" / "xla_programs.py"
MODELS = PROGRAMS.with_name("xla_models.py")
TRAINED = (
    *("residual_network", "vision_transformer", "long_short_term_memory", "graph_network"),
    *("variational_autoencoder", "diffusion_network", "mixture_of_experts", "state_space_model"),
    *("normalizing_flow", "recommender"),
)
REPLAYED = (
    *("mlp_gradient", "transformer_block", "transformer_scan", "scan_rnn", "while_loop"),
    *("convolution_gradient", "strided_convolution", "depthwise_convolution", "pooling"),
    *("sorting", "fourier", "random_bits", "gather_scatter", "linear_algebra", "branches"),
    *("half_precision", "tiny_floats", "tiny_integers", "complex_numbers", "int8_product"),
    *("reinterpreted", "transposes", "scalar_and_unused", "zero_size", "no_arguments"),
    *("passed_through", "printing", "calling_back_in_a_branch"),
)
UNOPTIMIZED = (
    *("mlp_gradient", "linear_algebra", "donating", "calling_back", "tiny_integers", "tiny_floats"),
    *("branches", "complex_numbers", "zero_size", "no_arguments", "calling_back_in_a_branch"),
)
# Compiled from the optimized module the fusions may fall otherwise, which moves last bits.
ROUNDED = {"transformer_scan"}


def dump(folder: Path, flags: str, *programs: str, script: Path = PROGRAMS) -> Path:
    flags = f"--xla_dump_to={folder} {flags}"
    run_program(script, *programs, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    return folder


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = "--xla_dump_hlo_snapshots --xla_dump_hlo_as_proto"
    return dump(tmp_path_factory.mktemp("snapshots"), flags)


@pytest.fixture(scope="module")
def unoptimized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = "--xla_dump_hlo_unoptimized_snapshots"
    return dump(tmp_path_factory.mktemp("unoptimized"), flags, *UNOPTIMIZED)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = "--xla_dump_hlo_snapshots --xla_dump_hlo_as_proto"
    return dump(tmp_path_factory.mktemp("models"), flags, script=MODELS)


def file_of(folder: Path, program: str, ending: str) -> Path:
    (found,) = folder.glob(f"module_*.jit_{program}.{ending}")
    return found


def run(loaded: Case) -> list[np.ndarray]:
    assert loaded.inputs is not None
    module = compile_module(loaded.stablehlo, device=jax.devices("cpu")[0])
    assert [(one.shape, one.dtype) for one in loaded.parameters] == list(module.parameters)
    return module.run(values(loaded.inputs))


def values(arrays: tuple[NamedArray, ...]) -> list[np.ndarray]:
    return [array.value for array in arrays]


def assert_same_bits(replayed: list[np.ndarray], recorded: tuple[NamedArray, ...] | None) -> None:
    assert recorded is not None
    assert [(one.shape, one.dtype) for one in replayed] == [
        (one.shape, one.dtype) for one in recorded
    ]
    for one, other in zip(replayed, recorded, strict=True):
        assert one.tobytes() == other.value.tobytes()


def assert_close(replayed: list[np.ndarray], recorded: tuple[NamedArray, ...] | None) -> None:
    assert recorded is not None
    for one, other in zip(replayed, recorded, strict=True):
        np.testing.assert_allclose(one, other.value, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("program", REPLAYED)
def test_a_snapshot_replays_to_its_recorded_results(snapshots: Path, program: str) -> None:
    loaded = load_hlo_snapshot(file_of(snapshots, program, "snapshot.*.pb"))
    assert loaded.name == f"jit_{program}"
    check = assert_close if program in ROUNDED else assert_same_bits
    check(run(loaded), loaded.outputs)


@pytest.mark.parametrize("model", TRAINED)
def test_a_training_step_of_each_type_of_model_replays(models: Path, model: str) -> None:
    found = replay(file_of(models, model, "snapshot.*.pb"), isolated=False)
    assert found.comparison is not None
    assert not found.mismatch, found.comparison.summary


def test_what_was_changed_in_an_optimized_module_is_noted(snapshots: Path) -> None:
    loaded = load_hlo_snapshot(file_of(snapshots, "transposes", "snapshot.*.pb"))
    (note,) = loaded.notes
    assert "fusions became calls" in note
    assert "bitcasts became transposes and reshapes" in note
    assert "xla_dump" not in loaded.environment["xla_flags"]


def test_a_donating_program_runs_though_xla_recorded_no_results(snapshots: Path) -> None:
    loaded = load_hlo_snapshot(file_of(snapshots, "donating", "snapshot.*.pb"))
    assert loaded.inputs is not None
    assert loaded.outputs is None
    assert any("0 of 2 results" in note for note in loaded.notes)
    x, y = values(loaded.inputs)
    expected = name_arrays((x + y, y * 2), "out")
    assert_same_bits(run(loaded), expected)
    assert_same_bits(run(loaded), expected)


def test_a_print_is_left_out_of_the_replay_and_noted(snapshots: Path) -> None:
    loaded = load_hlo_snapshot(file_of(snapshots, "printing", "snapshot.*.pb"))
    assert "were left out" in loaded.notes[-1]


def test_a_callback_that_gives_a_value_is_refused(snapshots: Path, unoptimized: Path) -> None:
    for path in (
        file_of(snapshots, "calling_back", "snapshot.*.pb"),
        file_of(unoptimized, "calling_back", "execution_*.pb"),
    ):
        with pytest.raises(CompileError, match="needs a Python callback"):
            replay(path, isolated=False)


def test_a_callback_in_a_branch_that_is_skipped_is_left_out_and_noted(snapshots: Path) -> None:
    path = file_of(snapshots, "calling_back_in_a_branch", "snapshot.*.pb")
    assert "Python callbacks in branches were left out" in load_hlo_snapshot(path).notes[-1]


@pytest.fixture(scope="module")
def unoptimized_protos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = "--xla_dump_hlo_unoptimized_snapshots --xla_dump_hlo_as_proto"
    return dump(tmp_path_factory.mktemp("unoptimized_protos"), flags, *UNOPTIMIZED)


@pytest.mark.parametrize("program", UNOPTIMIZED)
def test_an_unoptimized_snapshot_whose_arguments_follow_it_is_read_as_one_that_holds_them(
    unoptimized: Path, unoptimized_protos: Path, program: str
) -> None:
    paths = [
        file_of(folder, program, "execution_*.pb") for folder in (unoptimized, unoptimized_protos)
    ]
    assert [sniff(path) for path in paths] == [HLO_UNOPTIMIZED_SNAPSHOT] * 2
    whole, followed = map(load_unoptimized_snapshot, paths)
    assert whole.inputs is not None
    assert_same_bits(values(followed.inputs or ()), whole.inputs)
    assert (followed.stablehlo, followed.parameters) == (whole.stablehlo, whole.parameters)
    texts = [contents.read(path).hlo for path in paths]
    assert texts[0] is not None
    assert texts[1] is not None
    assert texts[0]() == texts[1]()


@pytest.mark.parametrize("left", [0.5, 0.99])
def test_an_unoptimized_snapshot_that_is_cut_short_is_refused(
    unoptimized_protos: Path, tmp_path: Path, left: float
) -> None:
    whole = file_of(unoptimized_protos, "mlp_gradient", "execution_*.pb").read_bytes()
    path = tmp_path / "cut.pb"
    path.write_bytes(whole[: int(len(whole) * left)])
    assert sniff(path) == HLO_UNOPTIMIZED_SNAPSHOT
    with pytest.raises(SnapshotError, match=r"cut short|not a complete"):
        load_unoptimized_snapshot(path)


@pytest.mark.parametrize("program", ["mlp_gradient", "linear_algebra", "tiny_integers"])
def test_an_unoptimized_snapshot_has_inputs_and_no_results(unoptimized: Path, program: str) -> None:
    loaded = load_unoptimized_snapshot(file_of(unoptimized, program, "execution_*.pb"))
    assert loaded.outputs is None
    assert run(loaded)


@pytest.mark.parametrize(
    ("load", "ending"),
    [
        (load_hlo_snapshot, "snapshot.*.pb"),
        (load_unoptimized_snapshot, "execution_*.hlo_unoptimized_snapshot.pb"),
    ],
)
def test_two_files_of_one_execution_give_one_module_and_one_result(
    snapshots: Path,
    unoptimized: Path,
    tmp_path: Path,
    load: Callable[[Path], Case],
    ending: str,
) -> None:
    snapshot = file_of(snapshots, "mlp_gradient", "snapshot.*.pb")
    other = file_of(unoptimized, "mlp_gradient", "execution_*.pb")
    prefix = "module_0007.jit_mlp_gradient"
    shutil.copy(snapshot, tmp_path / f"{prefix}.snapshot.-12.pb")
    shutil.copy(other, tmp_path / f"{prefix}.execution_0000.hlo_unoptimized_snapshot.pb")
    loaded = load(file_of(tmp_path, "mlp_gradient", ending))
    assert not any("fusions" in note for note in loaded.notes)
    assert_close(run(loaded), loaded.outputs)


def test_results_of_other_inputs_are_not_taken(
    snapshots: Path, unoptimized: Path, tmp_path: Path
) -> None:
    snapshot = file_of(snapshots, "transposes", "snapshot.*.pb")
    other = file_of(unoptimized, "mlp_gradient", "execution_*.pb")
    shutil.copy(snapshot, tmp_path / "module_0007.jit_mlp_gradient.snapshot.5.pb")
    path = tmp_path / "module_0007.jit_mlp_gradient.execution_0000.hlo_unoptimized_snapshot.pb"
    shutil.copy(other, path)
    assert load_unoptimized_snapshot(path).outputs is None


@pytest.mark.parametrize("stage", ["before_optimizations", "cpu_after_optimizations"])
def test_a_bare_module_proto_runs_on_given_inputs(snapshots: Path, stage: str) -> None:
    loaded = load_hlo_module(file_of(snapshots, "convolution_gradient", f"{stage}.hlo.pb"))
    assert loaded.inputs is None
    snapshot = load_hlo_snapshot(file_of(snapshots, "convolution_gradient", "snapshot.*.pb"))
    module = compile_module(loaded.stablehlo, device=jax.devices("cpu")[0])
    assert snapshot.inputs is not None
    assert_close(module.run(values(snapshot.inputs)), snapshot.outputs)


def test_hlo_text_as_xla_dumps_it_runs(tmp_path: Path) -> None:
    dump(tmp_path, "--xla_dump_hlo_as_text", "mlp_gradient", "transposes")
    for program in ("mlp_gradient", "transposes"):
        before, after = (
            load_hlo_text(file_of(tmp_path, program, f"{stage}_optimizations.txt"))
            for stage in ("before", "cpu_after")
        )
        assert before.parameters == after.parameters
        device = jax.devices("cpu")[0]
        inputs = [np.full(one.shape, 0.5, one.dtype) for one in before.parameters]
        one, other = (
            compile_module(loaded.stablehlo, device=device).run(inputs)
            for loaded in (before, after)
        )
        assert_close(one, name_arrays(other, "out"))
