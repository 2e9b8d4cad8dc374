"""Which executions of this process are under way, and when one ended last; it records nothing.

For the watchdog and for the state that each rank of a job writes. Off, it costs a comparison for
each execution. On, it remembers each execution and asks one of its outputs, now and then, whether
it is there. A small output is held until then, a large one weakly, so that no memory of the
program's stays in use.
"""

from __future__ import annotations

import operator
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import jax

from snaprt import jaxapi
from snaprt.snapshot.recorder.pending import RecordedExecutable, is_there_or_gone
from snaprt.snapshot.recorder.writer import afresh_in_children

LAST: Final = 16
"""How many of the last executions are remembered, whether they have ended or not."""

_HELD_BYTES: Final = 1 << 16  # an output of so many bytes is held until it is there
_MANY: Final = 64  # executions under way: the program itself asks which have ended
_EVERY: Final = 16  # executions of a program, between two times that it asks
_MOST: Final = 1024  # executions under way that are remembered

Find = Callable[[Any], Any]
"""Finds an output in what an execution returned."""


class Running:
    """One execution.

    Attributes:
        executable: What runs.
        execution: How many executions of it came before.
        step: How many steps its thread had marked before.
        began: `time.time()` when it began.
        phase: ``called`` until its call returns, then ``dispatched``, ``ended`` or ``failed``.
    """

    __slots__ = ("began", "executable", "execution", "output", "phase", "step")

    def __init__(self, executable: RecordedExecutable, execution: int, step: int) -> None:
        self.executable = executable
        self.execution = execution
        self.step = step
        self.began = time.time()
        self.phase = "called"
        self.output: Any = None  # what finds it: the array, or a weak reference to it

    @property
    def is_over(self) -> bool:
        """Whether it has ended or failed, as far as that was looked at."""
        return self.phase in ("ended", "failed")


class Progress:
    """The executions of this process, in the order in which they began.

    Attributes:
        last: The last executions.
        changes: Goes up with whatever happens.
        progressed: `time.monotonic()` when an execution, a step or a compilation was last seen to
            end.
        is_close: Whether each call is told before it is made, and its end looked for.
        compiling: What each thread that compiles a lazy program compiles, and since when.
        step: The last step that a thread marked.
    """

    def __init__(self) -> None:
        self.is_close = False
        self.start_afresh()
        afresh_in_children(self)

    def start_afresh(self) -> None:
        """Know of no execution."""
        self.last: deque[Running] = deque(maxlen=LAST)
        self.changes = 0
        self.progressed = time.monotonic()
        self.compiling: dict[int, tuple[str, float]] = {}
        self.step = 0
        self._under_way: deque[Running] = deque()
        self._counts: dict[int, int] = {}
        self._finds: dict[int, tuple[Find, bool]] = {}
        self._looking = threading.Lock()

    def begin(self, executable: RecordedExecutable, step: int) -> Running:
        """Learn that an execution is about to begin."""
        if self.compiling:  # of this thread, it failed
            self.compile_ended()
        number = executable.number
        count = self._counts.get(number, 0)
        self._counts[number] = count + 1
        running = Running(executable, count, step)
        self.last.append(running)
        under_way = self._under_way
        if len(under_way) >= _MANY and not count % _EVERY:
            self.look()
        if len(under_way) < _MOST:
            under_way.append(running)
        self.changes += 1
        return running

    def dispatched(self, running: Running, results: Any) -> None:
        """Learn what the call of an execution returned, which may be on its way."""
        number = running.executable.number
        find, is_small = self._finds.get(number) or self._learn(number, results)
        try:
            output = find(results)
            running.output = output if is_small else weakref.ref(output)
            running.phase = "dispatched"
        except Exception:  # it returned nothing that can be asked
            self._end(running, "ended")

    def passed(self, executable: RecordedExecutable, step: int) -> None:
        """Learn of an execution after its call, where nobody looks closely."""
        count = self._counts.get(executable.number, 0)
        self._counts[executable.number] = count + 1
        running = Running(executable, count, step)
        running.phase = "ended"  # nobody asks for those under way
        self.last.append(running)
        self.changes += 1

    def failed(self, running: Running) -> None:
        """Learn that an execution raised an error."""
        self._end(running, "failed")

    def step_ended(self, step: int) -> None:
        """Learn that a thread has marked a step."""
        self.step = step
        self._note()

    def compile_began(self, name: str) -> None:
        """Learn that this thread compiles a program, or loads it."""
        self.compiling[threading.get_ident()] = name, time.time()
        self.changes += 1

    def compile_ended(self) -> None:
        """Learn that it has done so, or failed to."""
        if self.compiling.pop(threading.get_ident(), None) is not None:
            self._note()

    def look(self) -> None:
        """Let go of executions that have ended."""
        if not self._looking.acquire(False):
            return
        try:
            under_way = self._under_way
            has_ended = False
            while under_way and (under_way[0].is_over or self._has_ended(under_way[0])):
                running = under_way.popleft()
                if not running.is_over:
                    running.phase, running.output, has_ended = "ended", None, True
            if has_ended:
                self._note()
        finally:
            self._looking.release()

    def oldest(self) -> Running | None:
        """Return the oldest execution that has not ended."""
        self.look()
        return next((running for running in list(self._under_way) if not running.is_over), None)

    def is_busy(self) -> bool:
        """Return whether an execution or a compilation is under way."""
        return bool(self.compiling) or self.oldest() is not None

    def _has_ended(self, running: Running) -> bool:
        output = running.output
        if output is None:
            return False  # its call has not returned
        if isinstance(output, weakref.ref):
            output = output()
            if output is None:
                return True  # nobody waits for it: a later one tells
        try:
            return is_there_or_gone(output)
        except RuntimeError:  # a later execution took its memory, and tells
            return True

    def _end(self, running: Running, phase: str) -> None:
        running.phase, running.output = phase, None
        self._note()

    def _note(self) -> None:
        self.progressed = time.monotonic()
        self.changes += 1

    def _learn(self, number: int, results: Any) -> tuple[Find, bool]:
        """Find out which output of an executable is the smallest, and how it is found again."""
        find, nbytes = find_smallest(results)
        self._finds[number] = found = find, nbytes <= _HELD_BYTES
        return found


