import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from programs import SNAPRT, finish, run_program, start_program
from rich.console import Console

from snaprt import metrics, settings
from snaprt.cli import main as cli
from snaprt.cli import output, progress
from snaprt.errors import SnaprtError

SNAPSHOTS = Path(__file__).parents[1] / "support" / "snapshots"


@dataclass(frozen=True)
class Shown:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def snaprt(capsys: pytest.CaptureFixture[str]) -> Callable[..., Shown]:
    """The command line, run in this process."""

    def run(*words: str | Path) -> Shown:
        status = cli.main([str(word) for word in words])
        return Shown(status, *capsys.readouterr())

    return run


def add_command(monkeypatch: pytest.MonkeyPatch, function) -> None:
    """Give the command line one command more, ``extra``, that calls ``function``."""
    module = type(sys)("a_module_with_a_command")
    module.command = click.command("extra")(function)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    entry = cli._Entry(f"{module.__name__}:command", "For this test.")
    monkeypatch.setattr(cli, "COMMANDS", {**cli.COMMANDS, "extra": entry})
    monkeypatch.setitem(cli.group._table, "extra", (entry.where, entry.summary))


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_with_an_example(name):
    command = cli.group.get_command(click.Context(cli.group), name)
    shown = CliRunner().invoke(command, ["--help"])
    assert shown.exit_code == 0
    assert "Example:" in shown.output
    assert command.name == name


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_option_of_every_command_has_help(name):
    command = cli.group.get_command(click.Context(cli.group), name)
    commands = [command, *getattr(command, "commands", {}).values()]
    for one in commands:
        assert one.help
        for parameter in one.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{one.name} {parameter.name}"


def test_the_help_lists_every_command(snaprt):
    shown = snaprt("--help")
    assert shown.returncode == output.EXIT_OK
    for name in ("demo", "run", "replay", "inspect", "cache", "metrics", "doctor"):
        assert f"\n  {name} " in shown.stdout


def test_help_on_a_command_is_what_its_help_option_prints(snaprt):
    assert snaprt("help", "metrics").stdout == snaprt("metrics", "--help").stdout
    assert snaprt("help", "cache", "stats").stdout == snaprt("cache", "stats", "--help").stdout


def test_help_environment_shows_every_setting(snaprt):
    shown = snaprt("help", "environment").stdout
    for row in settings.SETTINGS:
        assert row.name in shown
        assert row.help in shown


def test_help_environment_as_json_says_what_is_set(snaprt, monkeypatch):
    monkeypatch.setenv("SNAPRT_CACHE", "off")
    shown = json.loads(snaprt("help", "environment", "--json").stdout)
    assert (shown["schema"], shown["version"]) == ("snaprt.environment", 1)
    assert {row["name"]: row["set_to"] for row in shown["variables"]}["SNAPRT_CACHE"] == "off"


@pytest.mark.parametrize(
    "words",
    [("nonsense",), ("metrics",), ("metrics", "--nonsense"), ("help", "nonsense"), ("run",)],
)
def test_misuse_is_an_error_with_a_hint_and_status_2(snaprt, words):
    done = snaprt(*words)
    assert done.returncode == output.EXIT_FAILURE
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "\n\nhint: See `snaprt" in done.stderr


