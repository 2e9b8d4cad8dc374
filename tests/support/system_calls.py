"""Ends a process at any one of the system calls that some work makes; knows no cache.

The work runs in a fork, which stops before and after each system call of its main thread
(ptrace(2)); at the chosen one it gets SIGKILL, before the call is made.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_TRACE_ME, _SYSCALL, _SET_OPTIONS = 0, 24, 0x4200
# Stops at system calls are told from other stops; a tracer that ends takes the child with it.
_OPTIONS = 0x1 | 0x100000
_AT_SYSTEM_CALL = signal.SIGTRAP | 0x80


def can_trace() -> bool:
    """Return whether a process may follow its own children here."""
    return sys.platform == "linux" and killed_at(lambda: None, 0)


def killed_at(work: Callable[[], object], number: int) -> bool:
    """Do ``work`` in a child and kill it before its system call of this number, from 0.

    Returns:
        Whether it was killed; False when the work was done before, or cannot be followed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    child = os.fork()
    if not child:
        try:
            if libc.ptrace(_TRACE_ME, 0, None, None) == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
                work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    if not os.WIFSTOPPED(status):
        return False
    libc.ptrace(_SET_OPTIONS, child, None, _OPTIONS)
    stops, deliver = 0, 0
    while True:
        libc.ptrace(_SYSCALL, child, None, deliver)
        _, status = os.waitpid(child, 0)
        if not os.WIFSTOPPED(status):
            return False
        deliver = 0
        if os.WSTOPSIG(status) != _AT_SYSTEM_CALL:
            deliver = os.WSTOPSIG(status)
            continue
        if stops == 2 * number:  # each call stops twice
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return True
        stops += 1
