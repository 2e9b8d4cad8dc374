"""Failing programs become small, remain the same failure, and are written down to show it."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from flat_programs import flat_program, normal, opcodes
from snaprt_replay.hlo import hlo_module
from snaprt_replay.minify import script
from snaprt_replay.minify.candidate import Candidate
from snaprt_replay.minify.checks import CRASH, MISMATCH, NONFINITE, Check, Judge, Patience, Symptom
from snaprt_replay.minify.cutting import Tap, normalized
from snaprt_replay.minify.shrink import Shrunk, shrink
from snaprt_replay.run.variants.variants import Variant, parse_variant
from snaprt_replay.run.workers import Workers

from snaprt import jaxapi
from snaprt.cli.main import group
from snaprt.errors import SnaprtError
from snaprt.hlo.proto import HloModuleProto, XlaMessage, parse, serialize

CPU = parse_variant("cpu")


def candidate_of(modules: Sequence[XlaMessage], inputs: Sequence[np.ndarray]) -> Candidate:
    found = normalized(modules, inputs)
    assert found is not None
    return found[0]


def edited(module: XlaMessage, opcode: str, wrong: str) -> XlaMessage:
    """Return a module in which one operation is another."""
    copy = type(module)()
    copy.CopyFrom(module)
    (one,) = (one for one in hlo_module.instructions(copy) if one.opcode == opcode)
    one.opcode = wrong
    return copy


def shrunk(
    candidate: Candidate, check: Check, workers: Workers, side: int, *variants: Variant
) -> Shrunk | None:
    def start(number, variant, module, inputs):
        return workers.submit(variant or (CPU, *variants)[number], module, inputs)

    tap = Tap(side, lambda module, inputs: workers.submit(CPU, module, inputs))
    return shrink(candidate, check, start, Patience(), lambda _: [tap])


def network(x, w, v):
    hidden = jnp.tanh(x @ w)
    return jnp.exp(jnp.cos(hidden @ v)), jnp.sin(hidden)


INPUTS = (normal(4, 6), normal(6, 8), normal(8, 3))


# --- what is found ---


def test_a_wrong_operation_is_left_alone_with_what_it_reads(workers: Workers) -> None:
    right = flat_program(network, *INPUTS).module
    pair = [edited(right, "cosine", "sine"), right]
    found = shrunk(candidate_of(pair, INPUTS), MISMATCH, workers, 1, CPU)
    assert found is not None
    assert opcodes(found.candidate) == ["sine"]
    assert found.candidate.inputs[0].size == 1
    assert (
        hlo_module.entry_computation(found.candidate.modules[1]).instructions[-2].opcode == "cosine"
    )


def test_a_nan_is_followed_to_where_finite_values_make_it(workers: Workers) -> None:
    def loss(x):
        return jnp.sum(jnp.sin(x) * jnp.log(jnp.abs(x) - 3) ** 2)

    found = shrunk(
        candidate_of([flat_program(loss, INPUTS[0]).module], INPUTS[:1]), NONFINITE, workers, 0
    )
    assert found is not None
    assert opcodes(found.candidate) == ["log"]
    assert found.neighbor is not None


def test_a_nan_that_is_a_constant_is_left_with_the_select_that_takes_it(workers: Workers) -> None:
    def out_of_bounds(x):
        index = jnp.int32(jnp.abs(x).sum()) + 9
        return jnp.tanh(jnp.take(x, index, axis=0, mode="fill"))

    candidate = candidate_of([flat_program(out_of_bounds, INPUTS[0]).module], INPUTS[:1])
    found = shrunk(candidate, NONFINITE, workers, 0)
    assert found is not None
    assert found.symptom == Symptom("NaN")
    assert opcodes(found.candidate) == ["broadcast", "select"]
    assert len(found.candidate.inputs) == 2


def test_a_nan_that_is_returned_for_any_input_is_another_failure(workers: Workers) -> None:
    def run(one: Candidate, side: int):
        return workers.submit(CPU, one.content(side), one.inputs)

    def symptom_of(function) -> Symptom | None:
        program = flat_program(function, INPUTS[0])
        return NONFINITE.see(candidate_of([program.module], INPUTS[:1]), run)

    constant = Symptom("NaN, a constant of the program")
    assert symptom_of(lambda x: (jnp.sin(x), jnp.full(3, jnp.nan))) == constant
    assert symptom_of(lambda x: (jnp.log(x), jnp.full(3, jnp.nan))) == Symptom("NaN")
    assert symptom_of(lambda x: (jnp.sin(x), jnp.log(jnp.full(3, -1.0)))) == Symptom("NaN")


REFUSED = """HloModule refused

