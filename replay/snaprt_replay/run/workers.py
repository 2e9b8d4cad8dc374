"""Run variants of programs in processes of their own, so that whatever ends one is a result.

It must not know what running means: `work` does that, in the worker. A worker serves one job after
the other, because importing JAX takes a second, and is replaced after a crash or a time-out.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Literal

import numpy as np
import snaprt_cache

import snaprt
import snaprt_replay
from snaprt_replay.process import elsewhere, framing
from snaprt_replay.process.child import child_command, child_environment
from snaprt_replay.run.variants.variants import Variant
from snaprt_replay.run.work import HLO, Job, send_job

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

# What another environment takes from here; all else, JAX above all, it has itself.
_PACKAGES = (snaprt, snaprt_cache, snaprt_replay)
_TAIL_BYTES = 1 << 16
# The line that says why a process ended itself: Abseil's fatal log, LLVM's, the C++ library's.
_FATAL = re.compile(r"^F\d{4} [\d:.]+\s+\d+ (?:.*/)?([\w.-]+:\d+)\] ?(.*)", re.MULTILINE)
_LOUD = re.compile(r"^.*(?:Check failed|LLVM ERROR|terminate called|Assertion .* failed).*$", re.M)
_OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|[Oo]ut of memory|bad_alloc|MemoryError")
_PLACE = re.compile(r"[\w.-]+:\d+")
# What differs between two runs of one failure: addresses, sizes, numbers of names.
_CHANGING = re.compile(r"0x[0-9a-f]+|\d+")


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a variant gave no outputs.

    Args:
        kind: What happened, and when.
        signature: What stays the same when the same thing happens again, ``copy_insertion.cc:427``.
        message: What XLA or the system said.
        hint: What to do about it; empty where nothing is known.
    """

    kind: FailureKind
    signature: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        return (
            f"{self.kind} in `{self.signature}`" if _PLACE.fullmatch(self.signature) else self.kind
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """What running a variant gave.

    Args:
        outputs: Of the first run; None where it failed.
        failure: None where it did not.
        compile_seconds: To compile the program, or load it from the cache.
        execute_seconds: Of each run, copies to and from the device included.
        from_cache: Whether the executable came from the persistent cache.
        other_runs: Outputs of further runs that differ in any bit from each run before.
        device: The device's name, as in ``cpu:0``.
        environment: Versions, platform, device, flags: as in `case.Case.environment`.
        notes: What a reader of the outputs should know.
        report: What the compiler said, for the kind ``compile-only``: ``memory`` in bytes, ``cost``
            and the optimized ``hlo``.
    """

    outputs: tuple[np.ndarray, ...] | None
    failure: Failure | None
    compile_seconds: float = 0.0
    execute_seconds: tuple[float, ...] = ()
    from_cache: bool = False
    other_runs: tuple[tuple[np.ndarray, ...], ...] = ()
    device: str = ""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    report: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def agrees_with_itself(self) -> bool | None:
        """Return whether all runs gave the same bits; None where it ran once only."""
        return None if len(self.execute_seconds) < 2 else not self.other_runs


class Workers:
    """Processes that run variants of programs, at most ``count`` at a time.

    Args:
        count: How many processes.
        timeout: Seconds that one job may take, compiling and running together.
    """

    def __init__(self, count: int = 1, timeout: float = 120.0) -> None:
        self._count = count
        self._timeout = timeout
        self._pool = concurrent.futures.ThreadPoolExecutor(count)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for worker in self._idle:
            worker.close()

    def run(
        self,
        variant: Variant,
        program: bytes,
        inputs: Sequence[np.ndarray],
        *,
        repeat: int = 1,
        form: str = HLO,
        name: str = "",
        timeout: float | None = None,
    ) -> Outcome:
        """Run a variant of a program and return what came of it, whatever that is.

        Args:
            variant: Any but ``recorded``.
            program: A serialized HloModuleProto with default layouts; or, where ``form`` says so,
                anything that XLA's StableHLO parser takes.
            inputs: One for each parameter of the program; kinds of higher precision convert them.
            repeat: How often to run it.
            form: `work.HLO` or `work.STABLEHLO`.
            name: What the compile cache's index calls it.
            timeout: Seconds for this job; None for those of the workers.
        """
        job = Job(variant, program, form, inputs, repeat, name)
        try:
            worker = self._take(variant.python)
        except OSError as error:
            message = f"cannot start {variant.python or sys.executable}: {error.strerror or error}"
            return _outcome(None, Failure("missing device", "no interpreter", message), {}, {})
        outcome = worker.run(job, self._timeout if timeout is None else timeout)
        with self._lock:
            if worker.alive:
                self._idle.append(worker)
        return outcome

    def submit(
        self, variant: Variant, program: bytes, inputs: Sequence[np.ndarray], **named: Any
    ) -> concurrent.futures.Future[Outcome]:
        """Do what `run` does, when a process is free."""
        return self._pool.submit(self.run, variant, program, inputs, **named)

    def _take(self, python: str | None) -> _Worker:
        """Return an idle worker of that environment, or a new one."""
        with self._lock:
            for worker in self._idle:
                if worker.python == python:
                    self._idle.remove(worker)
                    return worker
            crowded = [self._idle.pop(0)] if len(self._idle) >= self._count else []
        for worker in crowded:
            worker.close()
        return _Worker(python)


def _command(python: str | None, task: str, argument: str) -> tuple[list[str], dict[str, str]]:
    """Return how to start a task of `child` in an environment, and with which variables."""
    if python is None:
        return child_command(task, argument), child_environment()
    folders = {package.__name__: str(Path(package.__path__[0]).parent) for package in _PACKAGES}
    variables = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    script = elsewhere.__file__
    return [python, script, json.dumps(folders), task, argument], variables


class _Worker:
    """One process, which serves one job at a time."""

    def __init__(self, python: str | None) -> None:
        self.python = python
        self.alive = True
        self._ready = False
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 closed by `close`
        ours, theirs = socket.socketpair()
        self._connection = ours
        with theirs:
            theirs.set_inheritable(True)
            descriptor = theirs.fileno()
            command, environment = _command(python, "work", str(descriptor))
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                env=environment,
                pass_fds=[descriptor],
            )

    def run(self, job: Job, timeout: float) -> Outcome:
        """Do a job; afterwards `alive` says whether there can be another."""
        began = os.fstat(self._said.fileno()).st_size
        timed_out = threading.Event()

        def stop() -> None:
            timed_out.set()
            self._process.kill()

        timer = threading.Timer(timeout, stop)
        timer.start()
        told: dict[str, Any] = {"event": "starting"}
        prepared: dict[str, Any] = {}
        arrays: list[np.ndarray] = []
        try:
            self._wait_until_ready()
            send_job(self._connection, job)
            while told["event"] not in ("done", "failed"):
                told, arrays = framing.receive(self._connection)
                prepared = told if told["event"] == "prepared" else prepared
        except (EOFError, OSError):
            self.alive = False
        finally:
            timer.cancel()
        if timed_out.is_set():
            self.alive = False
        if not self.alive:
            status = self._process.wait()
            said = self._tail(began)
            self.close()
            phase = "run" if prepared else "compile" if self._ready else "start"
            failure = _how_it_ended(phase, status, said, timeout if timed_out.is_set() else None)
            return _outcome(None, failure, prepared, told)
        if told["event"] == "failed":
            return _outcome(
                None, _refused(told["kind"], told["message"], told["hint"]), prepared, told
            )
        runs = []
        for count in told["runs"]:
            runs.append(tuple(arrays[:count]))
            arrays = arrays[count:]
        return _outcome(runs, None, prepared, told)

    def close(self) -> None:
        """End the process, which has nothing to lose."""
        self.alive = False
        self._connection.close()
        self._process.kill()
        self._process.wait()
        self._said.close()

    def _wait_until_ready(self) -> None:
        if not self._ready:
            framing.receive(self._connection)
            self._ready = True

    def _tail(self, began: int) -> str:
        end = os.fstat(self._said.fileno()).st_size
        self._said.seek(max(began, end - _TAIL_BYTES))
        return self._said.read().decode(errors="replace")


