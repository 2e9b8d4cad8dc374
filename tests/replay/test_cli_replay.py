"""``snaprt replay``: what it prints, and the status it leaves with."""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from programs import SNAPRT, run_program
from snaprt_replay.compare.results import comparison_from_json
from snaprt_replay.load import sniff
from snaprt_replay.load.load import load

Run = Callable[..., tuple[int, str, str]]


def test_a_match_leaves_with_status_0_and_says_so(snaprt: Run, recorded: Path) -> None:
    status, out, err = snaprt("replay", recorded, "--repeat", "2")
    assert status == 0
    assert "MATCH: all 3 outputs are identical, bit for bit" in out
    assert "2 runs gave identical bits" in out
    assert "3 outputs identical: " in out
    assert "error" not in err
    assert "\x1b" not in out


def test_identical_outputs_are_listed_on_request(snaprt: Run, recorded: Path) -> None:
    _, out, _ = snaprt("replay", recorded, "--verbose")
    assert len(re.findall(r"^\S+ +\S+\[[\d,]*\] +identical ", out, re.MULTILINE)) == 3
    assert "default for float32" in out


def test_a_mismatch_leaves_with_status_1_and_says_where(snaprt: Run, spoiled: Path) -> None:
    status, out, _ = snaprt("replay", spoiled)
    assert status == 1
    assert re.search(r"MISMATCH: 1 of 3 outputs differ; first: \S+, 1 of 4 elements beyond", out)
    assert "[1,0]" in out


@pytest.mark.parametrize("options", [["--rtol", "0.6"], ["--atol", "9"], ["--max-ulp", "99999999"]])
def test_a_wider_tolerance_accepts_it(options: list[str], snaprt: Run, spoiled: Path) -> None:
    status, out, _ = snaprt("replay", spoiled, *options)
    assert status == 0
    assert "asked for" in out
    assert "within tolerance" in out


def test_several_files_are_summed_up_and_the_worst_gives_the_status(
    snaprt: Run, recorded: Path, spoiled: Path, tmp_path: Path
) -> None:
    (tmp_path / "broken.snap").write_bytes(recorded.read_bytes()[:500])
    status, out, err = snaprt("replay", recorded, spoiled, tmp_path / "broken.snap")
    assert status == 2
    assert "3 files: 1 FAILED, 1 MATCH, 1 MISMATCH" in out
    assert "error:" in err
    status, out, _ = snaprt("replay", recorded, spoiled)
    assert status == 1


def test_a_glob_over_a_dump_folder_replays_each_execution_once(snaprt: Run, recorded: Path) -> None:
    outputs = recorded.with_name(recorded.name.replace(".inputs.", ".outputs."))
    status, out, _ = snaprt("replay", recorded, outputs)
    assert status == 0
    assert out.count("MATCH") == 1
    assert "files:" not in out


def test_json_holds_the_comparison_and_reads_back(snaprt: Run, spoiled: Path) -> None:
    status, out, _ = snaprt("replay", spoiled, "--json", "--repeat", "2")
    data = json.loads(out)
    assert (data["schema"], data["version"], data["status"]) == ("snaprt.report", 1, status)
    (file,) = data["reports"]
    assert file["headline"]["word"] == "MISMATCH"
    assert comparison_from_json(file["comparison"]).verdict == "mismatch"
    assert comparison_from_json(file["repeats"]).verdict == "identical"


@pytest.mark.parametrize("words", [("replay",), ("replay", "-j", "1"), ("report",)])
def test_json_holds_an_error_too_and_stderr_tells_it_once(
    snaprt: Run, tmp_path: Path, words: tuple[str, ...]
) -> None:
    status, out, err = snaprt(*words, tmp_path / "absent.snap", "--json")
    assert status == 2
    assert "there is no file" in json.loads(out)["reports"][0]["headline"]["sentence"]
    assert err.count("error: there is no file") == 1


@pytest.mark.parametrize("isolated", ["--isolate", "--no-isolate"])
def test_a_profile_that_cannot_be_written_is_an_error_with_a_hint(
    snaprt: Run, recorded: Path, tmp_path: Path, isolated: str
) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/profile-\xff"))
    status, _, err = snaprt("replay", recorded, isolated, "--profile", folder)
    assert status == 2
    assert "not UTF-8\n\nhint: name another folder" in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--save-hlo", "x"], "--save-hlo needs --compile-only"),
        (["--compile-only", "--repeat", "2"], "--repeat cannot be combined with --compile-only"),
        (["--a", "cpu", "--rtol", "1"], "--rtol cannot be combined with --a, --b or --reference"),
        (["--b", "cpu", "--device", "cpu"], "--device cannot be combined with --b"),
        (["--device", "recorded"], "recorded is another kind of variant"),
        (["--device", "f64"], "f64 is another kind of variant"),
        (["--html", "no/page.html"], "no directory "),
    ],
)
def test_options_without_effect_are_refused(
    snaprt: Run, recorded: Path, options: list[str], said: str
) -> None:
    status, out, err = snaprt("replay", recorded, *options)
    assert (status, out) == (2, "")
    assert said in err


