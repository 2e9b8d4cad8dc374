"""What a process has collected so far, and how far it is to go.

The command line sets the bound before the program has imported JAX.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Final


class EnoughSteps(SystemExit):
    """Ends a program that was to be collected for so many steps, as if it had ended by itself."""


@dataclass
class Collection:
    """What this process has collected; guarded by ``lock``."""

    programs: int = 0  # how many programs the run has wanted
    written: int = 0  # how many of them were not in the directory
    unwritten: int = 0  # how many the system refused to write
    without_digest: int = 0  # how many must be lowered before their executable is found
    # How many run over several devices, so that the layout of their results, and with it the
    # programs that use them, is not known for certain.
    over_devices: int = 0
    # How many could not be written, by reason.
    left_out: Counter[str] = field(default_factory=Counter)
    most_steps: int | None = None  # after how many steps the run ends
    lock: threading.Lock = field(default_factory=threading.Lock)


#: Of this process.
collection: Final = Collection()


def step_ended(steps: int) -> None:
    """Learn that a thread has ended so many steps.

    Raises:
        EnoughSteps: No more are wanted.
    """
    if collection.most_steps is not None and steps >= collection.most_steps:
        raise EnoughSteps
