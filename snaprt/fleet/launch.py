"""Starts a job's processes on one machine, forwards what they print, and ends them together."""

from __future__ import annotations

import collections
import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any, Final

from snaprt.errors import UsageError

GRACE: Final = 10.0
"""Seconds that processes have to end after SIGTERM, or Ctrl-C, before SIGKILL."""

_TAIL: Final = 60
"""How many lines of the process that failed first are shown again at the end."""

_DRAIN: Final = 1.0
"""Seconds that output is waited for once all have ended: what they started may hold the pipes."""

STATUS_VARIABLE: Final = "SNAPRT_LAUNCH_STATUS"
"""Names the descriptor on which a process says the status of its program, see `tell_status`."""

_STOPPED_BY: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Kills the process groups it was told of when its input ends: the launcher is gone, SIGKILL or not.
_GUARD: Final = """
import os, signal, sys
alive = set()
for line in sys.stdin:
    group = int(line)
    alive.add(group) if group > 0 else alive.discard(-group)
for group in alive:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


@dataclass(frozen=True)
class Job:
    """Which processes of a job run on this machine."""

    processes: int  # how many run here, and on each other machine
    master: str  # "HOST:PORT" where the first process of the job coordinates it
    nodes: int = 1  # how many machines there are
    node_rank: int = 0  # which of them this is, from 0 on
    devices_per_process: int | None = None  # how many devices each process sees; None: JAX decides

    @property
    def ranks(self) -> range:
        """The ranks that run on this machine."""
        first = self.node_rank * self.processes
        return range(first, first + self.processes)

    def environment(self, rank: int, base: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a process: torchrun's variables, and which devices it sees."""
        local = rank - self.ranks.start
        host, _, port = self.master.rpartition(":")
        environment = {
            **base,
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "GROUP_RANK": str(self.node_rank),
            "WORLD_SIZE": str(self.nodes * self.processes),
            "LOCAL_WORLD_SIZE": str(self.processes),
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "PYTHONUNBUFFERED": "1",  # a line is shown when it is printed
        }
        if self.devices_per_process is not None:
            count = self.devices_per_process
            flags = f"{base.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
            environment["XLA_FLAGS"] = flags.strip()
            environment["SNAPRT_LAUNCH_DEVICES"] = str(count)
            every = ",".join(map(str, range(count * self.processes)))
            names = (base.get("CUDA_VISIBLE_DEVICES") or every).split(",")
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[local * count :][:count])
        return environment


def free_address() -> str:
    """Return an address of this machine on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def check_master(address: str) -> str:
    """Return ``address`` if it is "HOST:PORT".

    Raises:
        UsageError: It is not.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(
            f"{address!r} is not a coordinator address",
            hint="Use HOST:PORT of the first machine, with a free port.",
        )
    return address


def launch(job: Job, command: Callable[[int], Sequence[str]]) -> int:
    """Run a job's processes of this machine to their end, and return the exit status.

    What they print is forwarded line by line, each line with its rank before it. When one fails,
    the others get SIGTERM and, ``GRACE`` seconds later, SIGKILL; the end of its output is shown
    again last. SIGINT, SIGTERM and SIGHUP end all. If this process is killed, they are killed.
    To be called in the main thread.

    Args:
        job: Which processes.
        command: The words of the command of a rank.

    Returns:
        0 if all ended with 0; else the status of the first that did not, as a shell gives it
        (128 + the signal), or 128 + the signal that ended the job.

    Raises:
        UsageError: A process could not be started.
    """
    with _Guard() as guard, _wakened() as (received, wakeup):
        processes: list[_Process] = []
        try:
            for rank in job.ranks:
                processes.append(
                    _Process.start(rank, command(rank), job.environment(rank, os.environ))
                )
                guard.watch(processes[-1].pid)
            return _Launched(processes, guard, received, wakeup).wait()
        finally:
            for process in processes:
                process.signal(signal.SIGKILL)
                process.popen.wait()