@pytest.mark.parametrize("words", [(), ("cache",)], ids=" ".join)
def test_without_a_command_the_help_is_printed(snaprt, words):
    done = snaprt(*words)
    assert done == Shown(output.EXIT_OK, snaprt(*words, "--help").stdout, "")
    assert "Commands:" in done.stdout


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("replya", "x.snap"), "replay"),
        (("cache", "sttas"), "stats"),
        (("help", "enviroment"), "environment"),
        (("help", "cache", "stast"), "stats"),
        (("replay", "--comple-only", "x.snap"), "--compile-only"),
    ],
)
def test_a_mistyped_word_is_guessed(snaprt, words, meant):
    done = snaprt(*words)
    assert done.returncode == output.EXIT_FAILURE
    assert f"Did you mean '{meant}'?" in done.stderr


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_command_at_work_shows_a_line_on_a_terminal_only(monkeypatch, is_terminal):
    shown = io.StringIO()
    monkeypatch.setattr(progress, "AFTER_SECONDS", 0.0)
    monkeypatch.setattr(output, "log", Console(file=shown, force_terminal=is_terminal, width=80))
    with progress.showing("packing") as line:
        line.done(3, 7)
        deadline = time.monotonic() + 120
        while is_terminal and "packing: 3 of 7" not in shown.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert is_terminal or shown.getvalue() == ""


def test_a_command_that_is_soon_done_shows_no_line(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(output, "log", Console(file=shown, force_terminal=True))
    with progress.showing("packing"):
        pass
    assert shown.getvalue() == ""


def test_an_error_of_ours_is_printed_as_error_and_hint_without_traceback(monkeypatch, capsys):
    def extra() -> None:
        raise SnaprtError("the [file] is torn", hint="Make another.")

    add_command(monkeypatch, extra)
    assert cli.main(["extra"]) == output.EXIT_FAILURE
    assert capsys.readouterr() == ("", "error: the [file] is torn\n\nhint: Make another.\n")


def test_an_unexpected_exception_shows_its_traceback_and_that_it_is_our_bug(monkeypatch, capsys):
    def extra() -> None:
        raise ZeroDivisionError("by accident")

    add_command(monkeypatch, extra)
    assert cli.main(["extra"]) == output.EXIT_FAILURE
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "ZeroDivisionError: by accident" in shown
    assert "bug in snaprt" in shown


def test_a_command_leaves_with_the_status_it_gives(monkeypatch):
    @click.pass_context
    def extra(context: click.Context) -> None:
        context.exit(output.EXIT_MISMATCH)

    add_command(monkeypatch, extra)
    assert cli.main(["extra"]) == output.EXIT_MISMATCH


def test_an_interrupt_leaves_with_130_and_no_traceback(monkeypatch, capsys):
    def extra() -> None:
        raise KeyboardInterrupt

    add_command(monkeypatch, extra)
    assert cli.main(["extra"]) == output.EXIT_INTERRUPTED
    assert "Traceback" not in capsys.readouterr().err


def test_a_question_answered_with_no_is_a_failure(monkeypatch, capsys):
    def extra() -> None:
        raise click.Abort

    add_command(monkeypatch, extra)
    assert cli.main(["extra"]) == output.EXIT_FAILURE
    assert capsys.readouterr().err.startswith("error: ")


def test_a_reader_that_goes_away_early_is_no_error(tmp_path: Path):
    for number in range(20_000):
        metrics.counter_add(f"Counter{number}")
    try:
        metrics.save(tmp_path / "run.json")
    finally:
        metrics.clear_all()
    words = (*SNAPRT, "metrics", str(tmp_path / "run.json"))
    with start_program(words, without=("PYTHONUNBUFFERED",)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == output.EXIT_BROKEN_PIPE


@pytest.mark.parametrize("columns", ["0", "wide"])
@pytest.mark.parametrize("terminal", [{}, {"FORCE_COLOR": 1, "TERM": "xterm"}])
def test_columns_that_are_no_width_hide_nothing(columns: str, terminal):
    code = "from snaprt.cli import output; output.error('what'); output.console.print('x' * 70)"
    done = run_program(code, COLUMNS=columns, **terminal)
    assert done.stdout == "x" * 70 + "\n"
    assert "what" in done.stderr


def test_colors_are_off_where_no_color_is_set():
    code = (
        "from snaprt.cli import output; output.error('what'); "
        "output.console.print('x', style='red')"
    )
    colors = {}
    for no_color in ("", "1"):
        done = run_program(code, FORCE_COLOR=1, TERM="xterm", NO_COLOR=no_color)
        colors[no_color] = "\x1b[31m" in done.stdout, "31m" in done.stderr
    assert colors == {"": (True, True), "1": (False, False)}


@pytest.mark.parametrize(
    "words",
    [("--help",), ("metrics", "nope.json"), ("cache", "stats"), ("run", "x.py"), ("help", "run")],
)
def test_what_needs_no_jax_does_not_import_it(tmp_path: Path, words):
    (tmp_path / "x.py").write_text("")
    code = (
        "import sys; from snaprt.cli.main import main; main(sys.argv[1:]); "
        "print({'jax', 'jaxlib', 'numpy'} & set(sys.modules), file=sys.stderr)"
    )
    done = run_program(code, *words, folder=tmp_path, SNAPRT_CACHE_DIR=tmp_path)
    assert done.stderr.endswith("set()\n")


def test_snapshots_are_listed_without_jax():
    code = (
        "import sys; from snaprt.cli.main import main; main(sys.argv[1:]); "
        "print({'jax', 'jaxlib'} & set(sys.modules), file=sys.stderr)"
    )
    done = run_program(code, "ls", SNAPSHOTS)
    assert "lazy_graph" in done.stdout
    assert done.stderr.endswith("set()\n")


@pytest.mark.parametrize("words", [("replay", "m.mlir"), ("inspect", "--hlo", "m.mlir")])
def test_a_flag_that_xla_does_not_know_is_said_before_xla_ends_the_process(tmp_path: Path, words):
    (tmp_path / "m.mlir").write_text("module { func.func public @main() { return } }")
    done = run_program(
        (*SNAPRT, *words), folder=tmp_path, status=output.EXIT_FAILURE, XLA_FLAGS="--xla_nope=1"
    )
    assert done.stderr.startswith("error: XLA does not know --xla_nope in XLA_FLAGS\n\nhint: ")


def test_the_version_is_printed(snaprt):
    done = snaprt("--version")
    assert done.stdout.startswith("snaprt 0.")


def test_numbers_that_json_does_not_have_become_words(capsys):
    output.emit_json(
        "snaprt.test", {"a": (float("nan"), float("inf"), -float("inf")), "b": Path("x")}
    )
    assert json.loads(capsys.readouterr().out) == {
        "schema": "snaprt.test",
        "version": 1,
        "a": ["NaN", "Infinity", "-Infinity"],
        "b": "x",
    }


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_bytes_of_names_that_are_not_utf_8_are_printed_in_every_locale(
    monkeypatch: pytest.MonkeyPatch, encoding: str
):
    path = Path(os.fsdecode(b"caf\xe9/\xc3\xa9"))
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding, errors="strict"))
    output.emit_json("snaprt.test", {"a": path, "b": "\ud800 é"})
    told = json.loads(printed.getvalue().decode("utf-8"))
    assert (told["a"], told["b"]) == (str(path), "\ud800 é")
    printed.truncate(0)
    printed.seek(0)
    output.print_line(path)
    assert printed.getvalue() == b"caf\xe9/\xc3\xa9\n"
    output.console.print(str(path))
    assert rb"caf\udce9" in printed.getvalue()


