"""``snaprt localize``: what it prints, and the status it leaves with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from snaprt_replay.load import sniff
from snaprt_replay.localize.findings import from_json

Run = Callable[..., tuple[int, str, str]]


def test_the_precision_of_a_dot_is_found_to_explain_a_tpu(
    snaprt: Run, recorded: Path, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "of_the_user").touch()
    status, out, err = snaprt(
        "localize", recorded, "--random", "0", "--a", "tpu-precision=default", "--state", state
    )
    assert status == 1
    assert "FOUND: " in out
    assert "(dot f32[2,2])" in out
    assert "goes wrong on tpu-precision=default" in out
    assert "regions" in err
    assert [one.name for one in state.iterdir()] == ["of_the_user"]


def test_sides_that_agree_leave_with_status_0(snaprt: Run, recorded: Path) -> None:
    status, out, _ = snaprt("localise", recorded)  # the command's other name
    assert status == 0
    assert "note: f64 reproduces the recorded outputs" in out
    assert "NOTHING FOUND: cpu and f64 agree within tolerance" in out


def test_an_edited_module_is_compared_with_the_original(
    snaprt: Run, modules: Mapping[str, Path], tmp_path: Path
) -> None:
    original = modules[sniff.HLO_TEXT]
    edited = tmp_path / "edited.hlo.txt"
    edited.write_text(original.read_text().replace(" tanh(", " sine("))
    status, out, _ = snaprt("localize", edited, "--against", original, "--random", "0", "--json")
    assert status == 1
    found = from_json(json.loads(out))
    assert [one.opcode for one in found.instructions] == ["sine"]
    assert found.suspect == "cpu of edited.hlo.txt"
    assert found.share_matched == 1.0


def test_a_spent_budget_is_no_agreement(snaprt: Run, recorded: Path) -> None:
    status, out, _ = snaprt("localize", recorded, "--budget", "0")
    assert status == 1
    assert "UNFINISHED: the budget ran out" in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--a", "recorded"], "name a side that runs the program"),
        (["--b", "cpu:x"], "a variant is"),
        (["--a", "tpu:99"], "error: there is no tpu"),
        (["--b", "python=/no/such/python"], "error: cannot start /no/such/python"),
    ],
)
def test_a_side_that_cannot_be_looked_into_is_misuse(
    snaprt: Run, recorded: Path, words: list[str], told: str
) -> None:
    status, _, err = snaprt("localize", recorded, *words)
    assert status == 2
    assert told in err
    assert "snaprt minify" not in err


def test_another_program_is_refused(
    snaprt: Run, recorded: Path, modules: Mapping[str, Path]
) -> None:
    status, _, err = snaprt("localize", recorded, "--against", modules[sniff.MLIR_TEXT])
    assert status == 2
    assert "do not hold the same program" in err


def test_a_module_without_inputs_asks_for_them(snaprt: Run, modules: Mapping[str, Path]) -> None:
    status, _, err = snaprt("localize", modules[sniff.MLIR_TEXT])
    assert status == 2
    assert "--random SEED" in err
