"""Counts the steps that each thread has marked; must not know what a step runs or who asks."""

from __future__ import annotations

import threading

_of_thread = threading.local()


def steps_ended() -> int:
    """Return how many steps this thread has marked."""
    return getattr(_of_thread, "steps", 0)


def end_step() -> int:
    """Count one more step of this thread, and return how many there are now."""
    _of_thread.steps = steps = steps_ended() + 1
    return steps
