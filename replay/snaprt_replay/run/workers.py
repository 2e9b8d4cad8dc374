"""Run variants of programs in separate processes, so that a crash is a result.

`work` runs them in the worker. A worker serves one job after the other, because importing JAX takes
a second, and is replaced after a crash or a timeout.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final, Literal

import numpy as np

from snaprt import metrics
from snaprt.errors import CompileError, DeviceError, ExecutionError, SnaprtError, UsageError
from snaprt_replay.child import child_command
from snaprt_replay.load.case import Index
from snaprt_replay.run import jobs, nursery, work
from snaprt_replay.run.jobs import ReplayJob, Spread
from snaprt_replay.run.variants.variants import Variant

FailureKind = Literal[
    "compile crash",
    "compile error",
    "run crash",
    "run error",
    "timeout",
    "out of memory",
    "missing device",
    "unsupported",
]

_TAIL_BYTES = 1 << 16
# The line that says why a process ended itself: Abseil's fatal log, LLVM's, the C++ library's.
_FATAL = re.compile(r"^F\d{4} [\d:.]+\s+\d+ (?:.*/)?([\w.-]+:\d+)\] ?(.*)", re.MULTILINE)
_LOUD = re.compile(r"^.*(?:Check failed|LLVM ERROR|terminate called|Assertion .* failed).*$", re.M)
_OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|[Oo]ut of memory|bad_alloc|MemoryError")
_PLACE = re.compile(r"[\w.-]+:\d+")
# What differs between two occurrences of one failure: addresses, sizes, numbers in names.
_CHANGING = re.compile(r"0x[0-9a-f]+|\d+")


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a variant returned no outputs."""

    kind: FailureKind  # what happened, and when
    # What stays the same if the same failure happens again, ``copy_insertion.cc:427``.
    signature: str
    message: str  # the message of XLA or the system
    hint: str = ""  # what to do about it; empty if nothing is known

    def __str__(self) -> str:
        return (
            f"{self.kind} in `{self.signature}`" if _PLACE.fullmatch(self.signature) else self.kind
        )

    @property
    def cannot_run(self) -> bool:
        """Whether it says nothing about a program, but that the variant cannot run it here."""
        return self.kind in ("missing device", "unsupported")

    def as_error(self, path: object) -> SnaprtError:
        """Return the error to raise when the file ``path`` is replayed."""
        error = _ERRORS.get(self.kind, ExecutionError)
        if self.cannot_run:
            return error(self.message, hint=self.hint)
        if self.kind in ("compile error", "run error"):
            return error(f"{path}: {self.message}", hint=self.hint)
        shows = f"`snaprt inspect --hlo {path}` shows the module"
        hint = f"this is a bug in XLA, or XLA does not support the module; {shows}"
        is_crash = self.kind.endswith("crash")
        return error(f"{path}: {self}: {self.message}", hint=hint if is_crash else self.hint)


