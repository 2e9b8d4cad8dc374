"""``snaprt run --profile`` takes a profile, and ``snaprt profile`` prints the top of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from programs import SNAPRT, run_program

from snaprt.cli import main as cli
from snaprt.cli import output
from snaprt.cli.profile.read import HostProfile, ProfileEvent
from snaprt.cli.profile.summary import Gap, summarize
from snaprt.cli.run import launch

JITTED = """
import jax, jax.numpy as jnp

@jax.jit
def train_step(w, x):
    return w - jnp.tanh(x @ w) * 0.1

w, x = jnp.ones((64, 64)), jnp.ones((64, 64))
for step in range(8):
    w = train_step(w, x)
print(float(w.sum()) != 0)
"""
LAZY = """
import jax.numpy as jnp, snaprt
x = jnp.ones((64, 64))
for step in range(6):
    with snaprt.StepTrace("train", step_num=step):
        x = jnp.tanh(x @ x) * 2
print(float(x.sum()) != 0)
"""


def profiled(folder: Path, program: str, *options: str) -> str:
    """Run a program with a profile of steps 3 and 4, and return what was told."""
    (folder / "train.py").write_text(program)
    words = (*SNAPRT, "run", "--profile", "profile", "--profile-steps", "3-4", *options)
    done = run_program((*words, "--", "train.py"), folder=folder, SNAPRT_CACHE="off")
    assert done.stdout == "True\n"
    return done.stderr


def shown(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    """Return what ``snaprt profile --json`` prints of the only process."""
    assert cli.main(["profile", *map(str, words), "--json"]) == output.EXIT_OK
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["version"]) == ("snaprt.profile", 1)
    (host,) = found["hosts"]
    return host


def test_the_profile_of_a_jitted_program_joins_with_its_snapshots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = profiled(tmp_path, JITTED, "--dump", "dump", "--when", "name=train_step, first=1")
    assert "the profile counts executions of train_step" in told
    assert "snaprt profile" in told
    host = shown(capsys, tmp_path / "profile")
    (program,) = host["programs"]
    assert (program["module"], program["executions"]) == ("jit_train_step", 2)
    (snapshot,) = (tmp_path / "dump").glob("*.inputs.snap")
    assert program["graph_id"] in snapshot.name
    line = f"{tmp_path / 'train.py'}:6 (train_step)"
    assert line in {operation["source"] for operation in host["operations"]}
    spans = {span["span"]: span["times"] for span in host["snaprt"]}
    assert spans["snaprt:execute"] == 2
    assert 0 < host["busy"] <= host["seconds"]
    # The same for people.
    assert cli.main(["profile", str(tmp_path / "profile"), "--top", "1"]) == output.EXIT_OK
    text = capsys.readouterr().out
    assert f"{program['graph_id']}  jit_train_step" in text
    assert "operations (the first 1 of " in text


def test_the_names_of_lazy_modules_have_the_ids_of_their_graphs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = profiled(tmp_path, LAZY, "--lazy", "--dump", "dump")
    assert "the program has marked no step" not in told
    host = shown(capsys, tmp_path / "profile")
    (program,) = host["programs"]
    assert program["executions"] == 2
    assert program["module"] == f"jit_lazy_graph_{program['graph_id']}"
    assert any(program["graph_id"] in file.name for file in (tmp_path / "dump").iterdir())
    assert [(step["name"], step["steps"]) for step in host["steps"]] == [("train", 1)]


def test_a_replay_is_profiled_once_it_is_warm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = Path(__file__).parents[1] / "support" / "snapshots" / "format-1.0.inputs.snap"
    folder = tmp_path / "profile"
    assert cli.main(["replay", str(snapshot), "--profile", str(folder)]) == output.EXIT_OK
    assert f"see `snaprt profile {folder}`" in capsys.readouterr().err
    host = shown(capsys, folder)
    (program,) = host["programs"]
    assert program["executions"] == 1
    assert snapshot_graph(capsys, snapshot) == program["graph_id"]
    assert [(span["span"], span["times"]) for span in host["snaprt"]] == [("snaprt:execute", 1)]
    assert all(operation["opcode"] for operation in host["operations"])
    for words in (("--a", "cpu"), ("--all-devices",), ("--compile-only",)):
        status = cli.main(["replay", str(snapshot), "--profile", str(folder), *words])
        assert status == output.EXIT_FAILURE
        assert "error: --profile cannot be combined with " in capsys.readouterr().err


def snapshot_graph(capsys: pytest.CaptureFixture[str], snapshot: Path) -> str:
    assert cli.main(["inspect", str(snapshot), "--json"]) == output.EXIT_OK
    found = json.loads(capsys.readouterr().out)
    return str(found["facts"]["graph"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--profile-steps", "5-2", "--profile", "p"), "'5-2' ends before it begins"),
        (("--profile-steps", "x", "--profile", "p"), "'x' is not a range of steps"),
        (("--profile-steps", "3"), "--profile-steps needs a directory"),
        (("--profile", "train.py"), "train.py: not a directory"),
        (("--profile", "train.py/below"), "train.py/below: Not a directory"),
    ],
)
def test_what_cannot_be_profiled_is_told_before_the_program_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('ran')")
    assert cli.main(["run", *words, "--", "train.py"]) == output.EXIT_FAILURE
    captured = capsys.readouterr()
    assert (captured.out, message in captured.err, "hint: " in captured.err) == ("", True, True)


def test_what_is_no_profile_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "damaged.xplane.pb").write_bytes(b"no message of any kind")
    (tmp_path / "notes.txt").write_text("no profile")
    (tmp_path / "empty").mkdir()
    for words, message in {
        (tmp_path / "nowhere",): " does not exist",
        (tmp_path / "empty",): "no profile in",
        (tmp_path / "notes.txt",): "its name does not end in .xplane.pb",
        (tmp_path / "damaged.xplane.pb",): "is not a profile, or is damaged",
        (tmp_path, "--host", "other"): "hint: Name one of: damaged.",
    }.items():
        assert cli.main(["profile", *map(str, words)]) == output.EXIT_FAILURE
        captured = capsys.readouterr()
        assert (captured.out, message in captured.err) == ("", True), captured.err


def test_launch_hands_the_steps_to_each_process_as_they_are_written() -> None:
    words = ["-n", "2", "--profile", "p", "--profile-steps", "3-5", "--", "train.py"]
    context = launch.command.make_context("launch", words)
    given = [words for _, words in output.given_options(context, launch.command.params)]
    assert ("--profile-steps", "3-5") in given


def operation(
    name: str, start: float, end: float, program: str = "f", run: int = 1
) -> ProfileEvent:
    values = {"hlo_op": name, "hlo_module": program, "program_id": 7, "run_id": run}
    return ProfileEvent(name, start, end, 1, values)


def test_an_operation_does_not_have_the_time_of_those_inside_it() -> None:
    operations = [operation("while", 0, 100), operation("dot", 10, 40)]
    operations += [operation("dot", 50, 80), operation("add", 120, 130, run=2)]
    summary = summarize(HostProfile(Path("host.xplane.pb"), "host", operations))
    times = {one.operation: (one.times, one.seconds) for one in summary.operations}
    assert times == {
        "while": (1, pytest.approx(40e-9)),
        "dot": (2, pytest.approx(60e-9)),
        "add": (1, pytest.approx(10e-9)),
    }
    (program,) = summary.programs
    assert (program.executions, program.seconds) == (2, pytest.approx(110e-9))


def test_a_gap_names_what_the_host_did_in_most_of_it() -> None:
    profile = HostProfile(
        Path("host.xplane.pb"),
        "host",
        operations=[operation("a", 0, 10), operation("b", 110, 120), operation("c", 180, 190)],
        host_events=[
            ProfileEvent("not the thread that starts programs", 0, 200, 3, {}),
            ProfileEvent("snaprt:execute", 5, 100, 2, {}),
            ProfileEvent("PjitFunction(f)", 20, 90, 2, {}),
            ProfileEvent("load data", 120, 140, 2, {}),
        ],
    )
    assert summarize(profile).gaps == (
        Gap(pytest.approx(10e-9), pytest.approx(100e-9), "snaprt:execute > PjitFunction(f)", 0.7),
        Gap(pytest.approx(120e-9), pytest.approx(60e-9), None, pytest.approx(2 / 3)),
    )


def test_graph_ids_are_told_of_names_that_stand_for_one_program() -> None:
    names = ("jit_f", "jit_g", "jit__lambda", "jit_lazy_graph_0123456789abcdef")
    told = (("f", "1"), ("g", "2"), ("g", "3"), ("<lambda>", "4"))
    spans = [{"program": name, "graph": graph} for name, graph in told]
    profile = HostProfile(
        Path("host.xplane.pb"),
        "host",
        operations=[operation("a", 0, 1, name) for name in names],
        host_events=[ProfileEvent("snaprt:execute", 0, 1, 2, values) for values in spans],
    )
    ids = {program.module: program.graph_id for program in summarize(profile).programs}
    assert ids == {
        "jit_f": "1",
        "jit_g": None,
        "jit__lambda": "4",
        "jit_lazy_graph_0123456789abcdef": "0123456789abcdef",
    }
