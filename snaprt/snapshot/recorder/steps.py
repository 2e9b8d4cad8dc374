"""Counts the steps that each thread has marked; must not know what a step runs or who asks."""

from __future__ import annotations

import threading


class _OfThread(threading.local):
    steps = 0


_of_thread = _OfThread()


def steps_ended() -> int:
    """Return how many steps this thread has marked."""
    return _of_thread.steps


def end_step() -> int:
    """Count one more step of this thread, and return how many there are now."""
    _of_thread.steps += 1
    return _of_thread.steps
