"""Takes one profile of a program that knows nothing of it: of its whole run, or of some steps.

XProf's files are first written below a hidden folder: JAX names them by the host alone, and several
processes of a job may share one. `jax.profiler` takes one profile at a time.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import jax

from snaprt import jaxapi
from snaprt.channel import channel
from snaprt.graph.program import Program
from snaprt.processes import place_in_job, run_mark
from snaprt.runtime.events import Cut, Subscriber, subscribe, unsubscribe
from snaprt.runtime.jit import follow_process
from snaprt.snapshot.recorder.pending import RecordedExecutable
from snaprt.snapshot.recorder.progress import tell_of_each
from snaprt.snapshot.recorder.writer import afresh_in_children

#: What the name of a profile's copy for Perfetto has after the host.
_PERFETTO: Final = ".trace.json.gz"


@dataclass(frozen=True)
class Steps:
    """The steps to profile, counted from 0.

    Attributes:
        first: The first one.
        last: The last one; None for all that follow.
    """

    first: int
    last: int | None

    def __str__(self) -> str:
        if self.last == self.first:
            return f"step {self.first}"
        return f"steps {self.first}-{'' if self.last is None else self.last}"


class ProfileSession(Subscriber):
    """The profile of this process; all methods may be called from any thread.

    A step ends where the program marks it. While it has marked none, the executions of each program
    count, and the first program to reach a number decides. A profile of the first step or of the
    whole run begins with the first program that is compiled or loaded: before that, a profile would
    have JAX create its devices, and the program may not have said yet which.

    Args:
        folder: Where to write the files; it exists.
        steps: What to profile; None for the whole run.
        seconds: How long to wait for the profile to stop, which takes part of all hosts.
        tell: Called with what the user is to know.
    """

    def __init__(
        self, folder: Path, steps: Steps | None, seconds: float, tell: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._steps = steps
        self._seconds = seconds
        self._tell = tell
        self._begins_at_once = steps is None or steps.first == 0
        self._lock = threading.RLock()
        self._state = "waiting"  # then "taking", then "over"
        self._run = ""  # the folder of the files, below `PROFILE_RUNS`
        self._thread: int | None = None  # whose steps count; None where executions do
        self._program: int | None = None  # whose executions count; None where steps do
        self._marked = 0  # steps
        self._counts: Counter[int] = Counter()  # executions by the number of what ran
        afresh_in_children(self)

    def start_afresh(self) -> None:
        """Have nothing to do with a forked child."""
        self._state = "over"

    def listen(self) -> None:
        """Follow the program from here on; to be called when JAX is there."""
        subscribe(self)
        jaxapi.before_compile_or_load(lambda _: self._begin_at_once())
        tell_of_each(self._executing)
        follow_process()

    def compiling(self, cut: Cut, program: Program, promoted: frozenset[int]) -> None:
        """Begin with the first program."""
        self._begin_at_once()

    def step_ended(self, step: int) -> None:
        """Count a step that a thread has marked."""
        self._marked = max(self._marked, step)
        if self._steps is None or self._state == "over":
            return
        with self._lock:
            thread = threading.get_ident()
            if self._state == "waiting" and step >= self._steps.first:
                self._thread = thread
                self._start()
            elif (
                self._state == "taking"
                and self._program is None
                and self._thread in (None, thread)
                and self._is_last(step)
            ):
                self._stop()

    def _executing(self, executable: RecordedExecutable) -> None:
        """Count an execution that is about to begin."""
        if self._steps is None or self._state == "over":
            return
        before = self._counts[executable.number]
        self._counts[executable.number] = before + 1
        if before < self._steps.first or (self._marked and self._program is None):
            return
        with self._lock:
            if self._state == "waiting" and before >= self._steps.first > 0:
                self._count_executions(executable)
                self._start()
            elif self._state == "taking" and self._thread is None and self._is_last(before):
                if self._program is None:
                    self._count_executions(executable)
                if self._program == executable.number:
                    self._stop()

    def _count_executions(self, executable: RecordedExecutable) -> None:
        self._program = executable.number
        self._tell(
            f"the program has marked no step: the profile counts executions of {executable.name}"
        )

    def _begin_at_once(self) -> None:
        if self._begins_at_once and self._state == "waiting":
            with self._lock:
                if self._state == "waiting":
                    self._start()

    def _is_last(self, ended: int) -> bool:
        return self._steps is not None and self._steps.last is not None and ended > self._steps.last

    def end(self) -> None:
        """Stop where the program has ended, and say where the profile is, or why there is none."""
        with self._lock:
            if self._state == "taking":
                self._stop()
            elif self._state == "waiting":
                self._leave()
                self._tell(self._why_nothing())

    def _why_nothing(self) -> str:
        if self._begins_at_once:
            return "there is no profile: no program ran on XLA"
        if self._marked:
            why = f"the program ended in step {self._marked}"
        else:
            most = max(self._counts.values(), default=0)
            why = f"no step was marked, and no program ran more often than {most} times"
        return f"there is no profile of {self._steps}: {why}"

    def _start(self) -> None:
        try:
            if not self._begins_at_once:
                _wait_for_devices()  # what runs belongs to earlier steps
            self._run = _name_of_run()
            jaxapi.start_profile(self._hidden)
        except Exception as error:  # such as the program's own profile
            self._leave()
            self._tell(f"warning: there is no profile: {error}")
        else:
            self._state = "taking"

    @property
    def _hidden(self) -> Path:
        return self._folder / f".{run_mark()}"

    def _stop(self) -> None:
        """Stop, in a thread that the program waits for until its deadline."""
        self._leave()
        thread = threading.Thread(target=self._write, name="snaprt-profile", daemon=True)
        thread.start()
        thread.join(self._seconds)
        if thread.is_alive():
            self._tell(
                f"warning: the profile has not stopped within {self._seconds:g} s, and may not be "
                "written (see SNAPRT_PROFILE_TIMEOUT)"
            )

    def _leave(self) -> None:
        self._state = "over"
        unsubscribe(self)
        tell_of_each(None)

    def _write(self) -> None:
        try:
            _wait_for_devices()
            jax.profiler.stop_trace()
            files = _moved(self._hidden, self._folder, self._run)
        except Exception as error:
            self._tell(f"warning: the profile could not be written: {error}")
            return
        finally:
            shutil.rmtree(self._hidden, ignore_errors=True)
        what = "the run" if self._steps is None else self._steps
        if files:
            self._tell(f"profile of {what} in {files[0]}; see `snaprt profile {self._folder}`")


def _wait_for_devices() -> None:
    """Wait for what has been started, as far as something can be asked for it."""
    for array in jax.live_arrays():
        try:
            array.block_until_ready()
        except RuntimeError:  # it failed, or its memory was given away meanwhile
            continue


def _name_of_run() -> str:
    """Return the name of a folder for the files of all processes of the job."""
    name = time.strftime("%Y_%m_%d_%H_%M_%S")
    job = channel()
    agreed = None if job is None else job.put_first("profile", name.encode())
    return name if agreed is None else agreed.decode()


def _moved(source: Path, folder: Path, run: str) -> list[Path]:
    """Move the files of a profile to where they belong; return those that hold the profile."""
    place = place_in_job()
    target = folder / jaxapi.PROFILE_RUNS / run
    target.mkdir(parents=True, exist_ok=True)
    moved = []
    for kind in (jaxapi.PROFILE_SUFFIX, _PERFETTO):
        for file in (source / jaxapi.PROFILE_RUNS).glob(f"*/*{kind}"):
            host = file.name.removesuffix(kind)
            name = f"{host}-{place.rank}{kind}" if place.processes > 1 else file.name
            file.rename(target / name)
            moved.append(target / name)
    return moved