ENTRY main {
  x = f32[16,8] parameter(0)
  w = f32[8,4] parameter(1)
  d = f32[16,4] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  t = f32[16,4] tanh(d)
  c = f32[16,4] custom-call(t), custom_call_target="no_such_function"
  s = f32[16,4] sine(c)
  ROOT out = (f32[16,4], f32[16,4]) tuple(s, d)
}
"""


def test_a_crash_is_left_alone_though_no_value_inside_the_program_is_known(
    workers: Workers,
) -> None:
    module = parse(HloModuleProto, jaxapi.parse_hlo_text(REFUSED), "test")
    candidate = candidate_of([module], (normal(16, 8), normal(8, 4)))
    found = shrunk(candidate, CRASH, workers, 0)
    assert found is not None
    assert found.first.what == "compile error"
    assert "no_such_function" in found.first.message
    assert opcodes(found.candidate) == ["custom-call"]
    assert not np.any(found.candidate.inputs[0])


def test_another_failure_than_the_first_does_not_count(workers: Workers) -> None:
    module = parse(HloModuleProto, jaxapi.parse_hlo_text(REFUSED), "test")
    candidate = candidate_of([module], (normal(16, 8), normal(8, 4)))

    def run(one: Candidate, side: int):
        return workers.submit(CPU, one.content(side), one.inputs)

    with Judge(CRASH, run, Patience()) as judge:
        first = judge.look_first(candidate)
        assert first is not None
        judge.adopt(Symptom(first.what, message="another function"))
        assert judge.answer(candidate) == "fails otherwise"


def test_a_small_error_does_not_stand_for_a_large_one() -> None:
    first = Symptom("wrong values", 1e4)
    assert MISMATCH.persists(first, Symptom("wrong values", 1e3))
    assert not MISMATCH.persists(first, Symptom("wrong values", 2.0))
    assert not MISMATCH.persists(first, Symptom("a NaN", float("inf")))


def test_a_program_that_is_right_is_not_minified(workers: Workers) -> None:
    candidate = candidate_of([flat_program(network, *INPUTS).module], INPUTS)
    assert shrunk(candidate, MISMATCH, workers, 1, CPU) is None


# --- failures that come and go ---


@pytest.mark.parametrize(
    ("repeat", "needed", "answer"),
    [(2, 1, "passes"), (3, 1, "fails"), (5, 2, "passes"), (6, 2, "fails")],
)
def test_a_failure_counts_where_it_is_seen_often_enough(
    repeat: int, needed: int, answer: str
) -> None:
    candidate = candidate_of([flat_program(jnp.sin, INPUTS[0]).module], INPUTS[:1])

    def run(one: Candidate, side: int):
        raise AssertionError("this check runs nothing")

    looks = itertools.count(1)
    sometimes = Check("nan", lambda *_: Symptom("NaN") if next(looks) % 3 == 0 else None)
    with Judge(sometimes, run, Patience(repeat, needed, jobs=1)) as judge:
        judge.adopt(Symptom("NaN"))
        assert judge.answer(candidate) == answer


# --- what is written, and the command line ---


@pytest.fixture(scope="module")
def minified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a program whose cosine is a sine, from the command line."""
    folder = tmp_path_factory.mktemp("minify")
    right = flat_program(network, *INPUTS).module
    (folder / "right.hlo.pb").write_bytes(serialize(right))
    (folder / "wrong.hlo.pb").write_bytes(serialize(edited(right, "cosine", "sine")))
    np.savez(folder / "inputs.npz", **{f"arg{n}": one for n, one in enumerate(INPUTS)})
    words = ["minify", str(folder / "wrong.hlo.pb"), "--against", str(folder / "right.hlo.pb")]
    words += ["--inputs", str(folder / "inputs.npz"), "--a", "cpu,optimization=0", "--json"]
    done = CliRunner().invoke(group, words)
    assert done.exit_code == 1, done.output
    (folder / "told.json").write_text(done.stdout)
    return folder / "wrong.hlo.pb.minified"


