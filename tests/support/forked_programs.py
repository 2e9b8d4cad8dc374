"""Programs forked from a process that has imported JAX, which saves each of them over a second.

Run as a script, this is that process: it imports JAX, makes no devices, and runs each program that
it is asked for as ``__main__`` of a process of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final

_PID: Final = struct.Struct("<i")
_MOST: Final = 1 << 17
"""Bytes of a request; more than Linux takes for one of a program's words."""


def can_fork(environment: dict[str, str]) -> bool:
    """Return whether a forked process, with this environment, is as a new one would be.

    Python reads its own variables when it starts.
    """

    def of_python(variables: Mapping[str, str]) -> dict[str, str]:
        return {name: text for name, text in variables.items() if name.startswith("PYTHON")}

    return sys.platform == "linux" and of_python(environment) == of_python(os.environ)


class ForkedProgram(subprocess.Popen[str]):
    """``-c`` and source code, or a script, for Python, as ``subprocess.Popen`` starts them."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        # The places of subprocess.Popen: see its private methods in Python 3.11 to 3.13.
        cwd, environment = rest[4], rest[5]
        read_in, _, _, write_out, _, write_errors = rest[9:15]
        told, tells = os.pipe()
        request = json.dumps([args[1:], cwd and os.fspath(cwd), environment]).encode()
        streams = [read_in, write_out, write_errors]
        given = [own if own != -1 else usual for usual, own in enumerate(streams)]
        settings = tuple(item for item in environment.items() if item[0].startswith("JAX_"))
        socket.send_fds(_nursery(settings), [request], [*given, tells])
        for descriptor in {tells, *streams} - {-1}:
            os.close(descriptor)
        self._told = told
        (self.pid,) = _PID.unpack(os.read(told, _PID.size))
        self._child_created = True

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            (status,) = _PID.unpack(os.read(self._told, _PID.size))
            os.close(self._told)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._wait(0)
        return self.returncode


@functools.cache
def _nursery(settings: tuple[tuple[str, str], ...]) -> socket.socket:
    """Return where to ask for programs of a process that imported JAX with these variables."""
    requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    others = {name: text for name, text in os.environ.items() if not name.startswith("JAX_")}
    process = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())],
        env={**others, **dict(settings)},
        pass_fds=[theirs.fileno()],
    )
    theirs.close()

    def end() -> None:
        requests.close()
        process.wait()

    atexit.register(end)
    return requests


def _await_program(requests: socket.socket) -> tuple[list[str], str | None, dict[str, str]]:
    """Return what to run, in the process that is to run it: words, folder and environment."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a test decides what to end
    attendants: list[int] = []
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _MOST, 4)
        if not request:
            sys.exit()
        *streams, tells = descriptors
        attendants = [one for one in attendants if os.waitpid(one, os.WNOHANG) == (0, 0)]
        attendant = os.fork()
        if attendant:
            attendants.append(attendant)
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        program = os.fork()
        if program:
            for descriptor in streams:
                os.close(descriptor)
            os.write(tells, _PID.pack(program))
            os.write(tells, _PID.pack(os.waitpid(program, 0)[1]))
            os._exit(0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        requests.close()
        os.close(tells)
        for standard, descriptor in enumerate(streams):
            os.dup2(descriptor, standard)
            os.close(descriptor)
        return tuple(json.loads(request))


def _run(words: list[str], folder: str | None, environment: dict[str, str]) -> None:
    """Do what Python does with ``-c`` and source code, or a script, and arguments."""
    os.environ.clear()
    os.environ.update(environment)
    if folder is not None:
        os.chdir(folder)
    first, *arguments = words
    main = ModuleType("__main__")
    if first == "-c":
        source, *arguments = arguments
        name, sys.path[0] = "<string>", ""
    else:
        with open(first, "rb") as file:
            source = file.read()
        name = main.__file__ = os.path.abspath(first)
        sys.path[0] = os.path.dirname(os.path.realpath(first))
    sys.argv = [first, *arguments]
    sys.modules["__main__"] = main
    exec(compile(source, name, "exec", dont_inherit=True), vars(main))


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        import jax.numpy  # noqa: F401
        from jax._src import source_info_util

        source_info_util.register_exclusion(__file__)  # no line of a program
        gc.freeze()
        asked_for = _await_program(asked)
    try:
        _run(*asked_for)
    except Exception as failure:
        frames = failure.__traceback__
        own = sum(frame.f_code.co_filename == __file__ for frame, _ in traceback.walk_tb(frames))
        for _ in range(own):
            frames = frames and frames.tb_next
        sys.excepthook(type(failure), failure.with_traceback(frames), frames)
        sys.exit(1)
