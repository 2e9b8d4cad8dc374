"""``snaprt inspect``: everything that is in a file, without running it."""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from snaprt_replay.compare.array_statistics import describe
from snaprt_replay.load import sniff
from snaprt_replay.load.case import NamedArray

from snaprt import metrics

Run = Callable[..., tuple[int, str, str]]
BARE = [sniff.MLIR_TEXT, sniff.MLIR_BYTECODE, sniff.HLO_TEXT, sniff.HLO_MODULE]


@pytest.fixture
def inspect(snaprt: Run) -> Run:
    """Return a function that runs ``snaprt inspect`` and gives status, stdout and stderr."""
    return functools.partial(snaprt, "inspect")


def outputs_of(inputs: Path) -> Path:
    return inputs.with_name(inputs.name.replace(".inputs.", ".outputs."))


def test_a_snapshot_tells_where_it_was_recorded_and_its_arrays(
    inspect: Run, recorded: Path
) -> None:
    status, out, _ = inspect(outputs_of(recorded))
    assert status == 0
    for word in ("snaprt snapshot", "holds", "outputs", "jaxlib", "XLA_FLAGS", "bfloat16[2,2]"):
        assert word in out
    assert metrics.metric_data("CompileTime") is None


def test_json_lists_the_arrays(inspect: Run, recorded: Path) -> None:
    status, out, _ = inspect(outputs_of(recorded), "--json")
    data = json.loads(out)
    assert (status, data["schema"], data["version"]) == (0, "snaprt.inspect", 1)
    assert {array["role"] for array in data["arrays"]} == {"outputs"}
    assert {array["dtype"] for array in data["arrays"]} == {"float32", "bfloat16", "bool"}


@pytest.mark.parametrize("option", ["--hlo", "--stablehlo"])
def test_the_module_is_printed_from_any_format(
    option: str, inspect: Run, recorded: Path, xla_snapshot: Path, modules: Mapping[str, Path]
) -> None:
    said = {"--hlo": "HloModule", "--stablehlo": "@main("}[option]
    for path in (recorded, xla_snapshot, *modules.values()):
        status, out, err = inspect(path, option)
        assert (status, err) == (0, ""), path
        assert said in out, path


def test_xlas_module_is_printed_as_xla_wrote_it(inspect: Run, xla_snapshot: Path) -> None:
    assert "is_scheduled=true" in inspect(xla_snapshot, "--hlo")[1]


def test_xlas_snapshot_shows_both_sides(inspect: Run, xla_snapshot: Path) -> None:
    status, out, _ = inspect(xla_snapshot)
    assert status == 0
    assert "inputs: 2" in out
    assert "outputs: 3" in out


@pytest.mark.parametrize("form", BARE)
def test_a_bare_module_shows_what_it_takes(
    form: str, inspect: Run, modules: Mapping[str, Path]
) -> None:
    status, out, _ = inspect(modules[form])
    assert status == 0
    assert "parameters of the module: float32[4,3], float32[3,2]" in out


def test_one_array_is_printed_and_saved(inspect: Run, recorded: Path, tmp_path: Path) -> None:
    path = outputs_of(recorded)
    arrays = json.loads(inspect(path, "--json")[1])["arrays"]
    half = next(array for array in arrays if array["dtype"] == "bfloat16")
    status, out, err = inspect(path, "--array", half["name"], "--save", tmp_path / "a.npy")
    assert status == 0
    assert "bfloat16[2,2]" in out
    assert out.rstrip().endswith("]]")
    assert "saved" in err
    assert np.load(tmp_path / "a.npy").dtype == np.uint16


def test_an_array_that_is_not_there_is_an_error_that_lists_those_that_are(
    inspect: Run, recorded: Path
) -> None:
    status, _, err = inspect(recorded, "--array", "nonsense")
    assert status == 2
    assert "contains no array named nonsense" in err
    assert "it holds: arg0" in err


@pytest.mark.parametrize(
    "words", [["--hlo", "--stablehlo"], ["--array", "arg0", "--hlo"], ["--save", "x.npy"]]
)
def test_questions_that_do_not_go_together_are_misuse(
    words: list[str], inspect: Run, recorded: Path
) -> None:
    status, _, err = inspect(recorded, *words)
    assert status == 2
    assert err.startswith("error: ")


def test_damaged_and_foreign_files_are_errors(inspect: Run, recorded: Path, tmp_path: Path) -> None:
    content = recorded.read_bytes()
    files = {"cut": content[: len(content) // 2], "empty": b"", "foreign": b"hello there"}
    for name, bad in files.items():
        (tmp_path / name).write_bytes(bad)
        status, _, err = inspect(tmp_path / name)
        assert status == 2
        assert err.startswith("error: ")
        assert "Traceback" not in err


def test_hostile_names_do_not_reach_the_terminal(inspect: Run, tmp_path: Path) -> None:
    path = tmp_path / "evil.mlir"
    path.write_text('module @"\x1b[31mevil" { func.func public @main() { return } }')
    for words in ([], ["--stablehlo"], ["--hlo"]):
        assert "\x1b" not in inspect(path, *words)[1]


def test_a_hostile_name_that_is_not_there_does_not_reach_the_terminal(
    inspect: Run, recorded: Path
) -> None:
    status, _, err = inspect(recorded, "--array", "\x1b[31m")
    assert status == 2
    assert r"no array named \x1b[31m" in err
    assert "\x1b" not in err


def test_statistics_leave_out_what_is_not_finite() -> None:
    values = np.array([1.0, -2.0, 0.0, np.nan, np.inf, -np.inf], np.float32)
    one = describe(NamedArray("a", values))
    assert (one.minimum, one.maximum, one.mean) == (-2.0, 1.0, pytest.approx(-1 / 3))
    assert (one.nan_count, one.inf_count, one.zero_count) == (1, 2, 1)
    nothing = describe(NamedArray("b", np.empty((0, 3), np.float32)))
    assert (nothing.minimum, nothing.maximum, nothing.mean) == (None, None, None)
    assert describe(NamedArray("c", np.array([True, False]))).mean == 0.5
