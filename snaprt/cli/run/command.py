"""``snaprt run``: runs an unmodified program in this process, as ``python`` would run it.

Laziness, cache and recorder are switched on from outside, through ``snaprt.enable()`` and the
environment variables that the program could have set itself. JAX is the program's to import, when
it has set what JAX is to find.
"""

from __future__ import annotations

import builtins
import gc
import importlib.machinery
import importlib.util
import io
import itertools
import os
import pkgutil
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any, Final

import click

import snaprt
from snaprt import autoload, settings, units
from snaprt.cli import output
from snaprt.cli.run.observers import RunExplained, RunProfiled, checked_steps
from snaprt.errors import SnaprtError, UsageError
from snaprt.fleet.launch import tell_status
from snaprt.host import after_import
from snaprt.host.whole_files import from_root
from snaprt.snapshot.recorder.conditions import parse_conditions

# What python leaves with after an exception that nothing caught.
EXIT_UNCAUGHT: Final = 1


@dataclass(frozen=True)
class PythonProgram:
    """A program that is ready to run."""

    code: CodeType  # its compiled top level
    argument_zero: str  # what it finds in ``sys.argv[0]``
    search_path: str  # what it finds in ``sys.path[0]``
    file: str | None  # what it finds in ``__file__``
    # Its ``__spec__``; None for a script, as under ``python``.
    spec: importlib.machinery.ModuleSpec | None


class ProgramCommand(click.Command):
    """A command that takes a program after its options, as ``program``: a script, or ``-m``.

    Like python, it ends its own options at ``-m``, so that the rest is the program's.
    """

    allow_interspersed_args = False

    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options)
        self.params.append(
            click.Argument(
                ["program"], nargs=-1, type=click.UNPROCESSED, metavar="-- SCRIPT.py [ARGS]..."
            )
        )

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, unless there is no program."""
        if not ctx.params["program"]:
            raise click.UsageError("no program to run", ctx)
        return super().invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words after the command's name."""
        takes_value = {
            name
            for parameter in self.params
            if isinstance(parameter, click.Option) and not parameter.is_flag
            for name in parameter.opts
        }
        position = 0
        while position < len(args) and args[position].startswith("-") and args[position] != "--":
            if args[position] == "-m":
                args = [*args[:position], "--", *args[position:]]
                break
            position += 2 if args[position] in takes_value else 1
        return super().parse_args(ctx, args)


def _checked_duration(
    context: click.Context, option: click.Parameter, text: str | None
) -> str | None:
    """Return a duration as it is written, for it is passed on."""
    try:
        is_allowed = text is None or units.parse_duration(text) > 0
    except ValueError:
        is_allowed = False
    if not is_allowed:
        raise click.BadParameter(
            f"{text!r} is not a duration such as 90s, 5m or 1h", context, option
        )
    return text


