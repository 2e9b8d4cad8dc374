import json
import os
import subprocess
from pathlib import Path

import pytest
from programs import SNAPRT, run_program

from snaprt.cli import main as cli

DESCRIBE = """
import json, os, sys
print(json.dumps({
    "name": __name__,
    "file": __file__,
    "package": __package__,
    "spec": __spec__.name if __spec__ else None,
    "argv": sys.argv,
    "path": sys.path[0],
    "builtins": type(__builtins__).__name__,
    "main": sys.modules["__main__"].__dict__ is globals(),
}))
"""


def python(*words: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_program(words, folder=folder, status=None, **environment)


def run(*words: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return python(*SNAPRT, "run", *words, folder=folder, **environment)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "script.py").write_text(DESCRIBE)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "__main__.py").write_text(DESCRIBE)
    (tmp_path / "package" / "module.py").write_text(DESCRIBE)
    (tmp_path / "link.py").symlink_to(tmp_path / "inner" / "script.py")
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ("inner/script.py",),
        ("inner/script.py", "--lazy", "--cache", "x", "-m", "--"),
        ("link.py", "a"),
        ("package", "b"),
        ("-m", "package"),
        ("-m", "package.module", "-x", "--lazy", "--help"),
    ],
)
def test_a_program_sees_what_python_would_show_it(programs: Path, words):
    expected = python(*words, folder=programs)
    shown = run(*words, folder=programs)
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout) == json.loads(expected.stdout)


def test_the_program_may_follow_two_dashes(programs: Path):
    expected = json.loads(run("inner/script.py", "-x", folder=programs).stdout)
    assert json.loads(run("--", "inner/script.py", "-x", folder=programs).stdout) == expected
    module = json.loads(run("--", "-m", "package", "-x", folder=programs).stdout)
    assert module["spec"] == "package.__main__"


@pytest.mark.parametrize(
    "ending",
    [
        "pass",
        "import sys; sys.exit()",
        "import sys; sys.exit(0)",
        "import sys; sys.exit(7)",
        "import sys; sys.exit('some words')",
        "raise SystemExit((1, 2))",
        "import os; os._exit(9)",
        "import sys; sys.stdout = sys.stderr = None",
        "import sys; sys.stdout.close(); sys.stderr.close(); sys.exit(7)",
    ],
)
def test_the_exit_status_and_its_words_are_the_programs(tmp_path: Path, ending):
    (tmp_path / "ends.py").write_text(f"print('out')\n{ending}\n")
    expected = python("-u", "ends.py", folder=tmp_path)
    shown = run("ends.py", folder=tmp_path, PYTHONUNBUFFERED="1")
    assert (shown.returncode, shown.stdout, shown.stderr) == (
        expected.returncode,
        expected.stdout,
        expected.stderr,
    )


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    raise ValueError('wrong')\nf()\n",
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e\n",
        "import no_such_module_at_all\n",
        "x = (\n",
        "raise BrokenPipeError('of the program')\n",
        "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__)\n1 / 0\n",
        "import sys\nsys.excepthook = lambda *a: len(0)\n1 / 0\n",
        "import sys\nsys.excepthook = lambda *a: sys.exit(9)\n1 / 0\n",
    ],
)
def test_an_uncaught_exception_looks_as_under_python(tmp_path: Path, source):
    (tmp_path / "fails.py").write_text(source)
    expected = python("fails.py", folder=tmp_path)
    shown = run("fails.py", folder=tmp_path)
    assert (shown.returncode, shown.stdout, shown.stderr) == (
        expected.returncode,
        expected.stdout,
        expected.stderr,
    )


def test_an_error_in_a_modules_package_is_shown_as_the_programs_own(tmp_path: Path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import no_such_module_at_all\n")
    shown = run("-m", "package", folder=tmp_path)
    assert shown.returncode == 1
    assert "No module named 'no_such_module_at_all'" in shown.stderr
    assert "snaprt" not in shown.stderr
    assert "importlib" not in shown.stderr


@pytest.mark.parametrize(
    "words", [("missing.py",), ("-m", "missing"), ("-m", "missing.module"), ("-m",), ("empty",)]
)
def test_a_program_that_is_not_there_is_an_error_with_status_2(tmp_path: Path, words):
    (tmp_path / "empty").mkdir()
    shown = run(*words, folder=tmp_path)
    assert shown.returncode == 2
    assert shown.stderr.startswith("error: ")
    assert "\n\nhint: " in shown.stderr


def test_a_program_does_not_inherit_our_future_imports(tmp_path: Path):
    (tmp_path / "annotated.py").write_text("x: 1 + 1 = 0\nprint(__annotations__)\n")
    assert run("annotated.py", folder=tmp_path).stdout == "{'x': 2}\n"


def test_functions_of_the_program_work_in_spawned_processes(tmp_path: Path):
    (tmp_path / "spawns.py").write_text(
        "import multiprocessing\n"
        "def double(x):\n"
        "    return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(double, [1, 2, 3]))\n"
    )
    shown = run("spawns.py", folder=tmp_path)
    assert (shown.stdout, shown.returncode) == ("[2, 4, 6]\n", 0), shown.stderr


def test_the_program_is_still_there_for_threads_and_exit_handlers(tmp_path: Path):
    (tmp_path / "late.py").write_text(
        "import atexit, pickle, threading, time\n"
        "class Thing:\n"
        "    pass\n"
        "def late():\n"
        "    time.sleep(0.2)\n"
        "    print(type(pickle.loads(pickle.dumps(Thing()))).__name__, flush=True)\n"
        "threading.Thread(target=late).start()\n"
        "atexit.register(late)\n"
    )
    shown = run("late.py", folder=tmp_path)
    assert shown.stdout == "Thing\nThing\n", shown.stderr


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        (("--cache", "c", "--dump", "d", "--metrics", "m.json"), {}),
        ((), {"SNAPRT_CACHE_DIR": "c", "SNAPRT_DUMP_DIR": "d", "SNAPRT_METRICS_FILE": "m.json"}),
    ],
)
def test_the_places_it_writes_to_become_absolute_paths_in_the_environment(
    tmp_path: Path, options: tuple[str, ...], environment: dict[str, str]
):
    (tmp_path / "prints.py").write_text(
        "import os\n"
        "for name in ('SNAPRT_CACHE_DIR', 'SNAPRT_DUMP_DIR', 'SNAPRT_METRICS_FILE'):\n"
        "    print(os.environ[name])\n"
        "os.chdir('/')\n"
    )
    shown = run(*options, "prints.py", folder=tmp_path, **environment)
    assert shown.stdout.splitlines() == [str(tmp_path / name) for name in ("c", "d", "m.json")]
    assert json.loads((tmp_path / "m.json").read_text())["schema"] == "snaprt.metrics"