def _outcome(
    runs: Sequence[tuple[np.ndarray, ...]] | None,
    failure: Failure | None,
    prepared: Mapping[str, Any],
    told: Mapping[str, Any],
) -> Outcome:
    return Outcome(
        outputs=runs[0] if runs else None,
        failure=failure,
        compile_seconds=prepared.get("compile_seconds", 0.0),
        execute_seconds=tuple(told.get("execute_seconds", ())),
        from_cache=prepared.get("from_cache", False),
        other_runs=tuple(runs[1:]) if runs else (),
        device=prepared.get("device", ""),
        environment=prepared.get("environment", {}),
        notes=tuple(prepared.get("notes", ())),
        report=prepared.get("report", {}),
    )


_WHILE: Final[Mapping[str, tuple[FailureKind, str]]] = {
    "compile": ("compile crash", "while it was compiled"),
    "run": ("run crash", "while it ran"),
    "start": ("missing device", "while it started"),
}


def _how_it_ended(phase: str, status: int, said: str, timeout: float | None) -> Failure:
    """Return the failure of a job whose process is gone."""
    kind, when = _WHILE[phase]
    if timeout is not None:
        return Failure("timeout", f"{phase} timeout", f"no result within {timeout:g} s {when}")
    fatal = _FATAL.search(said)
    loud = _LOUD.search(said)
    how = f"status {status}" if status >= 0 else signal.Signals(-status).name
    if _OUT_OF_MEMORY.search(said) or -status == signal.SIGKILL:
        return Failure("out of memory", "out of memory", f"the process ended ({how}) {when}")
    if fatal:
        return Failure(kind, fatal[1], f"{fatal[1]}: {fatal[2]}".strip())
    line = loud[0].strip() if loud else (said.strip().splitlines() or [""])[-1]
    return Failure(kind, stable(line) if loud else how, f"the process ended ({how}) {when}: {line}")


def _refused(kind: FailureKind, message: str, hint: str) -> Failure:
    """Return the failure that a worker told of itself."""
    if _OUT_OF_MEMORY.search(message):
        kind = "out of memory"
    return Failure(kind, stable(message), message, hint)


def stable(message: str) -> str:
    """Return the part of an error's message that is the same whenever the error happens."""
    first = (message.strip().splitlines() or [""])[0]
    return _CHANGING.sub("N", first)[:200]