def test_float64_is_compared_as_what_the_program_would_return(snaprt: Run, recorded: Path) -> None:
    for side in ("--a", "--b"):
        status, out, _ = snaprt("replay", recorded, side, "f64")
        assert status == 0
        assert "WITHIN ROUNDING" in out
        assert "dtype" not in out


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_variant_that_cannot_run_is_told_on_stderr(
    snaprt: Run, recorded: Path, options: list[str]
) -> None:
    status, out, err = snaprt("replay", recorded, "--b", "cpu:99", *options)
    assert status == 2
    assert "CANNOT BE JUDGED" in out
    assert "error: B (cpu:99) gave no result: missing device" in err


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("JAX_PLATFORMS", "cuda", "JAX finds no device here with JAX_PLATFORMS=cuda"),
        ("JAX_ENABLE_X64", "foo", "JAX cannot be imported: invalid truth value 'foo'"),
        ("JAX_DEFAULT_MATMUL_PRECISION", "silly", "JAX cannot be imported: Invalid value"),
    ],
)
@pytest.mark.parametrize("options", [(), ("--isolate",)])
def test_a_setting_that_jax_refuses_is_no_error_of_ours(
    recorded: Path, options: tuple[str, ...], name: str, value: str, said: str
) -> None:
    shown = run_program((*SNAPRT, "replay", str(recorded), *options), status=2, **{name: value})
    assert said in shown.stderr
    assert "bug" not in shown.stderr


def test_a_time_limit_holds_for_a_single_file(snaprt: Run, recorded: Path) -> None:
    status, _, err = snaprt("replay", recorded, "--timeout", "0.001")
    assert status == 2
    assert "timeout: no result within 0.001 s" in err
    status, out, _ = snaprt("replay", recorded, "--timeout", "300")
    assert status == 0
    assert "in a separate process" in out
    status, _, err = snaprt("replay", recorded, "--timeout", "300", "--no-isolate")
    assert status == 2
    assert "--timeout cannot be combined with --no-isolate" in err


@pytest.mark.parametrize("isolated", ["--isolate", "--no-isolate"])
def test_a_bare_module_runs_on_random_inputs_and_shows_statistics(
    isolated: str, snaprt: Run, modules: Mapping[str, Path]
) -> None:
    status, out, _ = snaprt("replay", modules[sniff.MLIR_TEXT], "--random", "3", isolated)
    assert status == 0
    assert "the inputs are random, with seed 3" in out
    assert "NOTHING TO COMPARE WITH" in out
    assert "float32[4,2]" in out
    assert ("in a separate process" in out) == (isolated == "--isolate")


def test_a_bare_module_takes_inputs_from_a_file_and_saves_its_outputs(
    snaprt: Run, modules: Mapping[str, Path], tmp_path: Path
) -> None:
    x, w = np.ones((4, 3), np.float32), np.ones((3, 2), np.float32)
    np.savez(tmp_path / "in.npz", arg0=x, arg1=w)
    words = ("--inputs", tmp_path / "in.npz", "--save", tmp_path / "out.npz")
    status, _, err = snaprt("replay", modules[sniff.HLO_TEXT], *words)
    assert status == 0
    assert "saved the outputs" in err
    with np.load(tmp_path / "out.npz") as saved:
        np.testing.assert_allclose(saved["out0"], np.tanh(x @ w), rtol=1e-5)
        assert saved["out1"] == np.True_


def test_saved_outputs_are_compared_with_those_of_a_later_replay(
    snaprt: Run, modules: Mapping[str, Path], tmp_path: Path
) -> None:
    x, w = np.ones((4, 3), np.float32), np.ones((3, 2), np.float32)
    inputs, outputs = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(inputs, arg0=x, arg1=w)
    module = modules[sniff.MLIR_BYTECODE]
    assert snaprt("replay", module, "--inputs", inputs, "--save", outputs)[0] == 0
    status, out, _ = snaprt("replay", module, "--inputs", inputs, "--outputs", outputs)
    assert (status, "MATCH: all 2 outputs are identical" in out) == (0, True)
    assert f"the recorded outputs from {outputs}" in " ".join(out.split())
    with np.load(outputs) as saved:
        changed = {name: saved[name].copy() for name in saved.files}
    changed["out0"][1, 1] += 0.5
    np.savez(outputs, **changed)
    status, out, _ = snaprt("replay", module, "--inputs", inputs, "--outputs", outputs)
    assert (status, "MISMATCH" in out) == (1, True)
    changed["out0"][1, 1] -= 0.5
    np.savez(outputs, out0=changed["out0"])
    status, out, _ = snaprt("replay", module, "--inputs", inputs, "--outputs", outputs)
    assert status == 1
    assert "missing in recorded" in out