def test_the_command_says_what_it_did_as_json(minified: Path) -> None:
    told = json.loads((minified.parent / "told.json").read_text())
    assert (told["schema"], told["version"]) == ("snaprt.minify", 1)
    assert (told["instructions_before"], told["instructions"]) == (6, 1)
    assert told["confirmed"]
    assert told["script_fails"]
    assert any("--xla_backend_optimization_level" in step for step in told["steps"])


def test_every_form_of_the_program_can_be_replayed(minified: Path) -> None:
    files = ("minified.inputs.snap", "minified.snapshot.pb")
    statuses = {}
    for file in files:
        done = CliRunner().invoke(group, ["replay", str(minified / file)])
        statuses[file] = done.exit_code
    # The snapshot has the outputs that are right; XLA's those that the failing side gives.
    assert statuses == {"minified.inputs.snap": 1, "minified.snapshot.pb": 0}
    for name in ("minified", "against", "neighbor"):
        assert "HloModule" in (minified / f"{name}.hlo.txt").read_text()
        assert "stablehlo." in (minified / f"{name}.stablehlo.mlir").read_text()


def test_the_script_names_nothing_but_jax_and_numpy(minified: Path) -> None:
    imports = [
        line.split()[1].partition(".")[0]
        for line in (minified / "repro.py").read_text().splitlines()
        if line.startswith(("import ", "from "))
    ]
    assert set(imports) <= {*sys.stdlib_module_names, "jax", "numpy"}


@pytest.mark.parametrize(
    ("function", "value", "words"),
    [
        (lambda x: jnp.log(-x), 1.0, "is not finite, though all inputs are"),
        (lambda x: x - x, np.inf, "is NaN, though no input is"),
        (lambda x: 1 / jnp.where(jnp.isnan(x), 0.0, x), np.nan, "is infinite, though no input is"),
    ],
)
def test_the_script_says_of_the_inputs_what_is_true_of_them(
    workers: Workers, tmp_path: Path, function: Callable, value: float, words: str
) -> None:
    x = np.full(2, value, np.float32)
    program = flat_program(function, x)
    found = shrunk(candidate_of([program.module], [x]), NONFINITE, workers, 0)
    assert found is not None
    # As it is, because a smaller program may take other inputs.
    whole = found.original
    assert script.write_and_run(tmp_path / "repro.py", whole, found, NONFINITE, None)
    assert words in (tmp_path / "repro.py").read_text()


def test_the_issue_has_the_program_the_failure_and_the_versions(minified: Path) -> None:
    text = (minified / "ISSUE.md").read_text()
    for part in ("wrong values from `sine`", "stablehlo.sine", "python repro.py", "jaxlib: "):
        assert part in text
    assert str(minified.parent) not in text


def test_a_command_decides_what_the_failure_is(minified: Path, tmp_path: Path) -> None:
    script = tmp_path / "has_tanh.py"
    script.write_text(
        "import sys, zipfile, zstandard\n"
        "with zipfile.ZipFile(sys.argv[1]) as file:\n"
        "    name = next(n for n in file.namelist() if n.startswith('module.hlo'))\n"
        "    content = file.read(name)\n"
        "if name.endswith('.zst'):\n"
        "    content = zstandard.ZstdDecompressor().decompress(content)\n"
        "sys.exit(3 if b'tanh' in content else 0)\n"
    )
    words = ["minify", str(minified.parent / "right.hlo.pb"), "--json", "-o", str(tmp_path / "out")]
    words += ["--inputs", str(minified.parent / "inputs.npz")]
    words += ["--check-command", f"{sys.executable} {script} {{}}"]
    done = CliRunner().invoke(group, words)
    assert done.exit_code == 1, done.output
    told = json.loads(done.stdout)
    assert told["instructions"] == 1
    assert told["script_fails"] is None
    assert "tanh" in (tmp_path / "out" / "minified.hlo.txt").read_text()


