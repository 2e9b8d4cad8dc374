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
import jax, jax.numpy as jnp, numpy as np, snaprt, snaprt.runtime.step
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
jitted = jax.jit(train_step, static_argnums=(1, 2))
def run_jit(case):
    for step in range(3):
        value = float(jitted(x, case, odd))
    return value
def run_lazy(case):
    with snaprt.lazy():
        for step in range(3):
            if odd and step == 2 and case == "late": load_data()
            value = train_step(x, case, odd) + step // 2
            snaprt.mark_step()
    return float(value)
def run_lazily_with_a_read(case):
    with snaprt.lazy():
        value = (x - 1.0).sum()
        if not rank: float(evaluate(x))
        snaprt.mark_step()
def run_lazily_with_another_number(case):
    with snaprt.lazy():
        value = (x + (3.0 if odd else 2.0)).sum()
        snaprt.mark_step()
    return float(value)
def run_in_one_process(case):
    return float(jax.jit(lambda y: y.sum() * (rank + 2))(jnp.arange(3.0)))
cases, odd = sys.argv[1].split(","), rank == int(sys.argv[2])
"""
EACH = """
def each(run, cases):
    for case in cases:
        try:
            value, error = run(case), None
        except snaprt.RankError as raised:
            value, error = None, str(raised)
            snaprt.runtime.step.thread_trace().begin()  # nothing of it is left for the next case
        checks = snaprt.metrics.counter_value("RankChecks") or 0
        result = {"run": run.__name__, "case": case, "value": value, "error": error}
        print(json.dumps({**result, "checks": checks}))
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
Results = dict[tuple[str, str], dict[str, Any]]
Job = tuple[Path, list[Results]]

EXPECTED = {"same": 56, "equal table": 84 + 4, "callback": 56 + 8}


# Without this service of JAX, SIGTERM ends a rank at once; otherwise the launcher kills it later.
STOPS_SOON = {"SNAPRT_CHECK_RANKS_TIMEOUT": 4, "JAX_ENABLE_PREEMPTION_SERVICE": 0}


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


def results(text: str) -> Results:
    """Return what a rank has printed, by the function that was run and the case."""
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {(line["run"], line["case"]): line for line in lines}


def line_of(folder: Path, mark: str) -> int:
    lines = (folder / "train.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if mark in line)


# One job runs them all, for each rank goes on after an error.
RUNS = {
    "jit": [*AGREE, *DIFFER],
    "lazy": [*AGREE, *DIFFER_LAZILY],
    "lazily_with_a_read": ["on rank 0"],
    "lazily_with_another_number": ["on rank 1"],
    "in_one_process": ["on both ranks"],
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Return the folder of a job that runs all of RUNS, and the results of each rank."""
    folder = tmp_path_factory.mktemp("job")
    calls = [f"each(run_{mode}, {cases})" for mode, cases in RUNS.items()]
    every = dict.fromkeys(case for cases in RUNS.values() for case in cases)
    status, told = launch(folder, "\n".join([EACH, *calls]), *every)
    assert status == 0, told
    return folder, [results(text) for text in told]


@pytest.mark.parametrize("mode", ["jit", "lazy"])
def test_every_rank_learns_which_operation_differs_and_goes_on(job: Job, mode: str):
    folder, per_rank = job
    run = f"run_{mode}"
    for case in AGREE:
        assert per_rank[0][run, case] == per_rank[1][run, case]
        assert per_rank[0][run, case]["error"] is None
    for case, value in EXPECTED.items():
        assert per_rank[0][run, case]["value"] == value + (mode == "lazy")
    before = per_rank[0]["run_jit", list(DIFFER)[-1]]["checks"] if mode == "lazy" else 0
    assert per_rank[0][run, AGREE[-1]]["checks"] - before <= 3 * len(AGREE)  # not each step
    for case in DIFFER_LAZILY if mode == "lazy" else DIFFER:
        errors = {each[run, case]["error"] for each in per_rank}
        assert len(errors) == 1, errors
        error = re.sub(" +", " ", errors.pop() or "")
        assert "ranks are about to run different programs" in error, (case, per_rank)
        if mode == "lazy":  # what differs first is a number that has changed before
            continue
        for part in DIFFER[case]:
            assert part in error, (case, error)
        line = re.search(r"operation \d+, .*train.py:(\d+)", error)
        assert line, error
        if case in ("operation", "shape"):
            assert int(line[1]) == line_of(folder, f"# case: {case}"), error


def test_a_number_that_differs_in_a_lazy_graph_is_named(job: Job):
    for found in job[1]:
        error = found["run_lazily_with_another_number", "on rank 1"]["error"]
        told = r"rank 0: +constant dense<2.0.*\n.*rank 1: +constant dense<3.0"
        assert re.search(told, error), error


def test_a_read_on_one_rank_alone_cuts_its_graph_and_is_named(job: Job):
    folder, per_rank = job
    line = line_of(folder, "if not rank: float(")
    for found in per_rank:
        error = found["run_lazily_with_a_read", "on rank 0"]["error"]
        assert f"rank 0: the lazy graph, at train.py:{line} in run_lazily_with_a_read" in error


def test_programs_of_one_process_are_not_compared(job: Job):
    values = [found["run_in_one_process", "on both ranks"] for found in job[1]]
    assert [(each["value"], each["error"]) for each in values] == [(6.0, None), (9.0, None)]


def test_of_four_ranks_the_odd_one_and_what_it_runs_are_named(tmp_path: Path):
    each = EACH.replace("try:", "try:\n            if odd: jax.jit(evaluate)(x)")
    status, told = launch(tmp_path, each + "each(run_jit, cases)", "same", ranks=4, odd=2)
    assert status == 0, told
    line = line_of(tmp_path, "if odd: jax.jit(evaluate)")
    for text in told:
        error = results(text)["run_jit", "same"]["error"]
        assert re.search(r"ranks 0-1, 3: train_step, at train.py:\d+ in run_jit", error), told
        assert f"rank 2: evaluate, at train.py:{line} in each" in error, told


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["jit", "lazy"])
def test_a_rank_that_does_not_come_is_named_with_its_line(tmp_path: Path, mode: str):
    begin = "if odd: load_data()\n" if mode == "jit" else ""
    code = f"{begin}run_{mode}('late')"
    status, told = launch(tmp_path, code, "late", **STOPS_SOON)
    assert status == 1
    what = "the lazy graph (step 2)" if mode == "lazy" else "train_step"
    line = line_of(tmp_path, "# case: late")
    expected = f"rank 1 has not reached {what} after 4 s; it is at train.py:{line} in load_data"
    assert expected in told[0], told


def test_a_rank_whose_program_changes_alone_says_what_has_changed(tmp_path: Path):
    code = "run_jit('same')\n"
    code += "if odd: x = jax.make_array_from_callback((4,), sharding, lambda at: np.ones(8)[at])\n"
    code += "run_jit('same')"
    status, told = launch(tmp_path, code, "same", **STOPS_SOON)
    assert status == 1
    assert "rank 0 has not reached train_step after 4 s; it is at train.py:" in told[1], told
    assert "rank 1 compiles train_step again, for it has changed:" in told[1], told
    assert "argument arg0: before: tensor<8xf32>; now: tensor<4xf32>" in told[1], told


def test_a_rank_that_has_ended_is_named_at_once(tmp_path: Path):
    status, told = launch(tmp_path, "if odd: sys.exit()\nrun_jit('same')", "same")
    assert status == 1
    assert "rank 1 has not reached train_step; its program has ended" in told[0]