def test_outputs_as_raw_bytes_have_the_dtype_that_the_module_returns(
    snaprt: Run, recorded: Path, tmp_path: Path
) -> None:
    module, outputs = tmp_path / "step.mlirbc", tmp_path / "out.npz"
    assert snaprt("export", recorded, "--to", "stablehlo", "-o", module)[0] == 0
    inputs = tmp_path / "in.npz"
    np.savez(inputs, *[array.value for array in load(recorded).inputs or ()])
    assert snaprt("replay", module, "--inputs", inputs, "--save", outputs)[0] == 0
    status, out, _ = snaprt("replay", module, "--inputs", inputs, "--outputs", outputs, "--json")
    assert status == 0
    assert "bfloat16" in out


def test_saved_bfloat16_outputs_can_be_read_back(
    snaprt: Run, recorded: Path, tmp_path: Path
) -> None:
    assert snaprt("replay", recorded, "--save", tmp_path / "out.npz")[0] == 0
    with np.load(tmp_path / "out.npz") as saved:
        raw = [saved[name] for name in saved.files if saved[name].dtype.kind == "V"]
    assert raw[0].view(ml_dtypes.bfloat16).shape == (2, 2)


def test_another_flag_set_is_a_warning(snaprt: Run, recorded: Path) -> None:
    status, out, _ = snaprt("replay", recorded, "--xla-flag", "--xla_cpu_enable_fast_math=true")
    assert status == 0
    assert "warning: replayed with the compiler options xla_cpu_enable_fast_math=True" in out


def test_the_hint_for_an_option_that_xla_does_not_have_is_about_the_option(
    snaprt: Run, recorded: Path
) -> None:
    for apart in ([], ["-j", "1"]):
        status, _, err = snaprt("replay", recorded, "--xla-flag", "xla_no_such_option=1", *apart)
        assert status == 2
        assert "xla_no_such_option" in err
        assert "hint: this version of XLA has no option of that name" in err


def test_a_pass_to_disable_may_be_misspelled(snaprt: Run, recorded: Path) -> None:
    status, out, _ = snaprt("replay", recorded, "--disable-hlo-pass", "no-such-pass")
    assert status == 0
    assert "warning: XLA ignores the names of passes that it does not have" in out


def test_xlas_own_snapshot_replays(snaprt: Run, xla_snapshot: Path) -> None:
    status, out, _ = snaprt("replay", xla_snapshot)
    assert status == 0
    assert "XLA HloSnapshot" in out
    assert "MATCH" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "tpu"], "there is no tpu device here"),
        (["--device", "my gpu"], "unknown device"),
        (["--rtol", "-1"], "rtol must be"),
        (["--repeat", "0"], "0 is not in the range"),
        (["--xla-flag", "nonsense"], "is not NAME=VALUE"),
        (["--xla-flag", "xla_no_such_option=1"], "xla_no_such_option"),
        (["--random", "1", "--inputs", "x.npz"], "not both"),
        (["--inputs", "absent.npz"], "there is no file"),
        (["--outputs", "out.npz"], "need the inputs"),
        (["--save", "out.txt"], "only .npz is supported"),
    ],
)
def test_misuse_is_an_error_with_status_2_and_no_traceback(
    words: list[str], said: str, snaprt: Run, recorded: Path
) -> None:
    status, _, err = snaprt("replay", recorded, *words)
    assert status == 2
    assert said in err
    assert "Traceback" not in err
    assert err.startswith("error: ")


def test_outputs_that_cannot_be_saved_are_an_error(
    snaprt: Run, recorded: Path, tmp_path: Path
) -> None:
    status, _, err = snaprt("replay", recorded, "--save", tmp_path / "absent" / "out.npz")
    assert status == 2
    assert "cannot save outputs" in err


def test_help_has_an_example(snaprt: Run) -> None:
    status, out, _ = snaprt("replay", "--help")
    assert status == 0
    assert "Example:" in out


def test_no_files_is_misuse(snaprt: Run) -> None:
    assert snaprt("replay")[0] == 2