@dataclass
class _Process:
    """One process of the job."""

    rank: int
    popen: subprocess.Popen[bytes]  # the process; the leader of a process group of its own
    # Where it says the status of its program, before it waits for the others to end.
    status_pipe: IO[bytes]
    # The last lines that it printed.
    tail: collections.deque[bytes] = field(default_factory=lambda: collections.deque(maxlen=_TAIL))
    status: int | None = None  # its exit status as `subprocess` gives it, once it has ended

    @classmethod
    def start(cls, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> _Process:
        reader, writer = os.pipe()
        try:
            popen = subprocess.Popen(
                list(command),
                env={**environment, STATUS_VARIABLE: str(writer)},
                pass_fds=[writer],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            os.close(reader)
            raise UsageError(
                f"rank {rank} cannot be started: {error.strerror or error}",
                hint="Start fewer processes with -n, or raise the limit (ulimit -u).",
            ) from error
        finally:
            os.close(writer)
        return cls(rank, popen, open(reader, "rb", buffering=0))

    @property
    def pid(self) -> int:
        return self.popen.pid

    def signal(self, number: int) -> None:
        """Send a signal to the process and to those that it has started, until it has ended.

        Then its number may soon be another's.
        """
        if self.status is not None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


@dataclass
class _Stream:
    """A pipe of a process, and where its lines go."""

    process: _Process  # whose
    source: IO[bytes]  # the pipe
    target: IO[bytes]  # where to
    begun: bytes = b""  # the part of a line that has come

    def forward(self, chunk: bytes) -> None:
        """Write the lines that have ended; those of progress bars end with a carriage return."""
        *lines, self.begun = _lines(self.begun + chunk)
        self._write(lines)

    def finish(self) -> None:
        """Write what has no end of line."""
        if self.begun:
            self._write([self.begun + b"\n"])
            self.begun = b""

    def _write(self, lines: Sequence[bytes]) -> None:
        prefix = b"[%d] " % self.process.rank
        self.process.tail.extend(prefix + line for line in lines)
        if lines:
            self.target.write(b"".join(prefix + line for line in lines))
            self.target.flush()


def _lines(text: bytes) -> list[bytes]:
    """Return the lines of ``text`` with their ends, and at last what has no end yet."""
    lines = [line for part in text.split(b"\n") for line in _returns(part + b"\n")]
    lines[-1] = lines[-1][:-1]
    return lines


def _returns(line: bytes) -> Iterator[bytes]:
    *parts, last = line.replace(b"\r\n", b"\n").split(b"\r")
    yield from (part + b"\r" for part in parts)
    yield last


class _Launched:
    """A job that runs: waits for its processes, and ends all when one fails or a signal comes."""

    def __init__(
        self,
        processes: Sequence[_Process],
        guard: _Guard,
        received: collections.deque[int],
        wakeup: socket.socket,
    ) -> None:
        self._processes = processes
        self._guard = guard
        self._received = received
        self._wakeup = wakeup
        self._selector = selectors.DefaultSelector()
        self._selector.register(wakeup, selectors.EVENT_READ)
        self._failed: _Process | None = None
        self._failed_with = 0
        self._stopped_by = 0  # the number of a signal
        self._kill_at = float("inf")
        self._open = 0
        for process in processes:
            self._selector.register(process.status_pipe, selectors.EVENT_READ, process)
            for source, target in (
                (process.popen.stdout, sys.stdout.buffer),
                (process.popen.stderr, sys.stderr.buffer),
            ):
                assert source is not None
                stream = _Stream(process, source, target)
                self._selector.register(source, selectors.EVENT_READ, stream)
                self._open += 1

    def wait(self) -> int:
        """Wait for the end of all, and return the job's exit status."""
        drained_at = float("inf")
        while True:
            if all(process.status is not None for process in self._processes):
                drained_at = min(drained_at, time.monotonic() + _DRAIN)
                if not self._open or time.monotonic() >= drained_at:
                    break
            limit = min(self._kill_at, drained_at) - time.monotonic()
            for key, _ in self._selector.select(None if limit == float("inf") else max(0, limit)):
                self._read(key)
            self._note_signals()
            self._note_ends()
            if time.monotonic() >= self._kill_at:
                self._signal_all(signal.SIGKILL)
                self._kill_at = float("inf")
        for key in self._selector.get_map().values():
            if isinstance(key.data, _Stream):
                key.data.finish()
        return self._status()

    def _read(self, key: selectors.SelectorKey) -> None:
        stream = key.data
        if stream is None:
            self._wakeup.recv(4096)
            return
        chunk = os.read(key.fd, 1 << 16)
        if isinstance(stream, _Process):
            self._selector.unregister(key.fileobj)
            if chunk:
                self._note_status(stream, int(chunk))
        elif chunk:
            stream.forward(chunk)
        else:
            stream.finish()
            self._selector.unregister(key.fileobj)
            self._open -= 1

    def _note_signals(self) -> None:
        while self._received:
            number = self._received.popleft()
            if number not in _STOPPED_BY:
                continue
            self._stop(signal.SIGKILL if self._stopped_by else number)
            self._stopped_by = self._stopped_by or number

    def _note_ends(self) -> None:
        for process in self._processes:
            if process.status is not None or (status := process.popen.poll()) is None:
                continue
            self._guard.forget(process.pid)
            if status:
                process.signal(signal.SIGTERM)  # what it has started
            process.status = status
            self._note_status(process, status)

    def _note_status(self, process: _Process, status: int) -> None:
        if status and self._failed is None and not self._stopped_by:
            self._failed, self._failed_with = process, status
            self._stop(signal.SIGTERM)

    def _stop(self, number: int) -> None:
        self._signal_all(number)
        self._kill_at = time.monotonic() + GRACE

    def _signal_all(self, number: int) -> None:
        for process in self._processes:
            process.signal(number)

    def _status(self) -> int:
        if self._stopped_by:
            return 128 + self._stopped_by
        if self._failed is None:
            return 0
        status = self._failed_with
        if len(self._processes) > 1:
            how = f"exit status {status}" if status > 0 else signal.Signals(-status).name
            tail = self._failed.tail
            more = b"; the end of its output:\n" if tail else b"; it printed nothing\n"
            said = [f"\nrank {self._failed.rank} failed first, with {how}".encode(), more, *tail]
            with contextlib.suppress(OSError):  # of a full disk; the status is more important
                sys.stderr.buffer.write(b"".join(said))
                sys.stderr.buffer.flush()
        return status if status > 0 else 128 - status


class _Guard:
    """A process that kills the others when this one is gone, however it ended."""

    def __enter__(self) -> _Guard:
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        return self

    def watch(self, pid: int) -> None:
        """Kill this process group when the launcher is gone."""
        self._tell(pid)

    def forget(self, pid: int) -> None:
        """Let it be: its leader has ended, and its number may be another's."""
        self._tell(-pid)

    def _tell(self, number: int) -> None:
        assert self._popen.stdin is not None
        with suppress(BrokenPipeError):
            self._popen.stdin.write(b"%d\n" % number)
            self._popen.stdin.flush()

    def __exit__(self, *_: object) -> None:
        self._popen.communicate()


@contextmanager
def _wakened() -> Iterator[tuple[collections.deque[int], socket.socket]]:
    """Collect signals, and make a socket readable for each, so that a selector returns at once."""
    received: collections.deque[int] = collections.deque()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    before: dict[int, Any] = {}
    for number in (*_STOPPED_BY, signal.SIGCHLD):
        before[number] = signal.signal(number, lambda number, _: received.append(number))
    descriptor = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    try:
        yield received, ours
    finally:
        signal.set_wakeup_fd(descriptor)
        for name, handler in before.items():
            signal.signal(name, handler)
        ours.close()
        theirs.close()


def tell_status(status: int) -> None:
    """Tell the launcher how the program of this process has ended, if one launched it.

    A process that has failed may wait for the others before it ends: ``jax.distributed`` does so
    when Python ends.
    """
    descriptor = os.environ.pop(STATUS_VARIABLE, None)
    if descriptor is not None:
        os.write(int(descriptor), b"%d" % status)
        os.close(int(descriptor))