def find_smallest(results: Any) -> tuple[Find, int]:
    """Return what finds the smallest array in what an execution returned, and its bytes."""
    smallest: tuple[int, Any] | None = None
    for path, leaf in jax.tree_util.tree_flatten_with_path(results)[0]:
        if hasattr(leaf, "is_ready") and (smallest is None or leaf.nbytes < smallest[0]):
            smallest = leaf.nbytes, path
    if smallest is None:
        return _nothing, 0
    find = _finder(smallest[1])
    try:
        find(results).is_ready()
    except Exception:  # a class of the user's that names its parts by numbers
        place = [id(leaf) for leaf in jax.tree.leaves(results)].index(
            id(_leaf_at(results, smallest[1]))
        )
        return (lambda results: jax.tree.leaves(results)[place]), smallest[0]
    return find, smallest[0]


def _leaf_at(results: Any, path: Any) -> Any:
    return next(leaf for at, leaf in jax.tree_util.tree_flatten_with_path(results)[0] if at == path)


def _nothing(results: Any) -> Any:
    raise LookupError("there is no output")


def _finder(path: Any) -> Find:
    """Return what finds the output at a path without looking at the others."""
    finds: list[Find] = []
    for key in path:
        if isinstance(key, jax.tree_util.GetAttrKey):
            finds.append(operator.attrgetter(key.name))
        else:
            place = key.idx if isinstance(key, jax.tree_util.SequenceKey) else key.key
            finds.append(operator.itemgetter(place))
    if len(finds) == 1:
        return finds[0]

    def find(results: Any) -> Any:
        for step in finds:
            results = step(results)
        return results

    return find


_progress: Progress | None = None
_tell: Callable[[RecordedExecutable], None] | None = None
_starting = threading.Lock()


def watched() -> Progress | None:
    """Return what executions are told to; None where nobody wants to know."""
    return _progress


def told() -> Callable[[RecordedExecutable], None] | None:
    """Return what is called with each program that is about to run, if anything is."""
    return _tell


def is_anyone_told() -> bool:
    """Return whether executions are told to somebody, before or after they are made."""
    return _progress is not None or _tell is not None


def tell_of_each(tell: Callable[[RecordedExecutable], None] | None) -> None:
    """Call ``tell`` with each program that is about to run; None for no more."""
    global _tell
    _tell = tell
    jaxapi.end_all_rests()


def is_watched_closely() -> bool:
    """Return whether each call is to be told before it is made."""
    return _tell is not None or (_progress is not None and _progress.is_close)


def watch_progress(*, closely: bool) -> Progress:
    """Follow the executions of this process from here on.

    Args:
        closely: Whether each call is to be told before it is made. Others may be told after it.
    """
    global _progress
    with _starting:
        if _progress is None:
            _progress = Progress()
        _progress.is_close |= closely
    jaxapi.end_all_rests()
    return _progress