def test_a_folder_that_cannot_be_written_is_told_before_the_search(
    minified: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    words = ["minify", str(minified.parent / "right.hlo.pb")]
    words += ["--inputs", str(minified.parent / "inputs.npz"), "-o", str(tmp_path / "file" / "out")]
    done = CliRunner().invoke(group, [*words, "--check-command", "no-such-command {}"])
    assert "cannot write to" in str(done.exception)
    assert "--output" in str(done.exception)


def test_what_was_found_is_kept_elsewhere_where_its_folder_cannot_be_written(
    minified: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "out" / "versions.json").mkdir(parents=True)
    words = ["minify", str(minified.parent / "right.hlo.pb"), "--json"]
    words += ["--inputs", str(minified.parent / "inputs.npz"), "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(group, [*words, "--check-command", "false {}"])
    assert done.exit_code == 1, done.output
    told = json.loads(done.stdout)
    assert f"cannot write {tmp_path / 'out'}: Is a directory" in told["notes"][-1]
    assert Path(told["folder"]).parent == tmp_path
    assert (Path(told["folder"]) / "minified.hlo.txt").exists()


def test_where_nothing_fails_no_folder_is_left(minified: Path, tmp_path: Path) -> None:
    words = ["minify", str(minified.parent / "right.hlo.pb"), "-o", str(tmp_path / "out")]
    words += ["--inputs", str(minified.parent / "inputs.npz"), "--check", "nan"]
    assert CliRunner().invoke(group, words).exit_code == 0
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("check", ["crash", "mismatch", "nan", "slow-compile"])
@pytest.mark.parametrize(
    ("side", "message"),
    [
        ("tpu:99", "there is no tpu"),
        ("python=/no/such/python", "cannot start /no/such/python: No such file or directory"),
    ],
)
def test_a_side_that_is_not_here_is_no_failure_of_the_program(
    minified: Path, tmp_path: Path, check: str, side: str, message: str
) -> None:
    words = ["minify", str(minified.parent / "right.hlo.pb"), "-o", str(tmp_path / "out")]
    words += ["--inputs", str(minified.parent / "inputs.npz"), "--check", check, "--a", side]
    done = CliRunner().invoke(group, words)
    assert message in str(done.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("check", ["mismatch", "nan", "slow-compile"])
def test_a_side_that_fails_otherwise_does_not_pass_the_check(
    minified: Path, tmp_path: Path, check: str
) -> None:
    words = ["minify", str(minified.parent / "right.hlo.pb"), "-o", str(tmp_path / "out")]
    words += ["--inputs", str(minified.parent / "inputs.npz"), "--check", check]
    done = CliRunner().invoke(group, [*words, "--a", "cpu,xla-flags=--xla_no_such_flag=1"])
    assert "fails on the program: compile error: " in str(done.exception)
    assert "--check crash" in cast("SnaprtError", done.exception).hint


def test_the_budget_ends_a_search_in_which_every_program_fails(
    minified: Path, tmp_path: Path
) -> None:
    words = ["minify", str(minified.parent / "right.hlo.pb"), "-o", str(tmp_path / "out"), "--json"]
    words += ["--inputs", str(minified.parent / "inputs.npz"), "--budget", "0"]
    done = CliRunner().invoke(group, [*words, "--check-command", "false {}"])
    assert done.exit_code == 1, done.output
    told = json.loads(done.stdout)
    assert told["finished"] is False
    assert told["steps"] == []
    assert told["programs_looked_at"] == 0  # beside FILE itself


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--a", "recorded"], "no program to search"),
        (["--needed", "3", "--repeat", "2"], "--needed 3"),
        (["--check", "nan", "--check-command", "true"], "cannot be combined"),
        (["--check-command", "unbalanced '"], "No closing quotation"),
        (["--check-command", ""], "is empty"),
        (["--check-command", "snaprt inspect {} | grep tanh"], "without a shell, which | needs"),
        (["--check-command", "is_it_wrong {} 2>/dev/null"], "without a shell, which 2>/dev/null"),
        (["--check-command", "sh -c 'exit 125'"], "cannot tell whether the program fails"),
        (["--b", "recorded"], "no outputs were recorded"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_a_reason(
    minified: Path, words: list[str], message: str
) -> None:
    file = minified.parent / "right.hlo.pb"
    inputs = minified.parent / "inputs.npz"
    done = CliRunner().invoke(group, ["minify", str(file), "--inputs", str(inputs), *words])
    assert message in str(done.exception)
