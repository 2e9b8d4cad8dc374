"""Workers forked from a nursery, in a program of its own: this process has threads and devices."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
import json, os, signal, subprocess, threading
from pathlib import Path
import numpy as np
from snaprt_replay.run import nursery
from snaprt_replay.run.variants.variants import parse_variant
from snaprt_replay.run.workers import Workers, forked_from_here

MODULE = b'''
func.func public @main(%x: tensor<f32>, %limit: tensor<f32>) -> tensor<f32> {
  %one = stablehlo.constant dense<1.0> : tensor<f32>
  %end = stablehlo.while(%y = %x) : tensor<f32>
    cond {
      %goes_on = stablehlo.compare LT, %y, %limit : (tensor<f32>, tensor<f32>) -> tensor<i1>
      stablehlo.return %goes_on : tensor<i1>
    } do {
      %next = stablehlo.add %y, %one : tensor<f32>
      stablehlo.return %next : tensor<f32>
    }
  return %end : tensor<f32>
}
'''

def told(limit, timeout=None):
    before = len(starts)
    inputs = [np.array(0, np.float32), np.array(limit, np.float32)]
    outcome = workers.run(parse_variant("cpu"), MODULE, inputs, timeout=timeout, form="stablehlo")
    result = None if outcome.outputs is None else float(outcome.outputs[0])
    failure = outcome.failure and outcome.failure.kind
    return {"result": result, "failure": failure, "interpreters": len(starts) - before}

starts = []
popen = subprocess.Popen
subprocess.Popen = lambda *words, **named: starts.append(words) or popen(*words, **named)

answers = {}
print("said before", end="")
with forked_from_here():
    with Workers(1, 60) as workers:
        answers["ends"] = told(3)
        answers["hangs"] = told(np.inf, timeout=1)
        answers["after"] = told(4)
        (worker,) = workers._idle
        worker._process.kill()
        worker._process.wait()
        answers["killed"] = told(5)
    os.environ["SNAPRT_CACHE"] = "off"
    with Workers(1, 60) as workers:
        answers["changed"] = told(6)
    del os.environ["SNAPRT_CACHE"]
    os.kill(nursery._open._process, signal.SIGKILL)
    with Workers(1, 60) as workers:
        answers["without"] = told(7)
waiting = threading.Event()
threading.Thread(target=waiting.wait).start()
with forked_from_here():
    answers["with a thread"] = nursery._open is not None
waiting.set()
print("\\n" + json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said, answers = done.stdout.splitlines()
    assert said == "said before"
    return json.loads(answers)


def test_a_forked_worker_runs_programs_without_a_new_interpreter(answers: dict[str, Any]) -> None:
    assert answers["ends"] == {"result": 3.0, "failure": None, "interpreters": 0}


def test_a_forked_worker_that_hangs_is_stopped_and_replaced(answers: dict[str, Any]) -> None:
    assert answers["hangs"] == {"result": None, "failure": "timeout", "interpreters": 0}
    assert answers["after"] == {"result": 4.0, "failure": None, "interpreters": 0}


def test_the_end_of_a_forked_worker_is_a_result(answers: dict[str, Any]) -> None:
    assert answers["killed"]["failure"] == "out of memory"


def test_other_variables_need_a_new_interpreter(answers: dict[str, Any]) -> None:
    assert answers["changed"] == {"result": 6.0, "failure": None, "interpreters": 1}


def test_without_its_nursery_a_worker_is_a_new_interpreter(answers: dict[str, Any]) -> None:
    assert answers["without"] == {"result": 7.0, "failure": None, "interpreters": 1}


def test_a_process_with_threads_makes_no_nursery(answers: dict[str, Any]) -> None:
    assert answers["with a thread"] is False
