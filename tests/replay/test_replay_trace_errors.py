"""``snaprt replay`` of an error that was raised while a graph was recorded."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from several_devices import write_anew

import snaprt
from snaprt.cli.main import main
from snaprt.snapshot.format.read import open_snapshot
from snaprt.snapshot.recorder.record import process_recorder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("error")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SNAPRT_RECORD", "error")
        patch.setenv("SNAPRT_DUMP_DIR", str(folder))
        x = jnp.ones((3, 4))
        with snaprt.lazy():
            h = jnp.tanh(x)
            with pytest.raises(TypeError):
                jax.lax.dot_general(h, h, (((1,), (0,)), ((), ())))
        assert process_recorder().flush(60)
    (path,) = folder.glob("*.snap")
    return path


def changed(recorded: Path, folder: Path, **fields: Any) -> Path:
    error = open_snapshot(recorded).manifest.trace_error
    assert error is not None
    return write_anew(
        recorded, folder / recorded.name, trace_error=dataclasses.replace(error, **fields)
    )


def test_the_same_operation_raises_the_same_error(
    recorded: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(recorded)]) == 0
    told = capfd.readouterr().out
    assert "recorded: builtins.TypeError: dot_general requires contracting dimensions" in told
    assert "operation: dot_general(float32[3,4], float32[3,4]) with dimension_numbers=" in told
    assert f"  at {__file__}:" in told
    assert "REPRODUCES: the same operation raises the same error" in told


def test_the_same_is_told_as_json(recorded: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--json", str(recorded)]) == 0
    (file,) = json.loads(capfd.readouterr().out)["reports"]
    assert file["headline"]["word"] == "REPRODUCES"
    assert file["trace_error"]["primitive"] == "dot_general"
    assert file["raised"]["message"] == file["trace_error"]["message"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (
            {"operands": ({"shape": [3, 4], "dtype": "float32", "weak_type": False},) * 2,
             "primitive": "add", "module": "jax._src.lax.lax", "params": {}},
            "add raises no error with these operands",
        ),
        ({"message": "something else"}, "raises a different error, builtins.TypeError"),
        ({"primitive": "warp"}, "this JAX has no primitive warp"),
        ({"primitive": ""}, "no operation failed"),
        ({"operands": ({"shape": [3], "dtype": "float99", "weak_type": False},)}, "float99"),
        (
            {"params": {"jaxpr": {"unencodable": "jax.core.Jaxpr", "text": "{ lambda ; }"}}},
            "a jax.core.Jaxpr could not be written to the file",
        ),
        (
            {"operands": ({"unencodable": "AbstractRef", "text": "Ref{float32[3]}"},)},
            "an operand, Ref{float32[3]}, could not be written to the file",
        ),
    ],
)  # fmt: skip
def test_where_it_does_not_come_again_the_reason_is_told(
    fields: dict[str, Any],
    why: str,
    recorded: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["replay", str(changed(recorded, tmp_path, **fields))]) == 1
    told = capfd.readouterr().out
    assert "DOES NOT REPRODUCE" in told
    assert why in told


def test_inspect_shows_the_error_and_the_graph_so_far(
    recorded: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(recorded)]) == 0
    told = capfd.readouterr().out
    assert "TypeError: dot_general requires" in told
    assert "dot_general(float32[3,4], float32[3,4])" in told
    assert main(["inspect", "--hlo", str(recorded)]) == 0
    assert "tanh" in capfd.readouterr().out


def test_in_a_folder_and_in_a_report_it_is_raised_again_too(
    recorded: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for words in (["replay", str(recorded.parent)], ["report", str(recorded)]):
        assert main(words) == 0
        assert "REPRODUCES: the same operation raises the same error" in capfd.readouterr().out


def test_a_folder_with_one_that_does_not_come_again_ends_with_1(
    recorded: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    changed(recorded, tmp_path, message="another one")
    assert main(["replay", str(tmp_path)]) == 1
    assert "DOES NOT REPRODUCE" in capfd.readouterr().out


@pytest.mark.parametrize("words", [("localize",), ("minify",), ("replay", "--b", "cpu")])
def test_what_needs_an_execution_refuses_it(
    recorded: Path, words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, str(recorded)]) == 2
    assert "contains no execution: an error ended the recording" in capfd.readouterr().err
