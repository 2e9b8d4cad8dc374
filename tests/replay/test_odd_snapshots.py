"""Odd but valid executions, recorded for real, through the commands that show them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest
from programs import run_program
from recordings import record

from snaprt.snapshot.format.schema import first_line

Command = Callable[..., tuple[int, str, str]]

PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np, snaprt
from jax.experimental import io_callback
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

folder = sys.argv[1]

def fails(x):
    raise ValueError("boom")

@jax.jit
def calls(x):
    return jax.pure_callback(fails, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + 1

def named(x):
    return x * 2

named.__name__ = "first line\\nsecond line " + "n" * 300
def prints(x):
    jax.debug.print("{}", x.sum())
    jax.debug.print("{}", x.mean(), ordered=True)
    io_callback(lambda value: None, None, x)

    def body(i, y):
        jax.debug.print("{}", y.sum(), ordered=True)
        return y + 1

    return jax.lax.fori_loop(0, 3, body, x)

def prints_sharded(x):
    jax.debug.print("{}", x.sum())
    return x * 2

def double(x):
    results = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((2,), np.int8)
    floats, integers = jax.pure_callback(lambda x: (x * 2, np.ones(2, np.int8)), results, x)
    return floats * integers.sum()

@jax.jit
def branches(x):
    return jax.lax.cond(x.sum() > 0, jax.jit(double), lambda x: x + 1, x) * 3

@jax.jit
def loops(x):
    return jax.lax.fori_loop(0, 3, lambda _, x: branches(x) - 1, x)

@jax.jit
def both(x):
    return branches(x) + jax.jit(double)(x)

x = np.ones((2, 3), np.float32)
for function in branches, loops, both:
    for name, argument in ("skips", -1000 * x), ("calls", x):
        with snaprt.record(folder=folder + f"/{name}_{function.__name__}"):
            function(argument)
with snaprt.record(folder=folder + "/prints"):
    jax.jit(prints)(x)
sharding = NamedSharding(jax.make_mesh((2,), ("d",)), PartitionSpec("d"))
with snaprt.record(folder=folder + "/prints_sharded"):
    jax.jit(prints_sharded)(jax.device_put(np.arange(8.0, dtype=np.float32), sharding))
jax.effects_barrier()
rows = np.arange(24, dtype=np.float32).reshape(4, 6)
one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
for name, place in ("laid_out", one), ("laid_out_sharded", sharding):
    columns_first = Format(Layout((1, 0)), place)
    with snaprt.record(folder=folder + "/" + name):
        jax.jit(lambda x: (x * 2, jnp.cumsum(x, axis=1)), out_shardings=(columns_first, place))(
            jax.device_put(rows, columns_first)
        )
with snaprt.record(folder=folder + "/nothing"):
    jax.jit(lambda: ())()
with snaprt.record(folder=folder + "/named"):
    jax.jit(named)(x)
with snaprt.record(when="error", folder=folder + "/failed"):
    try:
        jax.block_until_ready(calls(x))
    except jax.errors.JaxRuntimeError:
        pass
"""


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("odd")
    run_program(PROGRAM, folder, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    return folder


def inputs_of(folder: Path) -> Path:
    return min(folder.glob("*.inputs.snap"))


@pytest.mark.parametrize("word", ["\ud800", "caf\udce9"])
def test_words_that_are_no_unicode_are_shown_and_are_json(
    snaprt: Command, tmp_path: Path, word: str
) -> None:
    (tmp_path / "plain").mkdir()
    x = {"x": jnp.ones(3)}
    plain = record(tmp_path / "plain", jnp.sin, x)
    fields = {
        "name": word,
        "host": word,
        "reason": word,
        "versions": {"jax": word},
        "environment": {"TPU_NAME": word},
        "source_locations": (f"/{word}/train.py:1 (step)",),
    }
    path = record(tmp_path, jnp.sin, {word: jnp.ones(3)}, **fields)
    words = (("ls", tmp_path), ("inspect", path), ("diff", path, plain), ("replay", path))
    for command in words:
        assert snaprt(*command)[0] < 2
        status, out, _ = snaprt(*command, "--json")
        assert status < 2
        out.encode()
        assert json.loads(out)
    facts = json.loads(snaprt("inspect", path, "--json")[1])["facts"]
    assert facts["environment"] == f"TPU_NAME {word}"
    assert snaprt("pack", path, "-o", tmp_path / "a.pack", "--redact", "paths")[0] == 0


@pytest.mark.parametrize("name", ["laid_out", "laid_out_sharded"])
def test_what_its_program_wants_laid_out_otherwise_is_read_as_it_was(
    snaprt: Command, odd: Path, name: str
) -> None:
    status, out, err = snaprt("replay", odd / name)
    assert status == 0, err
    assert "MATCH: all 2 outputs are identical, bit for bit" in out


def test_an_execution_without_arrays_is_listed_as_such(snaprt: Command, odd: Path) -> None:
    _, out, _ = snaprt("ls", odd / "nothing")
    assert out.split().count("none") == 2


def test_a_name_of_several_lines_is_shown_in_one(snaprt: Command, odd: Path) -> None:
    path = inputs_of(odd / "named")
    _, out, _ = snaprt("ls", odd / "named")
    assert len(out.splitlines()) == 2
    assert r"first line\x0asecond line" in out
    assert "n" * 200 not in out
    assert r"first line\x0asecond line" in snaprt("inspect", path)[1].splitlines()[0]
    _, out, _ = snaprt("diff", path, inputs_of(odd / "nothing"))
    assert any("first line second line" in line for line in out.splitlines())


def test_a_failed_callback_is_told_by_its_own_error(
    snaprt: Command, odd: Path, tmp_path: Path
) -> None:
    path = inputs_of(odd / "failed")
    _, out, _ = snaprt("ls", odd / "failed")
    assert "boom" in out
    assert "Traceback" not in out
    status, out, _ = snaprt("replay", path, "--compile-only", "--save-hlo", tmp_path / "hlo.txt")
    assert status == 0
    assert "flops" in out
    assert "-1 s" not in out
    assert "Traceback" not in out


def assert_replayed(snaprt: Command, path: Path, note: str) -> str:
    """Replay an execution of which something was left out; return what was printed."""
    status, out, _ = snaprt("replay", path)
    assert status == 0
    assert note in out
    assert "MATCH: the output is identical, bit for bit" in out
    return out


def assert_sides_agree(snaprt: Command, path: Path) -> None:
    status, out, _ = snaprt("localize", path, "--a", "cpu", "--b", "cpu,optimization=0")
    assert (status, "NOTHING FOUND" in out.upper()) == (0, True), out


@pytest.mark.parametrize("name", ["prints", "prints_sharded"])
def test_a_program_that_prints_is_replayed_without_printing(
    snaprt: Command, odd: Path, tmp_path: Path, name: str
) -> None:
    path = inputs_of(odd / name)
    note = "callbacks that return nothing, such as jax.debug.print, were left out"
    assert_replayed(snaprt, path, note)
    assert snaprt("replay", path, "--random", "0")[0] == 0
    if name == "prints":
        assert_sides_agree(snaprt, path)
        module = tmp_path / "module.mlir"
        assert snaprt("export", path, "--to", "stablehlo", "-o", module)[0] == 0
        assert snaprt("replay", module, "--random", "0")[0] == 0


def test_the_results_that_an_exported_failure_lacks_are_not_blamed_on_xla(
    snaprt: Command, odd: Path, tmp_path: Path
) -> None:
    path = tmp_path / "step.pb"
    recorded = inputs_of(odd / "named")
    without_outputs = tmp_path / recorded.name
    without_outputs.write_bytes(recorded.read_bytes())
    assert snaprt("export", without_outputs, "--to", "hlo-snapshot", "-o", path)[0] == 0
    _, out, _ = snaprt("inspect", path)
    assert "the file holds 0 of 1 results: the execution failed, an input was donated" in out


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ("", ""),
        ("ValueError: boom\n\nTraceback ...", "ValueError: boom"),
        (
            'X: calling: Traceback (most recent call last):\n  File "a"\n\nValueError: boom\nmore',
            "X: calling: ValueError: boom",
        ),
        ("X: Traceback (most recent call last):", "X"),
    ],
)
def test_the_first_line_of_an_error_is_never_the_head_of_a_traceback(error: str, line: str) -> None:
    assert first_line(error) == line


