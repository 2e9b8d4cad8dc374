import json
import subprocess
import sys
from pathlib import Path

import pytest
from programs import SNAPRT, run_program

RUN = (*SNAPRT, "run")


def start(*words: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    cache = {"SNAPRT_CACHE_DIR": str(folder / "cache")}
    return run_program(words, folder=folder, status=None, **cache | environment)


def run(source: str, *options: str, folder: Path, **environment: str):
    (folder / "program.py").write_text(source)
    return start(*RUN, *options, "program.py", folder=folder, **environment)


PROGRAM = """
import jax, jax.numpy as jnp
x = jnp.arange(4.0) * 2
jax.debug.print("effect {}", x.sum())
print(type(x).__name__)
"""


def test_a_lazy_program_runs_what_is_pending_when_it_ends(tmp_path: Path):
    shown = run(PROGRAM, "--lazy", "--metrics", "m.json", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "effect 12.0" in shown.stdout
    assert "LazyArray" in shown.stdout
    counters = json.loads((tmp_path / "m.json").read_text())["counters"]
    assert counters["MarkStep"] == 1


@pytest.mark.parametrize("options", [("--lazy",), ("--record", "--dump", "dump")])
def test_warnings_and_logs_are_those_of_the_program_alone(tmp_path: Path, options: tuple[str, ...]):
    source = """
import logging, sys, warnings
logging.basicConfig(stream=sys.stdout, level=logging.INFO)
logging.getLogger("jax").setLevel(logging.WARNING)
print("__annotations__" in globals())
import jax, jax.numpy as jnp
step = jax.jit(lambda x: jnp.sin(x) * 2)
x = jnp.ones(3)
for number in range(20):
    warnings.warn("old")
    x = step(x) + 1
    if number % 5 == 0:
        float(x[0])
print("end")
"""
    shown = run(source, *options, folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout == f"{sys.version_info < (3, 14)}\nend\n"
    assert shown.stderr.count("UserWarning: old") == 1


def test_what_was_pending_before_an_error_is_run_and_the_error_is_shown(tmp_path: Path):
    shown = run(PROGRAM + "raise ValueError('wrong')\n", folder=tmp_path, SNAPRT_LAZY="on")
    assert shown.returncode == 1
    assert "effect 12.0" in shown.stdout
    assert "LazyArray" in shown.stdout
    assert shown.stderr.endswith("ValueError: wrong\n")
    assert "cli/run.py" not in shown.stderr


@pytest.mark.parametrize(
    "first",
    [
        "import snaprt; snaprt.lazy",
        "import snaprt.trace.array",
        "from snaprt import jaxapi",
        "import snaprt_replay.run.player",
    ],
)
def test_a_program_may_import_what_is_ours_before_jax(tmp_path: Path, first: str):
    shown = run(f"{first}\n{PROGRAM}", "--lazy", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "LazyArray" in shown.stdout


WITHOUT_A_DIRECTORY = """
import os, tempfile
import jax, jax.numpy as jnp
os.chdir(tempfile.mkdtemp())
os.rmdir(os.getcwd())
print(jax.jit(lambda x: x + 3)(jnp.ones(2)))
"""


def test_a_program_may_remove_its_current_directory(tmp_path: Path):
    shown = run(WITHOUT_A_DIRECTORY, "--lazy", "--explain", folder=tmp_path)
    assert (shown.returncode, shown.stdout) == (0, "[4. 4.]\n"), shown.stderr


STARTS_WITHOUT_A_DIRECTORY = """
import os, sys, tempfile
os.chdir(tempfile.mkdtemp())
os.rmdir(os.getcwd())
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""

LAZY = "import snaprt, jax.numpy as jnp\nwith snaprt.lazy(): print(jnp.ones(2) + 1)"


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            ("-c", LAZY),
            id="a command",
            marks=pytest.mark.skipif(
                sys.version_info >= (3, 13), reason="NumPy cannot be imported there"
            ),
        ),
        pytest.param(("-m", "snaprt", "run", "--lazy", "-m", "this"), id="a module"),
    ],
)
def test_a_program_may_start_in_a_removed_directory(tmp_path: Path, words: tuple[str, ...]):
    (tmp_path / "starts.py").write_text(STARTS_WITHOUT_A_DIRECTORY)
    run_program(("starts.py", *words), folder=tmp_path)


def test_a_command_that_needs_the_removed_directory_says_so(tmp_path: Path):
    (tmp_path / "starts.py").write_text(STARTS_WITHOUT_A_DIRECTORY)
    words = ("starts.py", "-m", "snaprt", "bundle", "--outfile", "run.tar.gz", "--", "true")
    refused = run_program(words, folder=tmp_path, status=2)
    assert "the working directory was removed" in refused.stderr
    assert "Change to a directory that exists." in refused.stderr


@pytest.mark.parametrize("option", ["--lazy", "--no-lazy"])
def test_jax_is_imported_by_the_program_alone(tmp_path: Path, option):
    source = "import sys; print(sorted({'jax', 'jaxlib', 'numpy'} & set(sys.modules)))"
    shown = run(source, option, folder=tmp_path)
    assert (shown.stdout, shown.returncode) == ("[]\n", 0), shown.stderr


SETS_ITS_OWN = """
import os
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_ENABLE_X64"] = "1"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=3"
import jax, jax.numpy as jnp
x = jnp.arange(3.0) + 1
print(len(jax.devices()), jax.default_backend(), x.dtype, x)
"""


def test_what_a_program_sets_before_it_imports_jax_counts_as_under_python(tmp_path: Path):
    (tmp_path / "program.py").write_text(SETS_ITS_OWN)
    outside = {"JAX_PLATFORMS": "nonsense", "XLA_FLAGS": ""}
    expected = start("program.py", folder=tmp_path, **outside)
    shown = run(SETS_ITS_OWN, "--lazy", folder=tmp_path, **outside)
    assert expected.stdout == "3 cpu float64 [1. 2. 3.]\n", expected.stderr
    assert (shown.stdout, shown.returncode) == (expected.stdout, 0), shown.stderr


CONFIGURES_JAX = """
import os
import jax, jax.numpy as jnp
os.environ["XLA_FLAGS"] = "--xla_cpu_enable_fast_math=true"
jax.config.update("jax_num_cpu_devices", 2)
print(len(jax.devices()), (jnp.ones(2) * 3).sum())
"""


def test_what_a_program_configures_after_it_imports_jax_counts_too(tmp_path: Path):
    shown = run(CONFIGURES_JAX, "--lazy", folder=tmp_path, XLA_FLAGS="")
    assert (shown.stdout, shown.returncode) == ("2 6.0\n", 0), shown.stderr


def test_a_module_whose_package_imports_jax_runs_lazily(tmp_path: Path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import jax\n")
    (tmp_path / "package" / "train.py").write_text(PROGRAM)
    shown = start(*RUN, "--lazy", "-m", "package.train", folder=tmp_path)
    assert "LazyArray" in shown.stdout, shown.stderr


def test_a_program_whose_other_thread_imports_jax_first_is_told_that_it_runs_eagerly(
    tmp_path: Path,
):
    source = (
        "import threading\n"
        "thread = threading.Thread(target=lambda: __import__('jax'))\n"
        "thread.start(); thread.join()\n" + PROGRAM
    )
    shown = run(source, "--lazy", folder=tmp_path)
    assert shown.returncode == 0
    assert "ArrayImpl" in shown.stdout
    assert "import it in the main thread" in shown.stderr


def test_a_jax_that_fails_to_import_is_shown_as_under_python(tmp_path: Path):
    (tmp_path / "jax.py").write_text("def f():\n    1 / 0\nf()\n")
    source = "def load():\n    import jax\nload()\n"
    (tmp_path / "program.py").write_text(source)
    expected = start("program.py", folder=tmp_path)
    shown = run(source, "--lazy", folder=tmp_path)
    assert (shown.returncode, shown.stderr) == (expected.returncode, expected.stderr)


@pytest.mark.parametrize("setting", ["outside", "inside"])
def test_a_flag_that_xla_does_not_know_is_an_error_with_a_hint_and_status_2(
    tmp_path: Path, setting
):
    source = PROGRAM
    if setting == "inside":
        source = "import os\nos.environ['XLA_FLAGS'] = '--xla_nope=1'\n" + PROGRAM
    flags = "--xla_nope=1" if setting == "outside" else ""
    shown = run(source, "--lazy", folder=tmp_path, XLA_FLAGS=flags)
    assert shown.returncode == 2
    assert shown.stderr.startswith("error: XLA does not know --xla_nope in XLA_FLAGS\n\nhint: ")
    assert "Traceback" not in shown.stderr


FAILS = """
import jax, jax.numpy as jnp, numpy as np, snaprt
def fail(x):
    raise RuntimeError("broken sensor")
def step():
    return jax.pure_callback(fail, jax.ShapeDtypeStruct((), jnp.float32), jnp.float32(1)) + 1
result = step()
"""


def test_an_error_of_ours_in_the_program_has_the_programs_traceback(tmp_path: Path):
    shown = run(FAILS + "def loop():\n    snaprt.mark_step()\nloop()\n", "--lazy", folder=tmp_path)
    assert shown.returncode == 1
    assert "Traceback (most recent call last):" in shown.stderr
    assert "in loop\n    snaprt.mark_step()" in shown.stderr
    assert "snaprt.trace.failures.FailedOnDevice: graph " in shown.stderr


def test_an_error_in_what_was_pending_at_the_end_is_an_error_with_a_hint(tmp_path: Path):
    shown = run(FAILS, "--lazy", folder=tmp_path)
    assert shown.returncode == 2
    said = shown.stderr[shown.stderr.index("error: graph ") :]  # JAX logs the callback before
    assert "broken sensor" in said
    assert "\n\nhint: " in said
    assert "snaprt.errors.ExecutionError" not in shown.stderr


def test_an_error_in_a_jitted_function_has_the_traceback_that_eager_jax_shows(tmp_path: Path):
    source = (
        "import jax, jax.numpy as jnp\n"
        "print(type(jnp.ones(3) * 2).__name__)\n"
        "jax.jit(lambda x: jnp.concatenate([x, x], axis=3))(jnp.ones(3) * 2)\n"
    )
    eager, lazy = (
        run(source, option, folder=tmp_path, SNAPRT_LAZY="1") for option in ("--no-lazy", "--lazy")
    )
    # The option wins over the environment.
    assert (eager.stdout, lazy.stdout) == ("ArrayImpl\n", "LazyArray\n")
    assert "axis 3 is out of bounds" in eager.stderr
    assert lazy.stderr == eager.stderr
