"""`snaprt stacks` on processes that really run."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from snaprt.cli import main, stacks
from snaprt.errors import UsageError
from snaprt.host.stacks import py_spy

_PROGRAM = """
import threading, time

def sleeping_in_a_thread():
    time.sleep(60)

threading.Thread(target=sleeping_in_a_thread, name="loader", daemon=True).start()

def waiting_for_a_word():
    print("ready", flush=True)
    input()

waiting_for_a_word()
"""


@pytest.fixture(scope="module")
def process() -> Iterator[int]:
    if _is_missing():
        pytest.skip("py-spy is not installed")
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None
        started.stdout.readline()
        yield started.pid
        started.kill()


def _is_missing() -> bool:
    try:
        py_spy()
    except UsageError:
        return True
    return False


def _skip_where_the_system_forbids_it(result) -> None:
    if result.exit_code and "may not look" in str(result.exception):
        pytest.skip("this system lets no process look into another")


def test_the_stacks_of_all_threads_are_printed(process: int) -> None:
    result = CliRunner().invoke(stacks.command, [str(process)])
    _skip_where_the_system_forbids_it(result)
    assert result.exit_code == 0
    assert "waiting_for_a_word" in result.stdout
    assert "sleeping_in_a_thread" in result.stdout
    assert "loader" in result.stdout


def test_as_json_each_thread_has_its_frames_innermost_first(process: int) -> None:
    result = CliRunner().invoke(stacks.command, ["--python-only", "--json", str(process)])
    _skip_where_the_system_forbids_it(result)
    found = json.loads(result.stdout)
    assert (found["schema"], found["version"], found["pid"]) == ("snaprt.stacks", 1, process)
    frames = {thread["thread_name"]: thread["frames"] for thread in found["threads"]}
    assert [frame["name"] for frame in frames["MainThread"]] == ["waiting_for_a_word", "<module>"]
    assert frames["loader"][0]["name"] == "sleeping_in_a_thread"


def test_a_process_that_is_not_there_is_an_error_that_says_what_to_do(capsys) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert main.main(["stacks", str(ended.pid)]) == 2
    shown = capsys.readouterr().err
    assert f"error: cannot read the stacks of process {ended.pid}" in shown or "py-spy" in shown
    assert "hint:" in shown


def test_without_py_spy_the_error_names_what_to_install(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main.main(["stacks", str(os.getpid())]) == 2
    assert "pip install 'snaprt[stacks]'" in capsys.readouterr().err
