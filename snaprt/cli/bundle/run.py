"""Runs a command whose output goes where ours goes, and into files too; not what it is run for.

The program stays in our process group and keeps our stdin. Where our stdout or stderr is a
terminal, it gets a pseudoterminal for it, so that it prints as it would without us.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pty
import select
import selectors
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from snaprt.cli import output
from snaprt.errors import UsageError

#: As shells do: a program that a signal ends has the signal's number and this as its status.
_SIGNALED: Final = 128
#: The interrupt that ends the program at once.
_LAST_INTERRUPT: Final = 3
# What a process that the program left behind still prints is waited for so long.
_LAST_OUTPUT_SECONDS: Final = 2.0
_LOOK_SECONDS: Final = 0.5
_PIECE: Final = 1 << 16

_PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_WAITED_FOR: Final = (*_PASSED_ON, signal.SIGCHLD, signal.SIGWINCH)
# SI_KERNEL of Linux, the system that has sigtimedwait.
_SENT_BY_KERNEL: Final = 0x80


@dataclass(frozen=True)
class ProgramEnd:
    """How a program ended."""

    status: int  # its exit status, as a shell has it
    signal: str  # the name of the signal that ended it, or nothing
    interrupted: bool  # whether it was interrupted or asked to terminate
    seconds: float  # how long it ran
    problems: tuple[str, ...]  # what is missing in the files of its output, and why


def run(
    words: Sequence[str], environment: Mapping[str, str], stdout: Path, stderr: Path
) -> ProgramEnd:
    """Run a program until it ends, and keep what it prints in two files.

    SIGINT, SIGTERM, SIGHUP and SIGQUIT go to the program, which may end by itself; the third of
    them kills it.

    Raises:
        UsageError: It cannot be started.
        OSError: The files cannot be made.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    started = time.monotonic()
    with _blocked_signals() as before:
        streams = [_Stream(1, stdout), _Stream(2, stderr)]
        process = _start(words, environment, streams, before)
        copier = threading.Thread(target=_copy, args=(streams,), daemon=True)
        copier.start()
        interrupted = _wait(process, streams)
        copier.join(_LAST_OUTPUT_SECONDS)
    status = process.returncode
    problems = [stream.problem for stream in streams if stream.problem]
    if copier.is_alive():
        problems.append("a process that the program left running may have printed more")
    return ProgramEnd(
        status=_SIGNALED - status if status < 0 else status,
        signal=signal.Signals(-status).name if status < 0 else "",
        interrupted=interrupted,
        seconds=time.monotonic() - started,
        problems=tuple(problems),
    )


class _Stream:
    """One of the program's streams.

    Attributes:
        source: Where its output can be read.
        childs: What the program writes to.
        problem: Why the file does not have all of it.
    """

    def __init__(self, target: int, path: Path) -> None:
        self._target = target
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._is_terminal = os.isatty(target)
        self.problem = ""
        if self._is_terminal:
            self.source, self.childs = pty.openpty()
            attributes = termios.tcgetattr(self.childs)
            attributes[1] &= ~termios.OPOST  # our own terminal does that
            termios.tcsetattr(self.childs, termios.TCSANOW, attributes)
            self.resize()
        else:
            self.source, self.childs = os.pipe()

    def resize(self) -> None:
        """Give the program's terminal the size of ours."""
        if self._is_terminal:
            with contextlib.suppress(OSError):
                size = fcntl.ioctl(self._target, termios.TIOCGWINSZ, bytes(8))
                fcntl.ioctl(self.source, termios.TIOCSWINSZ, size)

    def copy(self) -> bool:
        """Hand on what is there, and return whether there may be more."""
        try:
            piece = os.read(self.source, _PIECE)
        except OSError as error:
            if error.errno != errno.EIO:  # nobody has the pseudoterminal's other side any more
                raise
            piece = b""
        if not piece:
            return False
        if not self.problem:
            try:
                _write(self._file, piece)
            except OSError as error:
                self.problem = f"{self._path.name} is truncated: {error.strerror or error}"
        try:
            _write(self._target, piece)
        except OSError:
            # Who read our output has gone. The program meets that too, as it would without us.
            return False
        return True

    def close(self) -> None:
        """Close what is still open."""
        os.close(self.source)
        os.close(self._file)


def _write(file: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        try:
            rest = rest[os.write(file, rest) :]
        except BlockingIOError:  # whoever shares the terminal with us may have made it so
            select.select([], [file], [])


def _copy(streams: Sequence[_Stream]) -> None:
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.source, selectors.EVENT_READ, stream)
        while selector.get_map():
            for key, _ in selector.select():
                if not key.data.copy():
                    selector.unregister(key.fd)
                    key.data.close()


def _start(
    words: Sequence[str],
    environment: Mapping[str, str],
    streams: Sequence[_Stream],
    mask: set[Any],
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            words,
            env=environment,
            stdout=streams[0].childs,
            stderr=streams[1].childs,
            # No thread of ours runs yet.
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
        )
    except OSError as error:
        raise UsageError(
            f"cannot run {words[0]}: {error.strerror or error}",
            hint="give the command after --, as you would type it without snaprt: snaprt bundle "
            "--outfile run.tar.gz -- python -u train.py",
        ) from error
    finally:
        for stream in streams:
            os.close(stream.childs)


@contextlib.contextmanager
def _blocked_signals() -> Iterator[set[Any]]:
    """Keep signals until `_next_signal` asks for them; yield the mask that was before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    try:
        yield before
    finally:
        # What also went to the program has done its work.
        while pending := signal.sigpending() & set(_WAITED_FOR):
            signal.sigwait(pending)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(process: subprocess.Popen[bytes], streams: Sequence[_Stream]) -> bool:
    """Wait for the program, and return whether it was asked to end."""
    interrupts = 0
    while process.poll() is None:
        number, has_it = _next_signal()
        if number == signal.SIGWINCH:
            for stream in streams:
                stream.resize()
        elif number in _PASSED_ON:  # and not SIGCHLD, or nothing
            interrupts += 1
            if interrupts >= _LAST_INTERRUPT:
                process.kill()
            elif not has_it:
                process.send_signal(number)
            if interrupts == 1:
                output.log.print(
                    "snaprt: writing the bundle when the program ends; press Ctrl-C a third "
                    "time to kill it"
                )
    return interrupts > 0


def _next_signal() -> tuple[int, bool]:
    """Return the next signal, and whether a terminal has sent it, to the program as well.

    There may be none, numbered 0, where another thread has got the one that the program ended.
    """
    if hasattr(signal, "sigtimedwait"):
        sent = signal.sigtimedwait(_WAITED_FOR, _LOOK_SECONDS)
        return (0, False) if sent is None else (sent.si_signo, sent.si_code == _SENT_BY_KERNEL)
    return signal.sigwait(_WAITED_FOR), os.isatty(0)
