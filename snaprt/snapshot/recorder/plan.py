"""What is asked to be recorded and where, by the environment, a scope or the user's callback.

Every execution asks, and a program may change the variables between two: `current_plan` compares
their texts with those it has read last, which takes 0.5 us.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from snaprt import metrics, settings
from snaprt.errors import SnaprtError
from snaprt.host.whole_files import from_root
from snaprt.snapshot.recorder.conditions import BOTH_ROLES, Condition, parse_conditions
from snaprt.snapshot.recorder.flags import dump_folder_of, folder_of
from snaprt.snapshot.recorder.triggers import Trigger

_log = logging.getLogger("snaprt.snapshot")

Hold = Literal["device", "hybrid", "host"]

DEFAULT_FOLDER: Final = "snaprt-dump"
"""Where conditions record that nobody gave a directory."""


@dataclass(frozen=True)
class Plan:
    """What is recorded while the environment stays as it is."""

    folder: Path
    conditions: tuple[Condition, ...]  # executions are recorded for which one of these holds
    keep_last: int  # how many executions the flight recorder holds
    keep_bytes: int  # how many bytes of them stay in memory
    # Where inputs are held whose execution may fail: on the device, donated ones on the host, or
    # all on the host.
    hold: Hold
    stops: bool  # whether the program is stopped when a failure was recorded
    queue_bytes: int | None = None  # how many may wait to be written; None: as memory allows

    @functools.cached_property
    def texts(self) -> tuple[str, ...]:
        """Its conditions, as they were written."""
        return tuple(condition.text for condition in self.conditions)

    @functools.cached_property
    def triggers(self) -> tuple[Trigger, ...]:
        """What its conditions wait for."""
        return tuple(
            condition.trigger for condition in self.conditions if condition.trigger is not None
        )

    @functools.cached_property
    def wants_flag(self) -> bool:
        """Whether programs should say of themselves that an output holds a NaN or an infinity."""
        return any(trigger.wants_flag for trigger in self.triggers)

    @functools.cached_property
    def waits_for_errors(self) -> bool:
        """Whether an error of the program leads to a snapshot."""
        return self.keep_last > 0 or any(trigger.counts_programs for trigger in self.triggers)

    @functools.cached_property
    def withholds_donation(self) -> bool:
        """Whether programs should be compiled without donation, so that inputs outlive them."""
        waits = any(not trigger.runs_again for trigger in self.triggers)
        return self.hold == "device" and (waits or self.keep_last > 0)


_NEURON_HOLDS: Final[dict[str, Hold]] = {
    "on_nrt_error": "device",
    "on_nrt_error_hybrid": "hybrid",
    "on_nrt_error_cpu": "host",
}

_texts = settings.Texts(
    *("XLA_FLAGS", "SNAPRT_DUMP_DIR", "SNAPRT_RECORD", "SNAPRT_RECORD_KEEP_LAST"),
    *("NEURON_DUMP_HLO_SNAPSHOT", "NEURON_FRAMEWORK_DEBUG", "NEURON_NC0_ONLY_SNAPSHOT"),
    *("SNAPRT_RECORD_HOLD", "SNAPRT_RECORD_STOP", "SNAPRT_RECORD_KEEP_BYTES", "RANK"),
    "SNAPRT_RECORD_QUEUE_BYTES",
)

_seen: tuple[list[Any], Plan | None] = ([], None)  # the texts, and what follows of them


class _OfThread(threading.local):
    plan: Plan | None = None  # what a scope asks for, in place of the environment
    steps = 0  # how many have ended
    step_to_tell: tuple[float, Callable[[], object]] = (math.inf, int)


_of_thread = _OfThread()


def steps_ended() -> int:
    """Return how many steps this thread has marked."""
    return _of_thread.steps


def end_step() -> int:
    """Count one more step of this thread, and return how many there are now."""
    _of_thread.steps = steps = _of_thread.steps + 1
    number, tell = _of_thread.step_to_tell
    if steps >= number:
        _of_thread.step_to_tell = math.inf, int
        tell()
    return steps


def tell_at_step(number: float, tell: Callable[[], object]) -> None:
    """Call ``tell`` when this thread has marked so many steps, or earlier; the last one given."""
    _of_thread.step_to_tell = min(number, _of_thread.step_to_tell[0]), tell


def set_thread_plan(plan: Plan | None) -> Plan | None:
    """Put a plan in the place of the environment's for this thread; return what stood there."""
    before, _of_thread.plan = _of_thread.plan, plan
    return before


def current_plan() -> Plan | None:
    """Return what is to be recorded, or None while recording is off.

    A setting that cannot be used is logged once and counts as off.
    """
    global _seen
    override = _of_thread.plan
    if override is not None:
        return override
    texts = _texts.now()
    seen = _seen
    if texts == seen[0]:
        return seen[1]
    plan: Plan | None = None
    try:
        plan = _read_plan()
    except SnaprtError as error:
        _log.error("nothing is recorded: %s", error)
    _seen = (texts, plan)
    return plan


def check_plan() -> None:
    """Raise what `current_plan` would log.

    Raises:
        UsageError: A variable has a value that is not allowed.
    """
    _read_plan()


