"""``snaprt run --explain`` says at the end of a program what cut its graphs."""

import json
import subprocess
from pathlib import Path

import pytest
from programs import SNAPRT, run_program

RUN = (*SNAPRT, "run", "--lazy")

PROGRAM = """
import jax.numpy as jnp, snaprt
x = jnp.ones(4)
for step in range(5):
    x = x * 2
    snaprt.mark_step()
    if (x + step).sum() > 3:
        print("step", step)
raise SystemExit(7)
"""


def run(folder: Path, *options: str, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(program)
    words = (*RUN, *options, "program.py")
    return run_program(words, folder=folder, status=None, SNAPRT_CACHE="off")


def test_a_run_is_explained_at_its_end_by_the_lines_that_cut_graphs(tmp_path):
    shown = run(tmp_path, "--explain", "--explain-json", "explained.json")
    assert shown.returncode == 7
    assert shown.stdout.splitlines() == [f"step {step}" for step in range(5)]
    rows = [line.split() for line in shown.stderr.splitlines() if "program.py:" in line]
    assert [(row[0], row[-4], row[-3]) for row in rows] == [
        ("5", "mark_step", "program.py:6"),
        ("5", "bool", "program.py:7"),
    ]
    assert "instead: select with jnp.where" in shown.stderr
    content = json.loads((tmp_path / "explained.json").read_text())
    assert (content["schema"], content["version"]) == ("snaprt.explain", 1)
    places = [(one["cause"], one["line"], one["times"]) for one in content["places"]]
    assert places == [("mark_step", 6, 5), ("bool", 7, 5)]


def test_a_file_that_cannot_be_written_is_told_before_the_program_runs(tmp_path):
    shown = run(tmp_path, "--explain-json", "nowhere/e.json", program="print('ran')")
    assert shown.returncode == 2
    assert "ran" not in shown.stdout
    assert "hint: " in shown.stderr


def test_a_file_that_a_full_disk_refuses_leaves_the_program_its_status_and_the_table(tmp_path):
    shown = run(tmp_path, "--explain", "--explain-json", "/dev/full")
    assert shown.returncode == 7
    assert "cannot write /dev/full: No space left on device\nhint: Free some space" in shown.stderr
    assert "instead: select with jnp.where" in shown.stderr


def test_a_program_that_runs_nothing_lazily_is_told_how(tmp_path):
    shown = run(tmp_path, "--explain", program="print('ran')")
    assert (shown.returncode, shown.stdout) == (0, "ran\n")
    assert "nothing ran lazily" in shown.stderr


def test_what_runs_at_the_end_of_the_program_is_called_so(tmp_path):
    shown = run(tmp_path, "--explain", program="import jax.numpy as jnp\nx = jnp.ones(3) * 2")
    (row,) = [line.split() for line in shown.stderr.splitlines() if "compiled  " in line]
    assert row[-5:] == ["end", "(not", "in", "your", "program)"]


@pytest.mark.parametrize("start", [("-m", "snaprt"), ("script",)])
def test_the_stack_of_a_cut_ends_at_the_program(tmp_path, start):
    (tmp_path / "script").write_text("from snaprt.__main__ import main\nmain()\n")
    (tmp_path / "program.py").write_text("import jax.numpy as jnp\nprint(jnp.ones(3) * 2)\n")
    shown = run_program(
        (*start, "run", "--lazy", "program.py"),
        folder=tmp_path,
        SNAPRT_CACHE="off",
        PT_XLA_DEBUG=1,
        XLA_IR_DEBUG=1,
        XLA_SAVE_TENSORS_FILE="graphs.txt",
    )
    frames = [line for line in shown.stderr.splitlines() if ".py:" in line]
    assert len(frames) == 2  # of the compilation and of the execution
    assert all(line.endswith(f"  <module> ({tmp_path / 'program.py'}:2)") for line in frames)
    assert "from=" not in (tmp_path / "graphs.txt").read_text()
