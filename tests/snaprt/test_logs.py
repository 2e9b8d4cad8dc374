"""What snaprt logs through Python's logging, and how XLA's variables show it."""

import logging
import re
import threading

import jax.numpy as jnp
import pytest
from jax import lax
from programs import run_program

import snaprt
from snaprt.errors import UsageError

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}: I( +\d+)? (snaprt/\S+\.py):\d+\] (.*)")


def run(shape=(2, 3)):
    @snaprt.lazy()
    def step(x):
        y = lax.exp(x) * 2
        snaprt.mark_step()
        return y

    return step(jnp.ones(shape))


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in (
        *("TF_CPP_MIN_LOG_LEVEL", "TF_CPP_VMODULE", "TF_CPP_LOG_THREAD_ID"),
        *("SNAPRT_LOG_FILE", "RANK"),
    ):
        monkeypatch.delenv(name, raising=False)
    yield
    monkeypatch.undo()
    run()  # the log follows the variables at a cut


def test_without_the_variables_nothing_is_set_up_and_nothing_shown(capsys):
    run()
    assert logging.getLogger("snaprt").handlers == []
    assert logging.getLogger("snaprt").level == logging.WARNING
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("no_persistent_cache")
def test_info_says_when_the_steps_of_a_compilation_begin_and_end(caplog):
    with caplog.at_level(logging.INFO, "snaprt"):
        run((3, 7))
        run((3, 7))
    said = [one.getMessage() for one in caplog.records]
    assert said[0] == "a graph of 2 operations and 1 input: begin"
    assert re.fullmatch(r"graph [0-9a-f]{16}: lowered", said[1])
    assert said[2:4] == ["XLA compiles: begin", "XLA compiles: end"]
    assert re.fullmatch(r"graph [0-9a-f]{16} of 2 operations: compiled in \d+\.\d{3} s", said[4])
    assert len(said) == 5  # the second run compiles nothing


def test_info_says_what_came_from_the_cache(caplog):
    program = (
        "import logging, jax.numpy as jnp, snaprt\n"
        "logging.basicConfig(level=logging.INFO, format='%(name)s %(message)s')\n"
        "logging.getLogger('snaprt').setLevel(logging.INFO)\n"
        "with snaprt.lazy():\n"
        "    x = jnp.arange(11.0) * 3\n"
        "    snaprt.mark_step()\n"
    )
    with caplog.at_level(logging.INFO, "snaprt"):
        exec(program, {})
    assert ": compiled in " in caplog.records[-1].getMessage()
    told = run_program(program).stderr.splitlines()
    last = [line for line in told if line.startswith("snaprt.compile")][-1]
    assert ": from the cache in " in last


def test_debug_has_each_operation_with_its_line(caplog):
    with caplog.at_level(logging.DEBUG, "snaprt.operations"):
        run((5, 3))
    said = [one.getMessage() for one in caplog.records if one.name == "snaprt.operations"]
    assert re.fullmatch(r"graph [0-9a-f]{16} of 2 operations, ended by mark_step", said[0])
    assert any(re.search(r"xla::exp\(%0\), location=run\S*step@test_logs.py:\d+", x) for x in said)


def test_the_least_level_of_zero_shows_the_steps_of_compilations(monkeypatch, capsys):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    run((2, 9))
    lines = [LINE.fullmatch(line) for line in capsys.readouterr().err.splitlines()]
    assert all(lines)
    assert lines[0]
    assert lines[0][2] == "snaprt/compile/program.py"
    assert lines[0][1] is None


def test_a_verbosity_shows_one_module_and_leaves_the_others(monkeypatch, capsys):
    monkeypatch.setenv("TF_CPP_VMODULE", "operations=2,nothing_of_ours=7")
    run((2, 10))
    shown = [LINE.fullmatch(line) for line in capsys.readouterr().err.splitlines()]
    assert {one and one[2] for one in shown} == {"snaprt/explain/nodes.py"}
    monkeypatch.setenv("TF_CPP_VMODULE", "operations=0")
    run((2, 10))
    assert capsys.readouterr().err == ""