def _read_plan(directory: Path | None = None, otherwise: tuple[Condition, ...] = ()) -> Plan | None:
    """Read what the environment asks for.

    Args:
        directory: The directory, whatever the environment says.
        otherwise: The conditions where the environment has none.
    """
    folder = recording_folder()
    text: str | None = settings.get("SNAPRT_RECORD")
    keep_last: int = settings.get("SNAPRT_RECORD_KEEP_LAST")
    hold: Hold = settings.get("SNAPRT_RECORD_HOLD")
    stops: bool = settings.get("SNAPRT_RECORD_STOP")
    conditions = parse_conditions(text or "")
    neuron = _neuron_conditions()
    if neuron:
        mode: str = settings.get("NEURON_DUMP_HLO_SNAPSHOT")
        if mode in _NEURON_HOLDS:
            # The guide: "snapshots will be automatically produced and execution terminated".
            hold, stops = _NEURON_HOLDS[mode], True
        conditions += neuron
    elif folder is not None and text is None and not keep_last:
        conditions = parse_conditions("all")
    if not conditions and not keep_last:
        conditions = otherwise
        if not conditions:
            return None
    return Plan(
        folder=directory or folder or _default_folder(),
        conditions=conditions,
        keep_last=keep_last,
        keep_bytes=settings.get("SNAPRT_RECORD_KEEP_BYTES"),
        hold=hold,
        stops=stops,
        queue_bytes=settings.get("SNAPRT_RECORD_QUEUE_BYTES"),
    )


def recording_folder() -> Path | None:
    """Return the folder of the recording that the environment names, if it does.

    Raises:
        UsageError: XLA_FLAGS asks for snapshots in what is no folder.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    chosen: Path | None = settings.get("SNAPRT_DUMP_DIR")
    folder = dump_folder_of(flags) if chosen is None else from_root(chosen)
    return folder or (folder_of(flags) if _neuron_conditions() else None)


def plan_with(conditions: tuple[Condition, ...] | None, folder: Path | None) -> Plan:
    """Return the environment's plan with other conditions, another directory, or both.

    Where neither says what is recorded, everything is.

    Raises:
        UsageError: A variable has a value that is not allowed.
    """
    plan = _read_plan(folder, parse_conditions("all"))
    assert plan is not None
    return plan if conditions is None else dataclasses.replace(plan, conditions=conditions)


def _neuron_conditions() -> tuple[Condition, ...]:
    """Return what NEURON_DUMP_HLO_SNAPSHOT asks for.

    Source: AWS Neuron, "Developer Guide for Training with PyTorch NeuronX", section "Snapshotting
    with Torch-Neuronx 1.13", and "PyTorch NeuronX Environment Variables".
    """
    mode: str = settings.get("NEURON_DUMP_HLO_SNAPSHOT")
    if mode == "0" or not settings.get("NEURON_FRAMEWORK_DEBUG"):
        return ()
    words = ("all",) if mode == "1" else ("nan", "error")
    where = ", rank=master, device=0" if settings.get("NEURON_NC0_ONLY_SNAPSHOT") else ""
    return parse_conditions(";".join(word + where for word in words))


@functools.cache
def _default_folder() -> Path:
    folder = from_root(Path(DEFAULT_FOLDER))
    _log.warning("snapshots go to %s; --dump or SNAPRT_DUMP_DIR names another directory", folder)
    return folder


Callback = Callable[[str, int, int], str]
"""``callback(name, addressable_device_index, execution_count)`` returns what to write."""


def _record_all(name: str, addressable_device_index: int, execution_count: int) -> str:
    """Record both the inputs and the outputs of every execution: the default callback."""
    return "inputs outputs"


_lock = threading.Lock()
_callback: Callback = _record_all
_complained = False  # about the callback that is registered now


def register_hlo_snapshot_callback(callback: Callback | None) -> Callback:
    """Let ``callback`` decide what is recorded of each execution, while recording is on.

    It is called before each execution, once for each of its addressable devices, as
    ``callback(name, addressable_device_index, execution_count)``: the graph's name, the index of
    the device among the executable's addressable devices, and the number of earlier executions of
    this executable on that device, so 0 for the first.

    It returns a string of words: ``inputs``, ``outputs``, both, or ``''`` to skip the execution.
    If it raises or returns anything else, the execution is not recorded. The first time, that is
    logged (logger ``snaprt.snapshot``); every time, it is counted (``SnapshotCallbackError``).

    Args:
        callback: The function, or None for the default, which records everything.

    Returns:
        The callback that it replaces.

    Examples:
        >>> def third(name, device_index, execution_count):
        ...     return "inputs outputs" if execution_count == 2 else ""
        >>> before = snaprt.register_hlo_snapshot_callback(third)
        >>> with snaprt.record(folder="third"):
        ...     for _ in range(4):
        ...         y = jax.jit(jnp.cos)(jnp.ones(3))
        >>> snaprt.register_hlo_snapshot_callback(before) is third
        True
    """
    global _callback, _complained
    with _lock:
        before = _callback
        _callback = _record_all if callback is None else callback
        _complained = False
    return before


def records_all() -> bool:
    """Return whether the callback is the default one, so that it need not be asked."""
    return _callback is _record_all


def decide(name: str, device_index: int, count: int) -> frozenset[str]:
    """Ask the callback what to write of an execution on one device: ``inputs``, ``outputs``."""
    callback = _callback
    try:
        answer = callback(name, device_index, count)
    except Exception as error:
        _complain(callback, "failed", error)
        return frozenset()
    words = frozenset(answer.split()) if isinstance(answer, str) else None
    if words is not None and words <= BOTH_ROLES:
        return words
    _complain(callback, f"returned {answer!r:.200}", None)
    return frozenset()


def _complain(callback: Callback, what: str, error: Exception | None) -> None:
    global _complained
    metrics.counter_add("SnapshotCallbackError")
    with _lock:
        if _complained:
            return
        _complained = True
    _log.error(
        "the snapshot callback %r %s; this execution is not recorded. It should return '', "
        "'inputs', 'outputs' or 'inputs outputs'. Shown once.",
        callback,
        what,
        exc_info=error,
    )