@click.command("run", cls=ProgramCommand)
@click.option("--lazy/--no-lazy", default=None, help="Record operations and run them as graphs.")
@click.option(
    "--torch",
    "is_torch",
    is_flag=True,
    help="Run PyTorch code for the device xla on JAX, with snaprt's torch_xla.",
)
@click.option("--cache", type=output.PATH, metavar="DIR", help="Directory of the compile cache.")
@click.option("--dump", type=output.FOLDER, metavar="DIR", help="Record snapshots into DIR.")
@click.option(
    "--record",
    is_flag=True,
    help="Record calls of jax.jit functions in every thread and child process.",
)
@click.option(
    "--when",
    multiple=True,
    metavar="CONDITION",
    help="Record only executions that meet this condition: 'name=train, step=100-200', nan, "
    "error. Repeat to record executions that meet any (see docs/how-to/record.md).",
)
@click.option(
    "--keep-last",
    type=click.IntRange(min=0),
    metavar="N",
    help="Hold the last N executions and write them on a failure or SIGUSR1.",
)
@click.option("--dedupe", is_flag=True, help="Store arrays that several snapshots share once.")
@click.option(
    "--check-ranks",
    is_flag=True,
    help="Check that the processes of a job run the same program before its first run.",
)
@click.option(
    "--watchdog",
    metavar="TIME",
    callback=_checked_duration,
    help="Write the stacks of each process if no execution or step ends for TIME, such as 300s.",
)
@click.option(
    "--metrics",
    type=output.PATH,
    metavar="FILE",
    help="Save the metrics to FILE at exit.",
)
@click.option(
    "--profile",
    type=output.PATH,
    metavar="DIR",
    help="Write a profile for XProf, Perfetto and `snaprt profile` to DIR.",
)
@click.option(
    "--profile-steps",
    metavar="STEPS",
    callback=checked_steps,
    help="Profile only these steps, counted from 0, such as 10-14 (see docs/how-to/profile.md).",
)
@click.option(
    "--explain", is_flag=True, help="Report graph breaks at exit: where, why and how often."
)
@click.option(
    "--explain-json",
    type=output.PATH,
    metavar="FILE",
    help="Write the graph breaks as JSON with a versioned schema.",
)
@click.pass_context
def command(
    context: click.Context,
    lazy: bool | None,
    is_torch: bool,
    cache: Path | None,
    dump: Path | None,
    record: bool,
    when: tuple[str, ...],
    keep_last: int | None,
    dedupe: bool,
    check_ranks: bool,
    watchdog: str | None,
    metrics: Path | None,
    profile: Path | None,
    profile_steps: str | None,
    explain: bool,
    explain_json: Path | None,
    program: tuple[str, ...],
) -> None:
    """Run a Python program under snaprt, unmodified: a script, or a module with -m.

    The program keeps its arguments, exit status and tracebacks. The options set SNAPRT_CACHE_DIR,
    SNAPRT_DUMP_DIR, SNAPRT_RECORD, SNAPRT_RECORD_DEDUPE, SNAPRT_RECORD_KEEP_LAST,
    SNAPRT_CHECK_RANKS, SNAPRT_WATCHDOG and SNAPRT_METRICS_FILE for the program and its child
    processes.

    With --lazy, the main thread runs lazily once the program imports JAX. JAX_... variables and
    XLA_FLAGS that the program sets before that take effect as they do under python.

    With --torch, a PyTorch program finds the device xla and the modules of torch_xla, and runs on
    JAX (docs/how-to/coming-from-pytorch-xla.md). It runs lazily unless --no-lazy is given.

    With --explain, a table at exit shows each line that breaks graphs, why, how often, and what to
    write instead (docs/how-to/compiles-every-step.md).

    With --profile, jax.profiler profiles the run, or the steps that --profile-steps names. A step
    ends at `snaprt.mark_step()`. While the program has marked none, the executions of each of its
    programs count, and the first program to reach a number decides.

    With --record, calls of jax.jit functions are recorded in every thread. --when and --keep-last
    imply --record unless the program runs lazily.

    With SNAPRT_JAX_CACHE=1, jax.jit uses the compile cache.

    \b
    Example:
      snaprt run --lazy --cache ~/.cache/train -- train.py --epochs 3
      snaprt run --lazy --explain -- train.py
      snaprt run --lazy --torch -- train_mnist.py --device xla
      snaprt run --lazy --dump dump -m my_package.train --epochs 3
      snaprt run --lazy --when nan --when "step=100-200, every=10" -- train.py
      snaprt run --record --dump dump --when "name=train_step, first=3" -- train.py
      snaprt run --profile profile --profile-steps 10-14 -- train.py
    """
    is_lazy = is_torch or settings.get("SNAPRT_LAZY") if lazy is None else lazy
    conditions = "; ".join(when) or os.environ.get("SNAPRT_RECORD", "")
    parse_conditions(conditions)  # so that a wrong one is told before the program runs
    variables = {
        "SNAPRT_CACHE_DIR": cache,
        "SNAPRT_CHECK_RANKS": "1" if check_ranks else None,
        "SNAPRT_DUMP_DIR": dump,
        "SNAPRT_METRICS_FILE": metrics,
        "SNAPRT_RECORD": conditions if when else None,
        "SNAPRT_RECORD_DEDUPE": "on" if dedupe else None,
        "SNAPRT_RECORD_KEEP_LAST": keep_last,
        "SNAPRT_WATCHDOG": watchdog,
    }
    os.environ.update({name: str(text) for name, text in variables.items() if text is not None})
    if autoload.is_asked_for():
        after_import.call_after_import("jax", autoload.initialize)
    is_asked_for = record or settings.get("SNAPRT_RECORD_JIT")
    is_recording = is_asked_for or (not is_lazy and (bool(when) or keep_last is not None))
    if is_recording:
        os.environ["SNAPRT_RECORD_JIT"] = "1"  # the processes that the program starts record too
    if is_lazy and conditions:
        after_import.call_after_import("jax", _tell_plan)
    if "MASTER_ADDR" in os.environ:
        after_import.call_after_import("jax", _register_torchrun)
    if is_torch:
        _provide_torch_xla(is_lazy=is_lazy)
    _warn_of_ignored_variables(is_torch)
    explained = RunExplained(shown=explain, file=explain_json)
    profiled = RunProfiled(profile, profile_steps)
    try:
        status = run(program, lazy=is_lazy, recording=is_recording, at_end=explained.program_ended)
    finally:
        profiled.end()
        explained.end()
    tell_status(status)
    context.exit(status)


