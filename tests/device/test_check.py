"""The device check reports every step, those that fail too; the check itself runs elsewhere."""

import check
from steps import STEPS, Step, UnexpectedError

VALUES = {"platform": "cpu", "tests": "tests", "package": "snaprt"} | {
    "small": 16,
    "large": 64,
    "width": 384,
}


def _refuse(ended):
    raise UnexpectedError("it is wrong")


def test_a_step_that_fails_says_why_and_the_others_still_run(tmp_path):
    steps = (
        Step("prints", "echo '{{\"size\": 2}}'", "", lambda ended: ended.json),
        Step("refused", "true", "", _refuse),
        Step("ends badly", "echo no such device >&2; exit 3", "", dict),
        Step("prints no JSON", "echo nothing", "", lambda ended: ended.json),
        Step("hangs", "sleep 60", "", dict, seconds=0.2),
    )
    rows = [check.run(step, tmp_path, VALUES) for step in steps]
    assert [row.result for row in rows] == ["ok", "failed", "failed", "failed", "timeout"]
    assert rows[0].figures == {"size": 2}
    assert [row.reason for row in rows[1:3]] == ["it is wrong", "status 3: no such device"]
    assert "JSONDecodeError" in rows[3].reason


def test_without_the_command_snaprt_nothing_is_run(monkeypatch, capsys):
    monkeypatch.setattr(check, "environment", lambda folder: {"PATH": ""})
    monkeypatch.setattr(check.sys, "argv", ["check.py"])
    assert check.main() == 2
    assert "the command snaprt is neither next to" in capsys.readouterr().err


def test_the_table_has_a_line_for_each_step_with_its_figures_or_the_reason(tmp_path):
    steps = (
        Step("a", "echo '{{\"size\": 2}}'", "one | two", lambda ended: ended.json),
        Step("b", "exit 1", "three", dict),
    )
    rows = [check.run(step, tmp_path, VALUES) for step in steps]
    about = {"device": "TPU v9", "platform": "tpu", "machine": "8 cores", "date": "2030-01-01"}
    lines = check.as_markdown(about | {"versions": {"jax": "1"}}, rows).splitlines()
    assert lines[0] == "TPU v9 (tpu), 8 cores, jax 1, 2030-01-01:"
    cells = [line.strip("| ").split(" | ") for line in lines[4:]]
    assert [len(row) for row in cells] == [5, 5]
    assert cells[0][:3] == ["a", "one / two", "ok"]
    assert cells[0][4] == "size 2"
    assert cells[1][4].startswith("status 1")


def test_each_command_of_the_check_can_be_filled_in(tmp_path):
    names = [step.name.format(**VALUES) for step in STEPS]
    assert len(set(names)) == len(names)
    for step in STEPS:
        assert "{" not in step.command.format(**VALUES)