def test_json_is_printed_where_stdout_takes_text_alone(monkeypatch: pytest.MonkeyPatch):
    printed = io.StringIO()
    monkeypatch.setattr(sys, "stdout", printed)
    output.print_json({"a": "caf\udce9"})
    assert json.loads(printed.getvalue()) == {"a": "caf\udce9"}


def test_errors_show_what_a_terminal_would_obey(capsys):
    output.error("no \x1b[31m", "not \u202e")
    assert capsys.readouterr().err == "error: no \\x1b[31m\n\nhint: not \\u202e\n"


def test_saved_metrics_are_shown_as_the_report_and_as_json(snaprt, tmp_path: Path):
    path = tmp_path / "run.json"
    metrics.clear_all()
    metrics.counter_add("MarkStep", 2)
    metrics.counter_add("Rare")
    metrics.metric_add("CompileTime", 1_500_000)
    report = metrics.metrics_report()
    metrics.save(path)
    metrics.clear_all()
    assert snaprt("metrics", path).stdout == report
    assert "Rare" not in snaprt("metrics", "--short", path).stdout
    shown = json.loads(snaprt("metrics", "--json", path).stdout)
    assert (shown["schema"], shown["version"]) == ("snaprt.metrics", 1)
    assert shown["counters"] == {"MarkStep": 2, "Rare": 1}


