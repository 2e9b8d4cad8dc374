"""The user's frames: of a stack, an operation, an error; and errors that leave JAX."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, Final, NamedTuple

from jax._src import config as _config
from jax._src import core as _core
from jax._src import source_info_util as _source_info
from jax._src import traceback_util as _traceback_util
from jax._src.api_util import InternalFloatingPointError as _InternalFloatingPointError


class Frame(NamedTuple):
    """A place in the user's program: its file, line (from 1) and function."""

    file: str
    line: int
    function: str


def hide_traceback_below(folder: Path) -> None:
    """Leave code below ``folder`` out of the tracebacks of errors, as JAX leaves out its own."""
    _traceback_util.register_exclusion(str(folder))


def hide_frames_below(folder: Path) -> None:
    """Leave code below ``folder`` out of what JAX takes for the user's frames."""
    _source_info.register_exclusion(str(folder))


@functools.cache
def hide_own_frames() -> None:
    """Let stacks and tracebacks show the user's lines, and none of the library's."""
    library = Path(__file__).parents[1]
    for part in ("compile", "explain", "fleet", "graph", "jaxapi", "runtime", "snapshot", "trace"):
        hide_frames_below(library / part)
        hide_traceback_below(library / part)


def user_frames() -> tuple[Frame, ...]:
    """Return the user's frames of this thread as they are now, outermost first."""
    frames = [
        Frame(frame.f_code.co_filename, line, frame.f_code.co_qualname)
        for frame, line in traceback.walk_stack(sys._getframe(1))
        if _source_info.is_user_filename(frame.f_code.co_filename)
    ]
    return tuple(reversed(frames))


def user_code_names(words: frozenset[str], shared: frozenset[str]) -> bool:
    """Return whether a function of the user's that this thread is in uses one of these names.

    What is defined inside of it counts, so for a script everything in its file does.

    Args:
        words: Names that nothing but this library has.
        shared: Names that may be of something else: they count only where they may be this one's.
    """
    return any(
        word in words or _may_be_own(frame, word)
        for frame, _ in traceback.walk_stack(sys._getframe(1))
        if _source_info.is_user_filename(frame.f_code.co_filename)
        for word in _names_within(frame.f_code, words | shared)
    )


@functools.lru_cache(maxsize=4096)
def _names_within(code: CodeType, words: frozenset[str]) -> frozenset[str]:
    """Return those of some names that are used inside."""
    return words.intersection(code.co_names).union(
        *(_names_within(inner, words) for inner in _within(code))
    )


def _may_be_own(frame: FrameType, word: str) -> bool:
    """Return whether a name that a frame's code uses is of this library, or of a module of it."""
    variables = {**frame.f_globals, **frame.f_locals}
    if word in variables:
        return _is_own(getattr(variables[word], "__module__", None))
    return not _defines(frame.f_code, word) and any(
        isinstance(value, ModuleType) and _is_own(value.__name__) for value in variables.values()
    )


def _is_own(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] == __name__.partition(".")[0]


@functools.lru_cache(maxsize=4096)
def _defines(code: CodeType, word: str) -> bool:
    """Return whether a function or class of that name, as a method, is defined inside."""
    return any(inner.co_name == word or _defines(inner, word) for inner in _within(code))


def _within(code: CodeType) -> Iterator[CodeType]:
    return (inner for inner in code.co_consts if isinstance(inner, CodeType))


def all_frames() -> tuple[Frame, ...]:
    """Return all frames of this thread as they are now, JAX's too, outermost first."""
    stack = traceback.walk_stack(sys._getframe(1))
    frames = [Frame(at.f_code.co_filename, line, at.f_code.co_qualname) for at, line in stack]
    return tuple(reversed(frames))


def user_variables() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the file and the variables of each of the user's frames now, innermost first.

    The variables are the local ones, and those of the module that the frame's code names.

    """
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        code = frame.f_code
        if _source_info.is_user_filename(code.co_filename):
            local, outer = dict(frame.f_locals), frame.f_globals
            module_variables = {name: outer[name] for name in code.co_names if name in outer}
            yield code.co_filename, {**module_variables, **local}


def user_stack(error: BaseException) -> tuple[str, ...]:
    """Return ``file:line (function)`` of the user's frames to an error, outermost first."""
    return tuple(
        f"{frame.f_code.co_filename}:{line} ({frame.f_code.co_qualname})"
        for frame, line in frames_to(error)
        if _source_info.is_user_filename(frame.f_code.co_filename)
    )