_ERRORS: Final[Mapping[str, type[SnaprtError]]] = {
    "compile crash": CompileError,
    "compile error": CompileError,
    "missing device": DeviceError,
    "unsupported": UsageError,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """The result of running a variant."""

    # Of the first run, see `work.Outputs`; None if it failed.
    outputs: tuple[np.ndarray, ...] | None
    failure: Failure | None  # None if it did not fail
    compile_seconds: float = 0.0  # to compile the program, or load it from the cache
    execute_seconds: tuple[float, ...] = ()  # of each run, including copies to and from the device
    from_cache: bool = False  # whether the executable came from the persistent cache
    # Outputs of further runs that differ in any bit from every run before.
    other_runs: tuple[tuple[np.ndarray, ...], ...] = ()
    device: str = ""  # the device's name, as in ``cpu:0``
    # Versions, platform, device, flags: as in `case.Case.environment`.
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what a reader of the outputs should know
    # The compiler's report, for the kind ``compile-only``: ``memory`` in bytes, ``cost`` and the
    # optimized ``hlo``.
    report: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # On several devices, the shape of each result and which part each device holds.
    layout: Sequence[tuple[tuple[int, ...], Sequence[Index]]] = ()

    @property
    def agrees_with_itself(self) -> bool | None:
        """Return whether all runs gave the same bits; None if it ran only once."""
        return None if len(self.execute_seconds) < 2 else not self.other_runs


def forked_from_here() -> contextlib.AbstractContextManager[None]:
    """Fork workers from this process as it is now, so that they need not import JAX.

    If this process has threads or devices already, they are started as new processes, as always
    outside of this context.
    """
    return nursery.opened(work.serve)


class Workers:
    """Processes that run variants of programs, at most ``count`` at a time.

    Args:
        count: How many processes.
        timeout: Seconds that one job may take to compile and run; None for no limit.
    """

    def __init__(self, count: int = 1, timeout: float | None = 120.0) -> None:
        self._count = count
        self._timeout = timeout
        self._pool = concurrent.futures.ThreadPoolExecutor(count)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for worker in self._idle:
            worker.close()

    def run_job(
        self, job: ReplayJob, *, timeout: float | None = None, host_devices: int | None = None
    ) -> Outcome:
        """Run a job and return its outcome, which may be a failure.

        Args:
            job: What to run.
            timeout: Seconds for this job; None for the timeout of the workers.
            host_devices: How many devices the CPU has there; None for as many as here.
        """
        python = job.variant.python
        try:
            worker = self._take(python, host_devices)
        except OSError as error:
            message = f"cannot start {python or sys.executable}: {error.strerror or error}"
            return _outcome(None, Failure("missing device", "no interpreter", message), {}, {})
        outcome = worker.run(job, self._timeout if timeout is None else timeout)
        with self._lock:
            if worker.alive:
                self._idle.append(worker)
        return outcome

    def submit_job(self, job: ReplayJob) -> concurrent.futures.Future[Outcome]:
        """Do what `run_job` does as soon as a process is free."""
        return self._pool.submit(self.run_job, job)

    def run(
        self,
        variant: Variant,
        program: bytes,
        inputs: Sequence[Spread],
        *,
        timeout: float | None = None,
        **named: Any,
    ) -> Outcome:
        """Run a variant of a program: `run_job` with the fields of a `ReplayJob`."""
        return self.run_job(ReplayJob(variant, program, inputs, **named), timeout=timeout)

    def submit(
        self, variant: Variant, program: bytes, inputs: Sequence[Spread], **named: Any
    ) -> concurrent.futures.Future[Outcome]:
        """Do what `run` does as soon as a process is free."""
        return self._pool.submit(self.run, variant, program, inputs, **named)

    def _take(self, python: str | None, host_devices: int | None) -> _Worker:
        """Return an idle worker with that environment, or a new one."""
        with self._lock:
            for worker in self._idle:
                if (worker.python, worker.host_devices) == (python, host_devices):
                    self._idle.remove(worker)
                    return worker
            crowded = [self._idle.pop(0)] if len(self._idle) >= self._count else []
        for worker in crowded:
            worker.close()
        return _Worker(python, host_devices)


class _Worker:
    """One process, which serves one job at a time."""

    def __init__(self, python: str | None, host_devices: int | None) -> None:
        self.python = python
        self.host_devices = host_devices
        self.alive = True
        self._ready = False
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 closed by `close`
        ours, theirs = socket.socketpair()
        self._connection = ours
        with theirs:
            is_like_this = python is None and host_devices is None
            forked = nursery.fork(theirs.fileno(), self._log.fileno()) if is_like_this else None
            self._process = forked or self._start(theirs)

    def _start(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        theirs.set_inheritable(True)
        descriptor = theirs.fileno()
        command, environment = child_command(descriptor, self.python)
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**environment, **_showing_devices(self.host_devices)},
            pass_fds=[descriptor],
        )

    def run(self, job: ReplayJob, timeout: float | None) -> Outcome:
        """Run a job; afterwards `alive` says whether the worker can take another."""
        began = os.fstat(self._log.fileno()).st_size
        timed_out = threading.Event()

        def stop() -> None:
            timed_out.set()
            self._process.kill()

        timer = None if timeout is None else threading.Timer(timeout, stop)
        if timer is not None:
            timer.start()
        event: work.WorkEvent = {"event": "starting"}
        prepared: work.WorkEvent = {}
        runs: list[Any] = []
        try:
            self._wait_until_ready()
            jobs.send_job(self._connection, job)
            while event["event"] not in ("done", "failed"):
                event, runs = jobs.receive(self._connection)
                prepared = event if event["event"] == "prepared" else prepared
        except (EOFError, OSError):
            self.alive = False
        finally:
            if timer is not None:
                timer.cancel()
        if timed_out.is_set():
            self.alive = False
        if not self.alive:
            status = self._process.wait()
            logged = self._tail(began)
            self.close()
            phase = "run" if prepared else "compile" if self._ready else "start"
            failure = _how_it_ended(phase, status, logged, timeout if timed_out.is_set() else None)
            return _outcome(None, failure, prepared, event)
        metrics.add(metrics.from_json(event["metrics"]))
        if event["event"] == "failed":
            failure = _refused(event["kind"], event["message"], event["hint"])
            return _outcome(None, failure, prepared, event)
        return _outcome(runs, None, prepared, event)

    def close(self) -> None:
        """Kill the process."""
        self.alive = False
        self._connection.close()
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _wait_until_ready(self) -> None:
        if not self._ready:
            jobs.receive(self._connection)
            self._ready = True

    def _tail(self, began: int) -> str:
        end = os.fstat(self._log.fileno()).st_size
        self._log.seek(max(began, end - _TAIL_BYTES))
        return self._log.read().decode(errors="replace")


