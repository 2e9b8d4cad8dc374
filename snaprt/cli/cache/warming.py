"""Has several processes compile files, and tells how far they are; knows neither JAX nor modules.

A process that dies at a file costs that file alone: another takes its place.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

_WORKER: Final = "snaprt.cli.cache.warm_worker"
#: So many characters of what a process wrote before it died are shown.
_LAST_WORDS: Final = 2000


@dataclass(frozen=True)
class Job:
    """A file to compile.

    Attributes:
        file: The file.
        name: What its program is called.
        environment: What its process must find in the environment.
        size: Bytes of its module, from which the time left is estimated.
    """

    file: Path
    name: str
    environment: Mapping[str, str]
    size: int


@dataclass(frozen=True)
class Result:
    """What became of a job.

    Attributes:
        job: The job.
        key: The key's digest; empty where it is not told.
        was_there: Whether the cache had it before.
        seconds: Seconds that the compiler took.
        error: What went wrong; empty if nothing did.
        hint: What to do about it.
    """

    job: Job
    key: str = ""
    was_there: bool = False
    seconds: float = 0.0
    error: str = ""
    hint: str = ""


@dataclass
class Progress:
    """How far the work is.

    Attributes:
        jobs: All of them.
        processes: How many work at a time.
        done: The results so far.
    """

    jobs: Sequence[Job]
    processes: int
    done: list[Result] = field(default_factory=list)
    _started: float = field(default_factory=time.monotonic)

    def seconds_left(self) -> float | None:
        """Return an estimate by the bytes of the modules, or None where nothing is known yet."""
        compiled = [r.job.size for r in self.done if not r.was_there and not r.error]
        left = sum(job.size for job in self.jobs) - sum(r.job.size for r in self.done)
        if not compiled or not left:
            return None if left else 0.0
        return (time.monotonic() - self._started) * left / sum(compiled)


def warm(
    jobs: Iterable[Job],
    target: str,
    processes: int,
    report: Callable[[Progress, Result], None],
) -> list[Result]:
    """Compile every job's file for ``target`` and return the results in the order of their end.

    Args:
        jobs: What to compile; those of one environment share processes.
        target: ``cpu``, ``gpu`` or ``tpu:`` and a topology.
        processes: How many processes work at a time.
        report: Called after every job, in one thread at a time.
    """
    # The largest first: a large one at the end would keep one process busy and the others not.
    ordered = sorted(jobs, key=lambda job: (sorted(job.environment.items()), -job.size))
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in ordered:
        waiting.put(job)
    progress = Progress(ordered, max(1, min(processes, len(ordered))))
    results: queue.SimpleQueue[Result] = queue.SimpleQueue()
    workers = [_Worker() for _ in range(progress.processes)]
    stopping = threading.Event()

    def work(worker: _Worker) -> None:
        for job in _taken(waiting, stopping):
            results.put(worker.answer(job, target))
        worker.stop()

    threads = [threading.Thread(target=work, args=(each,), daemon=True) for each in workers]
    for thread in threads:
        thread.start()
    try:
        for _ in ordered:
            result = results.get()
            progress.done.append(result)
            report(progress, result)
        for thread in threads:
            thread.join()
    finally:
        stopping.set()
        for worker in workers:
            worker.kill()
    return progress.done


def _taken(waiting: queue.SimpleQueue[Job], stopping: threading.Event) -> Iterator[Job]:
    while not stopping.is_set():
        try:
            yield waiting.get_nowait()
        except queue.Empty:
            return


class _Worker:
    """One process, started when a job comes and again when a job needs another environment."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._environment: Mapping[str, str] = {}
        self._stderr: IO[bytes] | None = None

    def answer(self, job: Job, target: str) -> Result:
        """Have the process compile the job."""
        if self._process is not None and self._environment != job.environment:
            self.stop()
        line = ""
        try:
            process = self._running(job.environment)
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps({"file": str(job.file), "target": target}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            answer: dict[str, Any] = json.loads(line)
            return Result(job, **answer)
        except (OSError, ValueError):
            status, words = self._end()
            return Result(
                job, error=f"the process that compiled it ended with status {status}", hint=words
            )

    def _running(self, environment: Mapping[str, str]) -> subprocess.Popen[str]:
        if self._process is None:
            self._environment = environment
            self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by _end
            self._process = subprocess.Popen(
                [sys.executable, "-m", _WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                env={**os.environ, **environment},
                process_group=0,  # Ctrl-C is for us: we end them
            )
        return self._process

    def stop(self) -> None:
        """Let the process end, once it has sent what is still on its way to a remote cache."""
        self._end()

    def kill(self) -> None:
        """End the process now, if it runs."""
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()

    def _end(self) -> tuple[int, str]:
        process, self._process = self._process, None
        if process is None:
            return 0, ""
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):  # it is gone already
            process.stdin.close()
        status = process.wait()
        process.stdout.close()
        words = ""
        if self._stderr is not None:
            size = self._stderr.seek(0, os.SEEK_END)
            self._stderr.seek(max(0, size - _LAST_WORDS))
            words = self._stderr.read().decode("utf-8", "replace").strip()
            self._stderr.close()
        return status, words
