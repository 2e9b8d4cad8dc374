"""``snaprt triage`` runs a program in each mode, and names the first that fails."""

import json
import re

import pytest

from snaprt.cli import triage
from snaprt.cli.main import main

# Without JAX, a run takes a moment; what a mode sets is seen in the environment.
FAILS_WITHOUT_OPTIMIZATION = """\
import os, sys
print("began [red]with")
sys.exit("broken" if "optimization_level=0" in os.environ.get("XLA_FLAGS", "") else 0)
"""
BY_OPERATION_PRINTS_NAN = """\
import os
print("loss", "nan" if os.environ.get("SYNC_TENSORS_OPBYOP") else "0.5")
print("done")
"""


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "train.py"
        path.write_text(text)
        return path

    return write


def test_the_first_mode_that_fails_is_named_with_what_is_at_fault(script, capfd, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    assert main(["triage", "--json", "--", str(script(FAILS_WITHOUT_OPTIMIZATION))]) == 1
    found = json.loads(capfd.readouterr().out)
    assert found["first_failed"] == "lazy, not optimized"
    assert "graph of several operations" in found["blame"]
    assert [run["result"] for run in found["runs"]] == ["ok", "ok", "failed", "ok"]
    assert found["runs"][2]["last_line"] == "broken"
    assert found["runs"][0]["last_line"] == "began [red]with"


def test_a_line_of_the_output_can_be_what_fails(script, capfd):
    program = str(script(BY_OPERATION_PRINTS_NAN))
    assert main(["triage", "--fails-if", "loss.*nan", "--", program]) == 1
    out = capfd.readouterr().out
    assert re.search(r"^op by op +failed +0 +[\d.]+ +loss nan *$", out, re.M)
    assert re.search(r"^lazy +ok +0 +[\d.]+ +done *$", out, re.M)
    assert "first to fail: op by op" in out


def test_a_program_that_hangs_is_ended_and_has_failed(script):
    path = script("import time; print('waiting', flush=True); time.sleep(600)")
    run = triage.run_mode(triage.MODES[0], [str(path)], None, 1.0)
    assert (run.result, run.status) == ("timeout", None)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--fails-if", "(", "--", "train.py"],
        *(["--timeout", limit, "--", "train.py"] for limit in ("nan", "inf", "1e400", "1e8", "0")),
    ],
)
def test_what_cannot_be_triaged_is_refused(words, capfd):
    assert main(["triage", *words]) == 2
    assert "error" in capfd.readouterr().err.lower()


@pytest.mark.ecosystem
def test_a_program_of_jax_has_the_same_result_in_all_modes(script, capfd):
    program = (
        "import jax.numpy as jnp\n"
        "x = jnp.arange(8.0)\n"
        "for _ in range(3): x = jnp.sin(x) * 2\n"
        "print(f'{float(x.sum()):.3f}')\n"
    )
    assert main(["triage", "--json", "--", str(script(program))]) == 0
    found = json.loads(capfd.readouterr().out)
    assert len({run["last_line"] for run in found["runs"]}) == 1
    assert found["first_failed"] == ""
