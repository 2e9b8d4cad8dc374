"""The language of --when: what each word means, how words combine, what a wrong one is told."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recordings
from programs import SNAPRT, run_program

from snaprt import lazy, mark_step, metrics, record
from snaprt.cli.main import main
from snaprt.errors import UsageError
from snaprt.snapshot.format.read import open_snapshot
from snaprt.snapshot.recorder import plan
from snaprt.snapshot.recorder.conditions import (
    EVER,
    NEVER,
    WORDS,
    Moment,
    parse_conditions,
    prospect,
)
from snaprt.snapshot.recorder.record import process_recorder
from snaprt.snapshot.recorder.triggers import TRIGGERS

DOCUMENT = Path(__file__).parents[2] / "docs" / "how-to" / "record.md"


def moment(**changes: Any) -> Moment:
    usual = Moment("train_step", "0" * 16, execution=7, step=150, seconds=90.0, rank=1)
    return usual._replace(**changes)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("all", True),
        ("name=train", True),
        ("name=^step", False),
        (r"name=tra{1\,2}in", True),
        ("execution=7", True),
        ("execution=0-6|8-", False),
        ("step=100-200", True),
        ("step=-149", False),
        ("step=5|150", True),
        ("time=60s-2m", True),
        ("time=2m-", False),
        ("time=1.5m", True),
        ("clock=00:00-23:59:59", True),
        ("rank=1", True),
        ("rank=master", False),
        ("rank=0-3, name=train, step=150", True),
        ("rank=0-3, name=train, step=151", False),
        ("nan, step=150", True),
    ],
)
def test_a_condition_holds_where_all_its_words_do(text: str, holds: bool) -> None:
    (condition,) = parse_conditions(text)
    assert condition.holds(moment()) is holds


@pytest.mark.parametrize(
    ("text", "executions", "steps"),
    [
        ("error", EVER, EVER),
        ("name=^step; rank=master", NEVER, NEVER),
        ("name=train, execution=3|8-9", (3, 9), EVER),
        ("step=100-200; name=train, step=-5", EVER, (0, 200)),
        ("execution=7; step=5-", EVER, EVER),
        ("name=^step; execution=5-, step=2", (5, float("inf")), (2, 2)),
    ],
)
def test_it_is_known_beforehand_outside_of_which_executions_and_steps_no_condition_holds(
    text: str, executions: tuple[float, float], steps: tuple[float, float]
) -> None:
    found = prospect(parse_conditions(text), moment(execution=0, step=0))
    assert (found.executions, found.steps) == (executions, steps)


def test_every_and_first_count_for_each_graph_what_the_other_words_let_through() -> None:
    (condition,) = parse_conditions("step=100-200, every=10, first=3")
    assert [n for n in range(60) if condition.takes("a")] == [0, 10, 20]
    assert condition.takes("b")
    (condition,) = parse_conditions("first=2")
    assert [condition.takes("a") for _ in range(4)] == [True, True, False, False]


def test_several_conditions_are_separated_by_semicolons() -> None:
    texts = [condition.text for condition in parse_conditions("nan; step=1-2, every=2;")]
    assert texts == ["nan", "step=1-2, every=2"]
    assert parse_conditions("") == ()


def test_triggers_devices_and_roles_are_told_apart_from_tests() -> None:
    nan, error, slower = parse_conditions("nan;error,rank=0;slower=50ms,device=0|2,record=inputs")
    triggers = [condition.trigger for condition in (nan, error, slower) if condition.trigger]
    assert [trigger.name for trigger in triggers] == ["nan", "error", "slower"]
    assert slower.trigger is not None
    assert slower.trigger.limit(slower.value) == 50e6
    assert slower.devices is not None
    assert [index in slower.devices for index in range(4)] == [True, False, True, False]
    assert (slower.roles, nan.roles) == ({"inputs"}, {"inputs", "outputs"})


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("nam=train", "there is no word 'nam'", "did you mean name?"),
        ("step=100, stop=3", "there is no word 'stop'", "did you mean step?"),
        ("step=a", "'step=a' cannot be understood", "step=... takes numbers and ranges"),
        ("step=9-3", "cannot be understood", "100-200"),
        ("step=-", "cannot be understood", "100-200"),
        ("step", "cannot be understood", "step=... takes"),
        ("every=0", "cannot be understood", "1 or more"),
        ("nan=1", "cannot be understood", "write nan alone"),
        ("name=(", "cannot be understood", "a regular expression"),
        ("slower=fast", "cannot be understood", "50ms"),
        ("record=all", "cannot be understood", "inputs|outputs"),
        ("step=1, step=2", "step stands there twice", "repeat --when"),
        ("nan, error", "nan and error cannot hold together", "--when nan --when error"),
        (
            "slower=50ms, name=a, nan",
            "slower and nan cannot hold together",
            "--when 'slower=50ms, name=a' --when 'name=a, nan'",
        ),
        ("name=a,", "there is no word ''", "The words are"),
    ],
)
def test_a_wrong_word_is_an_error_that_says_what_is_right(text: str, said: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_conditions(text)
    assert said in caught.value.message
    assert hint in caught.value.hint


def test_the_document_has_every_word() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert [word.name for word in (*WORDS, *TRIGGERS) if f"| `{word.name}" not in text] == []


def test_a_wrong_condition_on_the_command_line_ends_before_the_program_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('it runs')")
    assert main(["run", "--when", "all", "--when", "stop=3", "--", str(script)]) == 2
    said = capsys.readouterr()
    assert (said.out, "did you mean step?" in said.err) == ("", True)
    assert "SNAPRT_RECORD" not in os.environ


# What is recorded


@pytest.fixture(autouse=True)
def default_callback() -> Iterator[None]:
    yield
    plan.register_hlo_snapshot_callback(None)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SNAPRT_DUMP_DIR", str(tmp_path / "dump"))
    return tmp_path / "dump"


def steps(count: int) -> None:
    with lazy():
        x = jnp.arange(4.0)
        for _ in range(count):
            x = x * 2.0 + 1.0
            mark_step()


def recorded(folder: Path) -> list[tuple[int, str]]:
    """Return (execution, role) of each snapshot."""
    assert process_recorder().flush(30)
    found = [open_snapshot(path).manifest.execution for path in folder.glob("*.snap")]
    return sorted((one.execution_count, one.role) for one in found)


def test_only_executions_for_which_a_condition_holds_are_recorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps(1)  # without conditions, which counts executions but not those of the condition
    assert process_recorder().flush(30)
    before = {path.name for path in folder.iterdir()}
    monkeypatch.setenv("SNAPRT_RECORD", "name=nowhere; every=3, record=inputs")
    with lazy():
        x = jnp.arange(4.0)
        for number in range(7):
            x = jnp.sin(x) * 2.0
            mark_step()
            if number == 0:
                assert process_recorder().flush(30)
    assert process_recorder().flush(30)
    new = [path for path in folder.iterdir() if path.name not in before]
    executions = [open_snapshot(path).manifest.execution for path in new]
    by_graph: dict[str, list[int]] = {}
    for one in executions:
        assert (one.role, one.reason) == ("inputs", "every=3, record=inputs")
        by_graph.setdefault(one.graph_id, []).append(one.execution_count)
    # The first step's graph makes its input as well; the six others are one graph.
    assert sorted(map(sorted, by_graph.values())) == [[0], [0, 3]]


def test_conditions_and_the_callback_must_both_agree(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def callback(name: str, device: int, count: int) -> str:
        asked.append(count)
        return "inputs" if count == 2 else ""

    plan.register_hlo_snapshot_callback(callback)
    monkeypatch.setenv("SNAPRT_RECORD", "execution=1-3")
    steps(6)
    assert recorded(folder) == [(2, "inputs")]
    assert set(asked) == {1, 2, 3}  # conditions first: they are cheaper


def test_conditions_without_a_directory_record_into_one_of_their_own_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SNAPRT_RECORD", "all")
    plan._default_folder.cache_clear()
    steps(2)
    assert len(recorded(tmp_path / "snaprt-dump")) == 4
    (line,) = caplog.records
    assert str(tmp_path / "snaprt-dump") in line.getMessage()


def test_a_program_in_which_no_condition_held_is_told_what_ran_instead(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import jax\njax.jit(lambda x: x + 1)(1.0)\njax.jit(abs)(1.0)\n")

    def said(*options: str, **variables: str) -> str:
        words = (*SNAPRT, "run", "--record", *options, "--")
        return run_program(words, script, folder=tmp_path, SNAPRT_CACHE="off", **variables).stderr

    told = "nothing was recorded: no execution met name=trian; what ran was"
    assert f"{told} <lambda>, abs" in said("--when", "name=trian")
    assert "nothing was recorded: no execution met slower=1h; error" in said(
        "--when", "slower=1h; error"
    )
    assert "nothing was recorded" not in said("--when", "name=abs, rank=1", RANK="0")


def test_a_program_in_which_no_nan_appears_is_told_what_was_watched(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import jax\ndef step(x):\n    return x + 1\njax.jit(step)(1.0)\n")
    words = (*SNAPRT, "run", "--when", "nan", "--")
    said = run_program(words, script, folder=tmp_path, SNAPRT_CACHE="off").stderr
    assert "no NaN and no infinity appeared; watched: 1 execution, of programs: step" in said


@pytest.mark.parametrize("options", [(), ("--when", "nan"), ("--when", "name=step")])
def test_a_program_without_a_jitted_function_is_told_that_nothing_was_recorded(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    script = tmp_path / "train.py"
    words = (*SNAPRT, "run", "--record", *options, "--")

    def said(text: str) -> str:
        script.write_text(text)
        return run_program(words, script, folder=tmp_path, SNAPRT_CACHE="off").stderr

    eager = said("import jax.numpy as jnp\nprint(jnp.ones(3).sum())\n")
    assert "nothing was recorded in this process: no jitted function was called" in eager
    assert "no jitted function" not in said("import jax\njax.jit(lambda x: x + 1)(1.0)\n")
    assert "nothing" not in said("import jax\n")  # as one does that starts others


def test_a_program_whose_jitted_function_cannot_be_traced_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import jax\ndef step(x):\n    return x + y\njax.jit(step)(1.0)\n")
    words = (*SNAPRT, "run", "--record", "--")
    said = run_program(words, script, folder=tmp_path, status=1, SNAPRT_CACHE="off").stderr
    told = "nothing was recorded in this process: no jitted function ran; JAX could not trace step"
    assert told in said
    assert "was called" not in said


@pytest.mark.parametrize("chosen", ["", "os.environ['SNAPRT_DUMP_DIR'] = 'dump'"])
def test_a_working_directory_that_is_gone_costs_the_snapshots_and_not_the_program(
    tmp_path: Path, chosen: str
) -> None:
    script = tmp_path / "train.py"
    gone = tmp_path / "gone"
    gone.mkdir()
    code = "import jax\nprint(jax.jit(lambda x: x + 1)(1.0))\n"
    script.write_text(f"import os\nos.rmdir(os.getcwd())\n{chosen}\n{code}")
    done = run_program((*SNAPRT, "run", "--record", "--"), script, folder=gone, SNAPRT_CACHE="off")
    assert done.stdout == "2.0\n"
    assert "lost a snapshot; the program continues" in done.stderr


def test_a_wrong_condition_is_logged_once_and_records_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SNAPRT_RECORD", "nam=x")
    steps(3)
    assert not folder.exists()
    (line,) = caplog.records
    assert "did you mean name?" in line.getMessage()


def test_the_rank_is_the_variable_where_it_is_set(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_RECORD", "rank=3")
    steps(2)
    assert recorded(folder) == []
    monkeypatch.setenv("RANK", "3")
    steps(1)
    assert [role for _, role in recorded(folder)] == ["inputs", "outputs"]
    manifest = open_snapshot(next(folder.glob("*.snap"))).manifest
    assert (manifest.execution.rank, manifest.execution.process) == (3, jax.process_index())


def test_slow_executions_are_recorded_and_fast_ones_are_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_RECORD", "slower=1h")
    steps(3)
    assert recorded(folder) == []
    monkeypatch.setenv("SNAPRT_RECORD", "slower=0us, first=1")
    steps(3)
    assert {role for _, role in recorded(folder)} == {"inputs", "outputs"}
    reasons = {open_snapshot(path).manifest.execution.reason for path in folder.glob("*.snap")}
    assert all(reason.startswith("slower=0us, first=1 (it took ") for reason in reasons)


def milliseconds_recorded(folder: Path) -> list[float]:
    reasons = [file.manifest.execution.reason for file in recordings.recorded(folder)]
    took = [re.search(r"it took ([0-9.]+) ms", reason) for reason in reasons]
    return [float(found[1]) for found in took if found]


def wait(seconds: np.ndarray) -> np.ndarray:
    time.sleep(float(seconds))
    return seconds


@pytest.mark.parametrize("limit", ["1ms", "40ms"])
def test_what_takes_longer_than_a_limit_is_recorded_whoever_looks(
    limit: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_RECORD", f"name=f, slower={limit}")
    times = [jnp.float32(seconds) for seconds in (0.0, 0.12, 0.08, 0.0)]

    @jax.jit
    def f(seconds: jax.Array) -> jax.Array:
        return jax.pure_callback(wait, seconds, seconds) + 1

    with record():
        for seconds in times:
            f(seconds)
            time.sleep(0.5)  # the program does other things while nobody looks
    slow = [took for took in milliseconds_recorded(folder) if took > 70]
    assert len(slow) == 2
    assert 120 <= slow[0] < 500
    assert 80 <= slow[1] < 500


def test_executions_that_wait_for_others_are_not_slow(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = jnp.eye(400)

    @jax.jit
    def f(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 4, lambda _, y: y @ x, x)

    def run() -> None:
        y = x
        for _ in range(150):  # they queue up, each for some ms
            y = f(y)
        y.block_until_ready()

    run()
    began = time.monotonic()
    run()
    third = (time.monotonic() - began) / 3  # of all, which one alone does not take
    monkeypatch.setenv("SNAPRT_RECORD", f"slower={third * 1000:.0f}ms")
    with record():
        run()
    assert milliseconds_recorded(folder) == []


def test_the_time_that_compiling_takes_is_not_the_executions(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_RECORD", "slower=15ms")
    with record():
        x = jnp.float32(1)
        for n in range(3):
            jax.jit(lambda x, n=n: jnp.linalg.norm(jnp.sin(x + n + jnp.arange(8.0))))(x)
    assert milliseconds_recorded(folder) == []


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"NEURON_DUMP_HLO_SNAPSHOT": "1"}, [("all", "")]),
        ({"NEURON_DUMP_HLO_SNAPSHOT": "1", "NEURON_FRAMEWORK_DEBUG": "0"}, None),
        ({"NEURON_DUMP_HLO_SNAPSHOT": "0", "NEURON_FRAMEWORK_DEBUG": "1"}, None),
        ({"NEURON_FRAMEWORK_DEBUG": "1"}, None),
        (
            {"NEURON_DUMP_HLO_SNAPSHOT": "1", "NEURON_NC0_ONLY_SNAPSHOT": "1"},
            [("all, rank=master, device=0", "")],
        ),
        ({"NEURON_DUMP_HLO_SNAPSHOT": "ON_NRT_ERROR"}, [("nan", "nan"), ("error", "error")]),
    ],
)
def test_the_names_of_neuron_say_what_they_say_there(
    variables: dict[str, str],
    expected: list[tuple[str, str]] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XLA_FLAGS", f" --xla_dump_to={tmp_path}/dump")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = plan.current_plan()
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert [
        (one.text, one.trigger.name if one.trigger else "") for one in found.conditions
    ] == expected
    assert found.folder == tmp_path / "dump"


@pytest.mark.parametrize(
    ("mode", "hold", "withholds"),
    [
        ("ON_NRT_ERROR", "device", True),
        ("ON_NRT_ERROR_HYBRID", "hybrid", False),
        ("ON_NRT_ERROR_CPU", "host", False),
    ],
)
def test_neurons_modes_say_where_inputs_are_held_and_stop_the_program(
    mode: str, hold: str, withholds: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SNAPRT_DUMP_DIR", str(tmp_path))
    monkeypatch.setenv("NEURON_DUMP_HLO_SNAPSHOT", mode)
    found = plan.current_plan()
    assert found is not None
    assert (found.hold, found.stops, found.withholds_donation) == (hold, True, withholds)


def test_neurons_switch_may_be_set_and_unset_from_step_to_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SNAPRT_DUMP_DIR")
    monkeypatch.setenv("XLA_FLAGS", f" --xla_dump_to={folder}")
    monkeypatch.setenv("NEURON_FRAMEWORK_DEBUG", "1")
    with lazy():
        x = jnp.arange(4.0)
        for step in range(6):
            if step == 4:
                monkeypatch.setenv("NEURON_DUMP_HLO_SNAPSHOT", "1")
            else:
                monkeypatch.delenv("NEURON_DUMP_HLO_SNAPSHOT", raising=False)
            x = jnp.cos(x) * 3.0
            mark_step()
    assert [role for _, role in recorded(folder)] == ["inputs", "outputs"]


def test_armed_conditions_that_do_not_hold_keep_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_RECORD", "name=nowhere; step=1000000-")
    steps(4)
    assert recorded(folder) == []
    assert metrics.counter_value("SnapshotsWritten") is None