#: Variables of PyTorch/XLA and PyTorch NeuronX that do nothing here, and what does it instead.
_IGNORED: Final = {
    "NEURON_CC_FLAGS": "set XLA_FLAGS",
    "NEURON_COMPILE_CACHE_URL": "set SNAPRT_CACHE_DIR or SNAPRT_CACHE_REMOTE",
    "NEURON_EXTRACT_GRAPHS_ONLY": "use `snaprt cache collect`",
    "NEURON_FUSE_SOFTMAX": "XLA decides what it fuses",
    "PJRT_DEVICE": "set JAX_PLATFORMS",
    "XLA_PERSISTENT_CACHE_PATH": "set SNAPRT_CACHE_DIR",
    "XLA_USE_SPMD": "use JAX's shardings",
}


def _warn_of_ignored_variables(is_torch: bool) -> None:
    for name in filter(os.environ.get, _IGNORED):
        if name.startswith("NEURON_"):
            is_read = importlib.util.find_spec("libneuronxla") is not None  # it reads its own
        else:
            is_read = is_torch and name == "PJRT_DEVICE"
        if not is_read:
            output.log.print(f"snaprt: warning: {name} is ignored; {_IGNORED[name]}")


def _provide_torch_xla(*, is_lazy: bool) -> None:
    from snaprt.torch import xla_imports

    xla_imports.provide(is_lazy=is_lazy)
    version = xla_imports.installed_version()
    if version is not None:
        output.log.print(
            f"snaprt: torch_xla is snaprt.torch.xla here, not the installed torch_xla {version}"
        )


def _tell_plan() -> None:
    from snaprt import jaxapi
    from snaprt.snapshot.recorder.ranks.sharing import tell_plan

    jaxapi.when_job_is_joined(tell_plan)


def _register_torchrun() -> None:
    from snaprt import jaxapi

    jaxapi.register_torchrun()


def run(
    words: Sequence[str],
    *,
    lazy: bool,
    recording: bool = False,
    at_end: Callable[[], None] = lambda: None,
) -> int:
    """Run a program as ``__main__`` of this process and return its exit status.

    Args:
        words: Its file (or a directory or zip file with a ``__main__.py``) or ``-m`` and a
            module's name, then its arguments.
        lazy: Whether its JAX operations are recorded and run as graphs.
        recording: Whether its calls of jitted functions are recorded.
        at_end: Called when it has ended, before what it left pending runs.

    Raises:
        UsageError: There is no such program, or nothing can run so under the environment.
        SnaprtError: It had ended, and what it had recorded and not yet run failed.
    """
    _check_environment()
    after_import.call_after_import("snaprt.jaxapi", _hider_of_own_frames())
    if words[0] == "-m":
        if len(words) == 1:
            raise UsageError("-m needs the name of a module", hint="snaprt run -m my_package.train")
        name, arguments = words[1], words[2:]
        # While the module is looked for, its packages are imported: they see what python shows.
        _enter("-m", _search_path_of_modules(), arguments)
        try:
            program = _find_module(name)
        except UsageError:
            raise
        except BaseException as error:
            return _leave_with(error)
    else:
        name, arguments = words[0], words[1:]
        try:
            program = _find_script(name)
        except SyntaxError as error:
            return _leave_with(error)
    _enter(program.argument_zero, program.search_path, arguments)
    return _execute(program, lazy=lazy, recording=recording, at_end=at_end)


# How variables that name files are named on the command line, too.
_OPTIONS: Final = {"SNAPRT_METRICS_FILE": "--metrics", "SNAPRT_DUMP_DIR": "--dump"}


