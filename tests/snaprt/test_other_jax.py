"""A JAX without a name that snaprt uses: the error says which versions snaprt works with."""

from programs import SNAPRT, run_program

# What snaprt imports of JAX, and JAX itself does not.
WITHOUT = "import sys; sys.modules['jax.experimental.serialize_executable'] = None\n"
ERROR = "snaprt works with JAX 0.10.2 to 0.12, but jax "
HINT = "hint: install another JAX: pip install 'jax>=0.10.2,<0.13'"


def test_the_library_raises_an_error_of_its_own():
    done = run_program(f"{WITHOUT}import snaprt; snaprt.mark_step()", status=1)
    assert f"snaprt.errors.UsageError: {ERROR}" in done.stderr
    assert HINT in done.stderr
    assert "compiler/executables.py" in done.stderr  # the file to change


def test_run_prints_the_error_alone(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(f"{WITHOUT}import jax\n")
    for option in ("--record", "--lazy"):
        done = run_program((*SNAPRT, "run", option, "--", str(program)), status=2, folder=tmp_path)
        assert done.stderr.startswith(f"error: {ERROR}")
        assert HINT in done.stderr
        assert "Traceback" not in done.stderr


def test_a_program_with_the_plugin_runs_without_it():
    program = f"{WITHOUT}import jax; print(jax.numpy.ones(1))"
    done = run_program(program, fork=False, SNAPRT_JAX_CACHE=1)
    assert done.stdout == "[1.]\n"
    assert f"snaprt is inactive for jax.jit: {ERROR}" in done.stderr
