"""``--check-ranks``: ranks that are about to run different programs stop, and learn why."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from programs import SNAPRT, run_program

PROGRAM = """
import functools, json, sys, time
import jax, jax.numpy as jnp, numpy as np, snaprt
jax.distributed.initialize()
rank = jax.process_index()
mesh = jax.make_mesh((jax.device_count(),), ("d",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
x = jax.make_array_from_callback((8,), sharding, lambda at: np.arange(8, dtype=np.float32)[at])
def load_data():
    time.sleep(60)  # case: late
def train_step(x, case, odd):
    # The even ranks need a new program for each case, too.
    y = x * (3.0 if odd and case == "constant" else 2.0) + 0.5 * cases.index(case)
    if odd and case == "operation":
        y = jnp.sin(y)  # case: operation
    if odd and case == "shape":
        y = y[:4]  # case: shape
    if case == "table":
        y = y + np.arange(64.0, dtype=np.float32)[odd : odd + 8]
    if case == "large table":
        y = y + np.linspace(0.0, 1.0 + odd, 800, dtype=np.float32)[:8]
    if case == "equal table":
        y = y + np.arange(8.0, dtype=np.float32)
    if case == "callback":
        jax.debug.callback(lambda total: None, y.sum())
    return y.sum()
def evaluate(x):
    return (x * x).sum()
cases, odd = sys.argv[1].split(","), rank == int(sys.argv[2])
"""
RUN = {
    "jit": """
train_step, evaluate = jax.jit(train_step, static_argnums=(1, 2)), jax.jit(evaluate)
def run(case):
    for step in range(3):
        value = float(train_step(x, case, odd))
    return value
""",
    "lazy": """
def run(case):
    with snaprt.lazy():
        for step in range(3):
            if odd and step == 2 and case == "late": load_data()
            if not rank and step == 2 and case == "one more": float(evaluate(x))
            value = train_step(x, case, odd) + step // 2
            snaprt.mark_step()
    return float(value)
""",
}
EACH = """
for case in cases:
    try:
        value, error = run(case), None
    except snaprt.RankError as raised:
        value, error = None, str(raised)
    checks = snaprt.metrics.counter_value("RankChecks")
    print(json.dumps({"case": case, "value": value, "error": error, "checks": checks}))
"""
DIFFER = {
    "constant": ["rank 0: ", "dense<2.", "rank 1: ", "dense<3."],
    "operation": ["rank 1: sine "],
    "shape": ["tensor<8xf32>", "tensor<4xf32>"],
    "table": ["0.000000e+00, 1.000000e+00", "1.000000e+00, 2.000000e+00"],
    "large table": ["rank 0: ", "rank 1: "],
}
# To a lazy graph, a table is an input: its values are no part of the program.
# A number that has changed is one too, from then on.
DIFFER_LAZILY = ["operation", "shape"]
AGREE = ["same", "equal table", "callback"]
EXPECTED = {"same": 56, "equal table": 84 + 4, "callback": 56 + 8}


def launch(
    folder: Path, code: str, *cases: str, ranks: int = 2, odd: int = 1, **variables: object
) -> tuple[int, list[str]]:
    """Run the cases; return the status, and what each rank has written."""
    (folder / "train.py").write_text(PROGRAM + code)
    words = (*SNAPRT, "launch", "-n", str(ranks), "--check-ranks", "--", "train.py")
    done = run_program(words, ",".join(cases), odd, status=None, folder=folder, **variables)
    # The end of what the rank wrote that failed first is shown again.
    text = (done.stdout + done.stderr).partition("failed first")[0]
    return done.returncode, [
        "\n".join(line[4:] for line in text.splitlines() if line.startswith(f"[{rank}]"))
        for rank in range(ranks)
    ]


def results(text: str) -> dict[str, Any]:
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {line["case"]: line for line in lines}


def line_of(folder: Path, mark: str) -> int:
    lines = (folder / "train.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if mark in line)


@pytest.mark.parametrize("mode", RUN)
def test_every_rank_learns_which_operation_differs_and_goes_on(tmp_path: Path, mode: str):
    differ = DIFFER_LAZILY if mode == "lazy" else list(DIFFER)
    status, told = launch(tmp_path, RUN[mode] + EACH, *AGREE, *differ)
    assert status == 0, told
    per_rank = [results(text) for text in told]
    for case in AGREE:
        assert per_rank[0][case] == per_rank[1][case]
        assert per_rank[0][case]["value"] == EXPECTED[case] + (mode == "lazy")
    assert per_rank[0][AGREE[-1]]["checks"] <= 3 * len(AGREE)  # not each step
    for case in differ:
        errors = {each[case]["error"] for each in per_rank}
        assert len(errors) == 1, errors
        error = re.sub(" +", " ", errors.pop() or "")
        assert "ranks are about to run different programs" in error, (case, told)
        if mode == "lazy":  # what differs first is a number that has changed before
            continue
        for part in DIFFER[case]:
            assert part in error, (case, error)
        line = re.search(r"operation \d+, .*train.py:(\d+)", error)
        assert line, error
        if case in ("operation", "shape"):
            assert int(line[1]) == line_of(tmp_path, f"# case: {case}"), error


def test_of_four_ranks_the_odd_one_and_what_it_runs_are_named(tmp_path: Path):
    code = RUN["jit"] + EACH.replace("try:", "try:\n        if odd: evaluate(x)")
    status, told = launch(tmp_path, code, "same", ranks=4, odd=2)
    assert status == 0, told
    line = line_of(tmp_path, "if odd: evaluate")
    for text in told:
        error = results(text)["same"]["error"]
        assert re.search(r"ranks 0-1, 3: train_step, at train.py:\d+ in run", error), told
        assert f"rank 2: evaluate, at train.py:{line} in <module>" in error, told


def test_a_number_that_differs_in_a_lazy_graph_is_named(tmp_path: Path):
    status, told = launch(tmp_path, RUN["lazy"] + EACH, "constant")
    assert status == 0, told
    for text in told:
        assert re.search(r"rank 0: +constant dense<2.0.*rank 1: +constant dense<3.0", text), told


def test_a_read_on_one_rank_alone_cuts_its_graph_and_is_named(tmp_path: Path):
    status, told = launch(tmp_path, RUN["lazy"] + EACH, "one more")
    assert status == 0, told
    line = line_of(tmp_path, '"one more": float(')
    for text in told:
        assert f"rank 0: the lazy graph, at train.py:{line} in run" in text, told


@pytest.mark.slow
@pytest.mark.parametrize("mode", RUN)
def test_a_rank_that_does_not_come_is_named_with_its_line(tmp_path: Path, mode: str):
    code = (
        RUN[mode] + "\nif odd and 'late' in cases and not 'lazy' in cases: load_data()\nrun('late')"
    )
    cases = ("late", "lazy") if mode == "lazy" else ("late",)
    status, told = launch(tmp_path, code, *cases, SNAPRT_CHECK_RANKS_TIMEOUT=4)
    assert status == 1
    what = "the lazy graph (step 2)" if mode == "lazy" else "train_step"
    line = line_of(tmp_path, "# case: late")
    expected = f"rank 1 has not reached {what} after 4 s; it is at train.py:{line} in load_data"
    assert expected in told[0], told


def test_a_rank_whose_program_changes_alone_says_what_has_changed(tmp_path: Path):
    code = RUN["jit"] + "\nrun('same')\n"
    code += "if odd: x = jax.make_array_from_callback((4,), sharding, lambda at: np.ones(8)[at])\n"
    code += "run('same')"
    status, told = launch(tmp_path, code, "same", SNAPRT_CHECK_RANKS_TIMEOUT=4)
    assert status == 1
    assert "rank 0 has not reached train_step after 4 s; it is at train.py:" in told[1], told
    assert "rank 1 compiles train_step again, for it has changed:" in told[1], told
    assert "argument arg0: before: tensor<8xf32>; now: tensor<4xf32>" in told[1], told


def test_a_rank_that_has_ended_is_named_at_once(tmp_path: Path):
    status, told = launch(tmp_path, RUN["jit"] + "\nif odd: sys.exit()\nrun('same')", "same")
    assert status == 1
    assert "rank 1 has not reached train_step; its program has ended" in told[0]


def test_programs_of_one_process_are_not_compared(tmp_path: Path):
    code = "print(float(jax.jit(lambda y: y.sum() * (rank + 2))(jnp.arange(3.0))))"
    status, told = launch(tmp_path, code, "same")
    assert status == 0
    assert told[0].endswith("6.0")
    assert told[1].endswith("9.0")