def test_the_interpreter_refuses_what_it_cannot_run(snaprt: Command, tmp_path: Path) -> None:
    module = tmp_path / "custom.mlir"
    module.write_text(
        "module { func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {\n"
        "%0 = stablehlo.custom_call @somewhere(%a) : (tensor<4xf32>) -> tensor<4xf32>\n"
        "return %0 : tensor<4xf32> } }"
    )
    words = ("replay", module, "--random", "0", "--a", "interpreter", "--b", "interpreter")
    _, out, err = snaprt(*words)
    assert "the StableHLO interpreter cannot run custom calls: somewhere" in out + err
    assert "SIGABRT" not in out + err


@pytest.mark.parametrize("name", ["skips_branches", "skips_loops"])
def test_a_program_that_skips_the_branch_with_a_callback_is_replayed(
    snaprt: Command, odd: Path, tmp_path: Path, name: str
) -> None:
    path = inputs_of(odd / name)
    note = "callbacks in branches were left out: a branch that calls one returns NaN"
    assert "warning" not in assert_replayed(snaprt, path, note)
    assert_sides_agree(snaprt, path)
    assert snaprt("export", path, "--to", "python", "-o", tmp_path / "program")[0] == 0
    assert "identical" in run_program(tmp_path / "program" / "run.py").stdout


@pytest.mark.parametrize("name", ["calls_branches", "calls_loops"])
def test_a_program_that_needs_the_result_of_a_callback_in_a_branch_is_refused(
    snaprt: Command, odd: Path, tmp_path: Path, name: str
) -> None:
    path = inputs_of(odd / name)
    trial = ("replay", path, "--a", "cpu", "--b", "recorded")
    minify = ("minify", path, "-o", tmp_path / "small", "--check", "mismatch")
    for command in (("replay", path), trial, ("localize", path), minify):
        status, out, err = snaprt(*command)
        assert status > 1, out
        assert "takes a branch that calls back into Python" in err


@pytest.mark.parametrize("name", ["calls_both", "skips_both"])
def test_a_program_that_always_calls_back_is_refused_although_branches_do_so_too(
    snaprt: Command, odd: Path, name: str
) -> None:
    status, _, err = snaprt("replay", inputs_of(odd / name))
    assert status > 1
    assert "the module needs a Python callback" in err