def _check_environment() -> None:
    """Look at every setting before a program runs: files are written when a long run is over.

    What they name is made absolute.

    Raises:
        UsageError: One has a value that is not allowed, or names what cannot be written.
    """
    for name, (path, kind) in settings.places_written().items():
        named_by = f"{_OPTIONS[name]} or {name}" if name in _OPTIONS else name
        absolute = from_root(path)
        os.environ[name] = str(absolute)  # the program may change its directory
        if name == "SNAPRT_CACHE_DIR":  # one that cannot be used costs a warning, not the run
            continue
        written = settings.for_rank(absolute) if kind == "file" else absolute
        try:
            output.refuse_unwritable(written, kind, named_by)
        except UsageError:
            del os.environ[name]  # or the end of the process would try it, and say so again
            raise


def _hider_of_own_frames() -> Callable[[], None]:
    """Return what keeps our frames out of the program's stacks, to be called when JAX is there.

    A snapshot says which lines made a module. Of the frames below the program's first one, the user
    wrote none: the script ``snaprt`` (or runpy), click, and this package. To be called itself while
    ``__main__`` is still the command line's.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)
    hidden = [Path(__file__).parents[1], Path(after_import.__file__), Path(click.__file__).parent]
    hidden += [Path("<frozen runpy>"), Path(snaprt.__file__).with_name("__main__.py")]
    hidden += [Path(script)] if script else []

    def hide() -> None:
        from snaprt import jaxapi

        for path in hidden:
            jaxapi.hide_frames_below(path)

    return hide


def _enter(argument_zero: str, search_path: str, arguments: Sequence[str]) -> None:
    sys.argv = [argument_zero, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = search_path


def _find_script(name: str) -> PythonProgram:
    path = os.path.abspath(name)
    if not os.path.exists(path):
        raise UsageError(
            f"no such program: {name}",
            hint="Name a Python file, or a module with -m; options of snaprt come before it.",
        )
    importer: Any = pkgutil.get_importer(path)
    if importer is not None:  # A directory or a zip file.
        spec = importer.find_spec("__main__")
        if spec is None:
            raise UsageError(
                f"{name} has no __main__.py", hint="Name a Python file, or a module with -m."
            )
        return PythonProgram(spec.loader.get_code("__main__"), name, path, spec.origin, spec)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror or error}") from error
    # Our own __future__ imports stay ours.
    code = compile(source, path, "exec", dont_inherit=True)
    return PythonProgram(code, name, os.path.dirname(os.path.realpath(path)), path, None)


def _find_module(name: str) -> PythonProgram:
    spec = _find_spec(name)
    if spec.submodule_search_locations is not None:
        spec = _find_spec(f"{name}.__main__")
    loader: Any = spec.loader
    code = loader.get_code(spec.name) if hasattr(loader, "get_code") else None
    if code is None:
        raise UsageError(f"the module {name} has no Python code to run")
    return PythonProgram(
        code, spec.origin or spec.name, _search_path_of_modules(), spec.origin, spec
    )


def _search_path_of_modules() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed; python runs the modules that are elsewhere
        return ""


def _find_spec(name: str) -> importlib.machinery.ModuleSpec:
    spec = None
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # A package on the way to it may be missing, or may itself fail to import something.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
    except ValueError:  # A module without a spec, such as __main__.
        pass
    if spec is None:
        hint = "Modules are searched for as `import` does, starting in the current directory."
        if name.endswith(".__main__"):
            hint = (
                "A package runs through its __main__.py; it has none, so name a module inside it."
            )
        raise UsageError(f"no module {name}", hint=hint)
    return spec


def _execute(
    program: PythonProgram, *, lazy: bool, recording: bool, at_end: Callable[[], None]
) -> int:
    module = ModuleType("__main__")
    module.__dict__.update(
        __builtins__=builtins,
        __file__=program.file,
        __cached__=None,
        __spec__=program.spec,
        __package__=program.spec.parent if program.spec is not None else None,
        __loader__=program.spec.loader if program.spec is not None else None,
    )
    if sys.version_info < (3, 14):
        module.__annotations__ = {}  # as Python begins a program
    # It stays there: threads, exit handlers, pickle and child processes look for it later.
    sys.modules["__main__"] = module
    laziness = _Laziness()
    recorder = _Recording()
    ended_by: BaseException | None = None
    try:
        if recording:
            after_import.call_after_import("jax", recorder.begin)
        if lazy:
            after_import.call_after_import("jax", laziness.begin)
        after_import.call_after_import("jax", _keep_imported)
        exec(program.code, module.__dict__)
    except BaseException as error:
        ended_by = error
    if isinstance(ended_by, SnaprtError) and ended_by in (
        laziness.refused_with,
        recorder.refused_with,
    ):
        raise ended_by
    at_end()
    try:
        laziness.end(run_pending=not isinstance(ended_by, KeyboardInterrupt))
    except BaseException as error:
        # Where the program has an error of its own, that is what it ends with.
        if ended_by is None or isinstance(ended_by, SystemExit):
            if isinstance(error, SnaprtError):
                raise
            ended_by = error
    return output.EXIT_OK if ended_by is None else _leave_with(ended_by)


def _keep_imported() -> None:
    """Move all objects out of the garbage collector's sight: modules, which stay to the end.

    No collection visits them again, the one at Python's exit included. Objects of the program must
    not stay with them, so this is only for a program that imports JAX at its top level; one that
    imports it from a function may have made any number of objects by then.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "__main__":
        name = frame.f_code.co_filename
        is_import = name == importlib.__file__ or _is_machinery(name)
        if frame.f_code.co_name != "<module>" and not is_import:
            return
        frame = frame.f_back
    if frame is not None and frame.f_code.co_name == "<module>":
        gc.freeze()


