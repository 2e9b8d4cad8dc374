"""``snaprt.no_compile``: nothing is compiled after the warm-up, or one learns why."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import SNAPRT, run_program

import snaprt


def line_of(mark: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if f"# mark: {mark}" in line)


def test_a_jitted_function_that_gets_another_shape_raises_and_says_so():
    guard = snaprt.no_compile()

    @jax.jit
    def scaled(x):
        return x * 2.5 + 1

    batch = np.ones(8, np.float32)
    scaled(batch)
    with guard:
        assert np.asarray(scaled(batch))[0] == 3.5
        with pytest.raises(snaprt.NoCompileError) as caught:
            scaled(batch[:5])  # mark: jit
    message = str(caught.value)
    assert f"test_no_compile.py:{line_of('jit')} in " in message
    assert message.startswith("scaled has to be compiled, at ")
    assert "argument arg0: before: tensor<8xf32>; now: tensor<5xf32>" in message
    assert scaled(batch[:5]).shape == (5,)  # outside of it, all is as ever


def test_a_constant_that_changes_is_named_with_its_line():
    guard = snaprt.no_compile()

    def decayed(x, rate):
        return x * rate  # mark: rate

    jitted = jax.jit(decayed, static_argnums=1)
    x = np.ones(3, np.float32)
    jitted(x, 0.5)
    with guard, pytest.raises(snaprt.NoCompileError) as caught:
        jitted(x, 0.25)
    message = re.sub(" +", " ", str(caught.value))
    assert f"test_no_compile.py:{line_of('rate')} in " in message
    assert "before: constant dense<5.0" in message
    assert "now: constant dense<2.5" in message


def test_a_lazy_graph_that_changes_raises_and_stays_pending():
    x = jnp.arange(4.0)

    def step(more):
        y = x * 3 + 1
        if more:
            y = jnp.sin(y)  # mark: lazy
        snaprt.mark_step()
        return y

    with snaprt.lazy():
        for _ in range(2):
            step(more=False)
        with snaprt.no_compile():
            step(more=False)
            kept = jnp.cos(x) * 2
            with pytest.raises(snaprt.NoCompileError) as caught:
                step(more=True)
        np.testing.assert_allclose(kept, np.cos(np.arange(4.0)) * 2, rtol=1e-6)
    message = str(caught.value)
    assert "the lazy graph has to be compiled, at " in message
    assert "became jit(cos) at " in message


def test_it_warns_nests_and_decorates(caplog: pytest.LogCaptureFixture):
    @snaprt.no_compile("warn")
    def evaluate():
        return jax.jit(lambda x: x + 17)(np.float32(1))

    assert evaluate() == 18
    assert "has to be compiled, at" in caplog.text
    with snaprt.no_compile(), snaprt.no_compile("warn"):
        assert jax.jit(lambda x: x + 18)(np.float32(1)) == 19
    with pytest.raises(snaprt.UsageError, match="'raise' or 'warn'"):
        snaprt.no_compile("log")  # type: ignore[arg-type]


PROGRAM = """
import jax, numpy as np
@jax.jit
def train_step(w):
    return w * 0.5
w = np.ones(8, np.float32)
for step in range(6):
    w = train_step(w)
print("warm")
print(train_step(w[:4]).shape)
"""


@pytest.mark.parametrize(
    ("setting", "status"), [("4", 1), ("4:warn", 0), ("100", 0)], ids=["raise", "warn", "later"]
)
def test_a_whole_process_may_not_compile_after_so_many_steps(
    tmp_path: Path, setting: str, status: int
):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.replace("w[:4]", "np.ones(4, np.float32)"))
    done = run_program(
        (*SNAPRT, "run", "--", str(script)), status=status, SNAPRT_NO_COMPILE_AFTER=setting
    )
    assert done.stdout.splitlines()[0] == "warm"
    assert ("(4,)" in done.stdout) == (status == 0)
    told = "train_step has to be compiled, at" in done.stderr
    assert told == (setting != "100")
    if told:
        assert "argument arg0: before: tensor<8xf32>; now: tensor<4xf32>" in done.stderr


def test_an_executable_from_the_cache_is_no_compilation(tmp_path: Path):
    program = """
        import sys, jax, jax.numpy as jnp, numpy as np, snaprt
        guard = snaprt.no_compile()
        x = jnp.arange(4.0)
        if sys.argv[1] == "warm":
            guard.__enter__()
        print(float(jax.jit(lambda x: x * 3 + 2)(x).sum()))
        with snaprt.lazy():
            y = jnp.tanh(x) * 5
            snaprt.mark_step()
        print("done")
    """
    for start in ("cold", "warm"):
        done = run_program(program, start, SNAPRT_CACHE_DIR=tmp_path, SNAPRT_JAX_CACHE=1)
        assert done.stdout.split() == ["26.0", "done"]


def test_a_program_is_compared_with_one_that_came_from_the_cache(tmp_path: Path):
    program = """
        import sys, jax, numpy as np, snaprt
        guard = snaprt.no_compile("warn")
        @jax.jit
        def train_step(x):
            return x * 3
        for size in map(int, sys.argv[1:]):
            with guard:
                train_step(np.ones(size, np.float32))
    """
    run_program(program, 8, SNAPRT_CACHE_DIR=tmp_path, SNAPRT_JAX_CACHE=1)
    done = run_program(program, 8, 4, SNAPRT_CACHE_DIR=tmp_path, SNAPRT_JAX_CACHE=1)
    assert done.stderr.count("has to be compiled") == 1
    assert "argument arg0: before: tensor<8xf32>; now: tensor<4xf32>" in done.stderr


def test_a_wrong_setting_is_refused():
    done = run_program((*SNAPRT, "run", "-m", "this"), status=2, SNAPRT_NO_COMPILE_AFTER="soon")
    assert "SNAPRT_NO_COMPILE_AFTER" in done.stderr