def _showing_devices(count: int | None) -> Mapping[str, str]:
    """Return the environment variables that give the CPU ``count`` devices."""
    if count is None:
        return {}
    flags = os.environ.get("XLA_FLAGS", "")
    # JAX accepts only one of its two settings for this.
    return {
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={count}".strip(),
        "JAX_NUM_CPU_DEVICES": "-1",
    }


def run_here(job: ReplayJob) -> Outcome:
    """Run a job in this process.

    Raises:
        SnaprtError: It cannot be compiled or run.
    """
    prepared: work.WorkEvent = {}
    event, runs = work.perform(job, prepared.update)
    return _outcome(runs, None, prepared, event)


def _outcome(
    runs: Sequence[work.Outputs] | None,
    failure: Failure | None,
    prepared: Mapping[str, Any],
    event: Mapping[str, Any],
) -> Outcome:
    every = [tuple(run) for run in runs or ()]
    return Outcome(
        outputs=every[0] if every else None,
        failure=failure,
        compile_seconds=prepared.get("compile_seconds", 0.0),
        execute_seconds=tuple(event.get("execute_seconds", ())),
        from_cache=prepared.get("from_cache", False),
        other_runs=tuple(every[1:]),
        device=prepared.get("device", ""),
        environment=prepared.get("environment", {}),
        notes=tuple(prepared.get("notes", ())),
        report=prepared.get("report", {}),
        layout=tuple(
            (tuple(shape), tuple(tuple(map(tuple, index)) for index in indices))
            for shape, indices in prepared.get("layout", ())
        ),
    )


_WHILE: Final[Mapping[str, tuple[FailureKind, str]]] = {
    "compile": ("compile crash", "during compilation"),
    "run": ("run crash", "during execution"),
    "start": ("missing device", "during startup"),
}

_LONGER: Final = "allow it more time: --timeout SECONDS"


def _how_it_ended(phase: str, status: int, logged: str, timeout: float | None) -> Failure:
    """Return the failure of a job whose process has ended."""
    kind, when = _WHILE[phase]
    if timeout is not None:
        message = f"no result within {timeout:g} s {when}"
        return Failure("timeout", f"{phase} timeout", message, _LONGER)
    fatal = _FATAL.search(logged)
    loud = _LOUD.search(logged)
    how = f"status {status}" if status >= 0 else signal.Signals(-status).name
    if _OUT_OF_MEMORY.search(logged) or -status == signal.SIGKILL:
        return Failure("out of memory", "out of memory", f"the process ended ({how}) {when}")
    if fatal:
        return Failure(kind, fatal[1], f"{fatal[1]}: {fatal[2]}".strip())
    line = loud[0].strip() if loud else (logged.strip().splitlines() or [""])[-1]
    return Failure(kind, stable(line) if loud else how, f"the process ended ({how}) {when}: {line}")


def _refused(kind: FailureKind, message: str, hint: str) -> Failure:
    """Return the failure that a worker reported."""
    if _OUT_OF_MEMORY.search(message):
        kind = "out of memory"
    return Failure(kind, stable(message), message, hint)


def stable(message: str) -> str:
    """Return the part of an error's message that is the same each time the error happens."""
    first = (message.strip().splitlines() or [""])[0]
    return _CHANGING.sub("N", first)[:200]
