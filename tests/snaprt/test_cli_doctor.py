import json
import subprocess
from pathlib import Path

from programs import SNAPRT, run_program

from snaprt.cli import doctor


def examine(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    words = (*SNAPRT, "doctor", *words)
    return run_program(words, status=None, **{"JAX_PLATFORMS": "cpu"} | environment)


def states(shown: subprocess.CompletedProcess[str]) -> dict[str, str]:
    return {row["name"]: row["state"] for row in json.loads(shown.stdout)["checks"]}


def test_a_sound_installation_passes_every_check(tmp_path: Path):
    shown = examine("--json", SNAPRT_CACHE_DIR=str(tmp_path))
    assert states(shown) == {check.name: doctor.OK for check in doctor.CHECKS}, shown.stdout
    assert json.loads(shown.stdout)["ok"] is True
    assert shown.returncode == 0


def test_a_cache_directory_that_cannot_be_used_is_said_and_the_rest_still_tried(tmp_path: Path):
    (tmp_path / "file").write_text("")
    shown = examine(SNAPRT_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert shown.returncode == 1
    lines = shown.stdout.splitlines()
    (failed,) = (number for number, line in enumerate(lines) if line.startswith("failed"))
    assert "cache directory" in lines[failed]
    assert "hint: Set SNAPRT_CACHE_DIR" in lines[failed + 1]
    assert any(line.startswith("ok") and "execution" in line for line in lines)
    assert "Traceback" not in shown.stderr


def test_a_setting_that_is_not_allowed_is_named_with_what_is():
    shown = examine(SNAPRT_LAZY="perhaps")
    assert shown.returncode == 1
    assert "SNAPRT_LAZY is 'perhaps'" in shown.stdout
    assert "hint: Allowed: on, off" in shown.stdout


def test_a_flag_that_xla_does_not_know_is_said_and_the_rest_still_tried(tmp_path: Path):
    shown = examine("--json", SNAPRT_CACHE_DIR=str(tmp_path), XLA_FLAGS="--xla_nope=1")
    assert shown.returncode == 1, shown.stderr
    found = states(shown)
    assert found["devices"] == doctor.FAILED
    assert "XLA does not know --xla_nope" in shown.stdout
    assert found["cache directory"] == doctor.OK
    assert found["replay"] == doctor.NOT_TRIED


def test_a_place_that_a_variable_names_and_that_cannot_be_written_is_said(tmp_path: Path):
    (tmp_path / "file").write_text("")
    shown = examine(
        SNAPRT_CACHE_DIR=str(tmp_path),
        SNAPRT_TRACE=str(tmp_path / "made" / "later"),
        SNAPRT_DUMP_DIR=str(tmp_path / "file" / "dump"),
        SNAPRT_RECORD="nan",
    )
    assert shown.returncode == 1
    lines = shown.stdout.splitlines()
    (failed,) = (number for number, line in enumerate(lines) if line.startswith("failed"))
    assert f"write access     cannot write SNAPRT_DUMP_DIR in {tmp_path}/file/dump" in lines[failed]
    assert "hint: Use an existing, writable directory" in lines[failed + 1]
    # What the variables say of recording does not keep the rest from being tried.
    assert any(line.startswith("ok") and "replay" in line for line in lines)


def test_no_device_leaves_what_needs_one_untried(tmp_path: Path):
    shown = examine("--json", SNAPRT_CACHE_DIR=str(tmp_path), JAX_PLATFORMS="nonsense")
    assert shown.returncode == 1
    found = states(shown)
    assert found["devices"] == doctor.FAILED
    assert found["cache directory"] == doctor.OK
    assert found["compile"] == found["replay"] == doctor.NOT_TRIED


def test_every_check_comes_after_those_it_needs():
    seen: set[str] = set()
    for check in doctor.CHECKS:
        assert seen.issuperset(check.needs)
        seen.add(check.name)