def test_names_that_the_guides_teach_are_understood(monkeypatch, capsys):
    monkeypatch.setenv("TF_CPP_VMODULE", "tensor=5,xla_graph_executor=1")
    run((2, 11))
    err = capsys.readouterr().err
    assert "snaprt/explain/nodes.py" in err
    assert "snaprt/compile/program.py" in err


def test_each_execution_is_logged_in_the_words_of_pytorch_xla(monkeypatch, capsys):
    monkeypatch.setenv("TF_CPP_VMODULE", "xla_graph_executor=5")
    run((2, 12))
    run((2, 12))
    lines = [LINE.fullmatch(line) for line in capsys.readouterr().err.splitlines()]
    said = [one[3] for one in lines if one and one[2] == "snaprt/explain/switches.py"]
    assert len(said) == 4  # the second run compiles nothing
    found = re.fullmatch(r"(Executing IR graph hash [0-9a-f]{16} on device CPU:0) \.\.\.", said[0])
    assert found
    assert said[1] == f"{found[1]} done!"
    assert said[2:] == said[:2]


def test_the_log_goes_to_a_file_that_each_rank_has(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("SNAPRT_LOG_FILE", str(tmp_path / "snaprt.log"))
    run((2, 13))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TF_CPP_VMODULE", "operations=2")
    run((2, 13))
    assert capsys.readouterr().err == ""
    compiled = (tmp_path / "snaprt.log").read_text().splitlines()
    assert all(LINE.fullmatch(line) for line in compiled)
    assert "XLA compiles: begin" in compiled[2]
    assert "xla::exp" in (tmp_path / "snaprt.log.3").read_text()


def test_a_log_that_cannot_be_written_is_an_error_that_names_it(monkeypatch, tmp_path):
    monkeypatch.setenv("SNAPRT_LOG_FILE", str(tmp_path / "none" / "snaprt.log"))
    with pytest.raises(UsageError, match=r"none/snaprt\.log"):
        run()


def test_a_log_that_a_full_disk_ends_is_told_of_once(monkeypatch, capsys):
    monkeypatch.setenv("SNAPRT_LOG_FILE", "/dev/full")
    assert run((2, 17)).shape == (2, 17)
    said = capsys.readouterr().err
    assert said.startswith("SNAPRT_LOG_FILE: cannot write to /dev/full: No space left on device.")
    assert len(said.splitlines()) == 1


def test_a_program_of_jax_jit_logs_to_the_file_too(tmp_path):
    program = "import jax; jax.devices(); import logging\n"
    program += "logging.getLogger('snaprt.jit').warning('beware')\n"
    run_program(program, SNAPRT_LOG_FILE=str(tmp_path / "snaprt.log"))
    assert (tmp_path / "snaprt.log").read_text().endswith("] beware\n")


def test_a_line_says_which_thread_wrote_it_where_that_is_asked_for(monkeypatch, capsys):
    monkeypatch.setenv("TF_CPP_VMODULE", "operations=2")
    monkeypatch.setenv("TF_CPP_LOG_THREAD_ID", "1")
    run()
    found = LINE.fullmatch(capsys.readouterr().err.splitlines()[0])
    assert found
    assert int(found[1]) == threading.get_native_id()


def test_warnings_are_shown_once_however_much_else_is(monkeypatch, capsys):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    run()
    capsys.readouterr()
    logging.getLogger("snaprt.cache").warning("beware")
    assert re.fullmatch(r"\S+ \S+: W \S+test_logs\.py:\d+\] beware\n", capsys.readouterr().err)


@pytest.mark.parametrize("text", ["operations", "=3", "operations=many"])
def test_a_verbosity_that_is_none_is_refused(monkeypatch, text):
    monkeypatch.setenv("TF_CPP_VMODULE", text)
    with pytest.raises(UsageError, match="TF_CPP_VMODULE"):
        run()