def test_dedupe_is_switched_on_for_the_program(tmp_path: Path):
    (tmp_path / "prints.py").write_text("import os\nprint(os.environ['SNAPRT_RECORD_DEDUPE'])\n")
    assert run("--dedupe", "prints.py", folder=tmp_path).stdout == "on\n"


@pytest.mark.parametrize(
    ("options", "environment", "named"),
    [
        ((), {"SNAPRT_RECOMPILE_LIMIT": "few"}, "SNAPRT_RECOMPILE_LIMIT"),
        ((), {"XLA_METRICS_FILE": "nowhere/metrics.txt"}, "XLA_METRICS_FILE"),
        (("--metrics", "nowhere/metrics.json"), {}, "--metrics"),
        (("--dump", "link.py"), {}, "--dump"),
        ((), {"XLA_METRICS_FILE": "inner"}, "XLA_METRICS_FILE"),
        ((), {"SNAPRT_LOG_FILE": "inner/script.py/log"}, "SNAPRT_LOG_FILE"),
        ((), {"SNAPRT_TRACE": "inner/script.py/trace"}, "SNAPRT_TRACE"),
        ((), {"SNAPRT_COLLECT": "x" * 300}, "SNAPRT_COLLECT"),
        ((), {"SNAPRT_CACHE_REMOTE": "http://["}, "SNAPRT_CACHE_REMOTE"),
        ((), {"SNAPRT_RECORD_MAX_BYTES": "9" * 400}, "SNAPRT_RECORD_MAX_BYTES"),
    ],
)
def test_a_setting_that_cannot_be_is_told_before_the_program_runs(
    programs: Path, options: tuple[str, ...], environment: dict[str, str], named: str
):
    shown = run(*options, "inner/script.py", folder=programs, **environment)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr.startswith("error: ")
    assert named in shown.stderr
    assert shown.stderr.count("hint:") == 1


@pytest.mark.parametrize(
    ("name", "place"), [("SNAPRT_LOG_FILE", "log"), ("SNAPRT_DUMP_DIR", "new/dump")]
)
def test_a_place_without_permission_to_write_is_told_before_the_program_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    name: str,
    place: str,
):
    monkeypatch.setenv(name, str(tmp_path / place))
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    assert cli.main(["run", "no_program.py"]) == 2
    said = capfd.readouterr().err
    assert f"{tmp_path} is not writable" in said
    assert name in said


@pytest.mark.parametrize(
    ("source", "is_kept"),
    [
        ("import jax", True),
        ("import importlib; importlib.import_module('jax')", True),
        ("import imports_jax", True),
        ("def main():\n    import jax\nmain()", False),
        ("import imports_jax_late; imports_jax_late.main()", False),
        ("", False),
    ],
)
def test_modules_are_kept_out_of_collections_but_not_what_a_program_made(
    tmp_path: Path, source, is_kept
):
    (tmp_path / "imports_jax.py").write_text("import jax\n")
    (tmp_path / "imports_jax_late.py").write_text("def main():\n    import jax\n")
    (tmp_path / "program.py").write_text(
        "import gc\n"
        f"{source}\n"
        "print(gc.get_freeze_count() > 10_000, gc.isenabled())\n"
        "class Node:\n"
        "    def __del__(self):\n"
        "        print('collected')\n"
        "node = Node()\n"
        "node.itself = node\n"
        "del node\n"
        "gc.collect()\n"
    )
    ended = run("--lazy", "--", "program.py", folder=tmp_path)
    assert (ended.stdout, ended.returncode) == (f"{is_kept} True\ncollected\n", 0), ended.stderr


def test_variables_that_do_nothing_here_are_named(tmp_path: Path):
    (tmp_path / "program.py").write_text("print(1)")
    done = run("program.py", folder=tmp_path, NEURON_CC_FLAGS="-O1", XLA_USE_SPMD="1")
    assert done.stdout == "1\n"
    assert done.stderr.splitlines() == [
        "snaprt: warning: NEURON_CC_FLAGS is ignored; set XLA_FLAGS",
        "snaprt: warning: XLA_USE_SPMD is ignored; use JAX's shardings",
    ]