class _Recording:
    """Whether the process records calls of jitted functions, and the error if it could not."""

    def __init__(self) -> None:
        self.refused_with: SnaprtError | None = None

    def begin(self) -> None:
        """Record from here on, in every thread; to be called when JAX is there."""
        try:
            from snaprt.runtime.jit import record_process

            record_process()
        except SnaprtError as error:
            self.refused_with = error
            raise


class _Laziness:
    """Whether the thread that made this runs lazily, and the error if it could not begin to."""

    def __init__(self) -> None:
        self.refused_with: SnaprtError | None = None
        self._has_begun = False
        self._thread = threading.get_ident()

    def begin(self) -> None:
        """Make the thread lazy; to be called when JAX is there."""
        if threading.get_ident() != self._thread:
            output.log.print(
                "snaprt: the program runs eagerly because another thread imported jax first; "
                "import it in the main thread before"
            )
            return
        try:
            snaprt.enable()
        except SnaprtError as error:
            self.refused_with = error
            raise
        self._has_begun = True

    def end(self, *, run_pending: bool) -> None:
        """Make the thread eager again, and run what eager JAX would have run by now."""
        if not self._has_begun:
            return
        try:
            if run_pending:
                snaprt.mark_step(wait=True)
        finally:
            snaprt.disable()


def _leave_with(error: BaseException) -> int:
    """Say what python would say when ``error`` ends the program, and return its exit status."""
    if isinstance(error, SystemExit):
        if error.code is None:
            return output.EXIT_OK
        if isinstance(error.code, int):
            return error.code
        print(error.code, file=sys.stderr)
        return EXIT_UNCAUGHT
    traceback = _of_program(error.__traceback__)
    try:
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
    except Exception as failure:  # python says so in these words
        print("Error in sys.excepthook:", file=sys.stderr)
        _show(failure, _of_program(failure.__traceback__))
        print("\nOriginal exception was:", file=sys.stderr)
        _show(error, traceback)
    return output.EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_UNCAUGHT


def _show(error: BaseException, traceback: TracebackType | None) -> None:
    sys.__excepthook__(type(error), error.with_traceback(traceback), traceback)


_OURS: Final = (__file__, after_import.__file__)


def _of_program(traceback: TracebackType | None) -> TracebackType | None:
    """Return the traceback without our frames and those of the import system around them."""
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    remaining: list[TracebackType] = []
    for is_machinery, group in itertools.groupby(entries, lambda e: _is_machinery(_filename(e))):
        frames = list(group)
        if not is_machinery or not any(_filename(entry) in _OURS for entry in frames):
            remaining += frames
    for entry, following in itertools.zip_longest(remaining, remaining[1:]):
        entry.tb_next = following
    return remaining[0] if remaining else None


def _is_machinery(name: str) -> bool:
    return name in (*_OURS, importlib.util.__file__) or name.startswith("<frozen importlib")


def _filename(entry: TracebackType) -> str:
    return entry.tb_frame.f_code.co_filename