def test_a_foreign_file_given_to_metrics_is_named(snaprt, tmp_path: Path):
    path = tmp_path / "notes.json"
    path.write_text("{}")
    done = snaprt("metrics", path)
    assert done.returncode == output.EXIT_FAILURE
    assert str(path) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_ctrl_c_reaches_the_program_as_under_python(tmp_path: Path):
    script = tmp_path / "sleeps.py"
    script.write_text("import time; print('ready', flush=True); time.sleep(30)")
    process = start_program((*SNAPRT, "run", str(script)))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    shown = finish(process, status=output.EXIT_INTERRUPTED).stderr
    assert "KeyboardInterrupt" in shown
    assert "click" not in shown


_INTERRUPTED_IMPORT = """
import os, signal, sys
from snaprt.__main__ import main

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == interrupted:
            try:
                os.kill(os.getpid(), signal.SIGINT)
                sys.intern(name)
            except KeyboardInterrupt:
                print("raised")
                raise

interrupted = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupts())
main()
print("went on")
"""


@pytest.mark.parametrize(
    ("words", "module"),
    [
        (["replay"], "jax"),
        (["report"], "jax"),
        (["cache", "warm", "--target", "cpu"], "jax"),
        (["doctor"], "jax"),
        (["ls"], "click"),
    ],
)
def test_ctrl_c_raises_nothing_inside_the_modules_that_a_command_imports(words, module):
    file = [] if words == ["doctor"] else [SNAPSHOTS / "format-1.0.inputs.snap"]
    done = run_program(_INTERRUPTED_IMPORT, module, *words, *file, status=output.EXIT_INTERRUPTED)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(
    ("words", "closing", "shown"),
    [
        (("help", "environment"), ">&-", ""),
        (("replay", "-j", "1", SNAPSHOTS / "format-1.0.inputs.snap"), "<&- 2>&-", "MATCH"),
    ],
)
def test_closed_standard_streams_are_no_errors_and_no_numbers_of_other_files(words, closing, shown):
    command = shlex.join(map(str, (sys.executable, *SNAPRT, *words)))
    done = subprocess.run(f"{command} {closing}", shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert shown in done.stdout


def test_a_disk_that_is_full_for_the_output_is_one_error():
    command = shlex.join((sys.executable, *SNAPRT, "help"))
    done = subprocess.run(
        f"unset PYTHONUNBUFFERED; {command} >/dev/full", shell=True, capture_output=True, text=True
    )
    assert done.returncode == output.EXIT_FAILURE
    assert done.stderr.splitlines() == [
        *("error: No space left on device", "", "hint: Free some space, or use another directory."),
    ]


def test_a_disk_that_is_full_for_remarks_changes_no_status(tmp_path: Path):
    (tmp_path / "train.py").write_text("import sys; print('trained'); sys.exit(3)")
    for words in ("run", "--lazy", "--explain"), ("launch", "-n", "2"):
        command = shlex.join((sys.executable, *SNAPRT, *words, "--", str(tmp_path / "train.py")))
        for unset in "", "unset PYTHONUNBUFFERED; ":
            done = subprocess.run(
                f"{unset}{command} 2>/dev/full", shell=True, capture_output=True, text=True
            )
            assert done.returncode == 3
            assert "trained\n" in done.stdout