def frames_to(error: BaseException) -> list[tuple[FrameType, int]]:
    """Return the frames on the way to an error, those it has not come to included."""
    first = error.__traceback__
    if first is None:
        return []
    outer = list(traceback.walk_stack(first.tb_frame.f_back))[::-1]
    return [*outer, *traceback.walk_tb(first)]


_INSTALLED: Final = tuple(
    f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib")
)


def is_installed(file: str) -> bool:
    """Return whether a file belongs to Python or to an installed package."""
    return file.startswith(_INSTALLED)


def users_place(stack: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame that is not in an installed package, else the innermost."""
    own = [frame for frame in stack if not is_installed(frame.file)]
    return own[-1] if own else stack[-1] if stack else None


def place_text(frame: Frame | None) -> str:
    """Return a place as in ``train.py:41 in step``; below the current directory without that."""
    if frame is None:
        return "(not in your program)"
    return f"{_below_here(frame.file)}:{frame.line} in {frame.function}"


def _below_here(file: str) -> str:
    try:
        return file.removeprefix(os.path.join(os.getcwd(), ""))
    except OSError:  # the program has removed its current directory
        return file


def source_info() -> Any:
    """Return the Python traceback and the name stack of the operation being bound."""
    return _source_info.current()


def frames_of_operation(source: Any) -> tuple[Frame, ...]:
    """Return the user's frames of an operation, of its `source_info`, outermost first."""
    frames = [
        Frame(frame.file_name, frame.start_line, frame.function_name)
        for frame in _source_info.user_frames(source.traceback)
    ]
    return tuple(reversed(frames))


def place_of_operation(source: Any) -> tuple[Any, ...]:
    """Return where an operation stands, of its `source_info`; equal for equal places."""
    return (*frames_of_operation(source), str(source.name_stack))


def leave_name_scopes() -> None:
    """Forget this thread's names of `jax.named_scope`; each scope restores its outer's."""
    context = _source_info._source_info_context.context
    if context.name_stack.stack:
        _source_info._source_info_context.context = context.replace(
            name_stack=_source_info.NameStack()
        )


def whole_stacks() -> AbstractContextManager[Any]:
    """Return a context in which modules are lowered with the whole stack at each operation.

    Checked with jax 0.10.2 and 0.12.0; by default it ends after 100 frames.
    """
    stack = contextlib.ExitStack()
    stack.enter_context(_config.include_full_tracebacks_in_locations(True))
    stack.enter_context(_config.traceback_in_locations_limit(-1))
    return stack


@dataclass(frozen=True)
class BoundOperation:
    """A primitive with what it was bound to."""

    primitive: Any
    operands: Sequence[Any]
    params: Mapping[str, Any]


_watch_errors_lock = threading.Lock()
_watched_errors: list[Callable[[BaseException], None]] = []


def watch_errors(watcher: Callable[[BaseException], None]) -> None:
    """Call ``watcher`` with each error that leaves JAX, before JAX cuts its traceback down.

    Checked with jax 0.10.2 and 0.12.0: ``filter_traceback`` is called by the outermost of JAX's own
    functions that an error passes, unless JAX_TRACEBACK_FILTERING is ``off`` or ``tracebackhide``.
    """
    with _watch_errors_lock:
        if watcher in _watched_errors:
            return
        _watched_errors.append(watcher)
        if len(_watched_errors) > 1:
            return
        original = _traceback_util.filter_traceback

        @functools.wraps(original)
        def filter_traceback(tb: Any) -> Any:
            error = sys.exc_info()[1]
            if error is not None and error.__traceback__ is tb:
                for callback in _watched_errors:
                    callback(error)
            return original(tb)

        _traceback_util.filter_traceback = filter_traceback


def failed_operation(error: BaseException) -> BoundOperation | None:
    """Return the innermost primitive that was being bound when an error was raised."""
    frame = None
    at = error.__traceback__
    while at is not None:
        if at.tb_frame.f_code is _core.Primitive.bind_with_trace.__code__:
            frame = at.tb_frame
        at = at.tb_next
    if frame is None:
        return None
    names = frame.f_locals
    return BoundOperation(names["self"], tuple(names["args"]), dict(names["params"]))


def forbidden_value(error: BaseException) -> str | None:
    """Return ``nan`` or ``inf`` where an error says that JAX's settings forbid such a value."""
    return error.args[1] if isinstance(error, _InternalFloatingPointError) else None


def raised_inside(error: BaseException) -> bool:
    """Return whether JAX's own code raised an error, not what the user wrote."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").partition(".")[0] == "jax"
