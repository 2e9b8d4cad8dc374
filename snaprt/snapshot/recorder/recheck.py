"""Runs executions again, and records those that then give other bits: a chip computes wrong.

The thread that executes waits for it. Of a program that spans processes, all of them run it again
or none does: each time, they meet before they start.
"""

from __future__ import annotations

import copy
import functools
import logging
import platform
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from snaprt import jaxapi, metrics
from snaprt.errors import ExecutionError
from snaprt.snapshot.format import schema
from snaprt.snapshot.recorder import bits
from snaprt.snapshot.recorder.conditions import Condition
from snaprt.snapshot.recorder.describe import Cause, describe_device
from snaprt.snapshot.recorder.filing import Filing
from snaprt.snapshot.recorder.pending import HeldExecution, RecordedExecutable
from snaprt.snapshot.recorder.triggers import OTHER_DEVICE

SECONDS_TO_MEET: Final = 10.0
"""How long the processes of a program wait for each other before they run it again."""

_log = logging.getLogger("snaprt.snapshot")

_Run = tuple[Sequence[Any], jaxapi.Device | None]
"""The outputs of a run, and where it ran if that was another device."""


class _Finding(NamedTuple):
    """What is wrong with an execution."""

    wrong_run: int
    table: np.ndarray  # a bool for each device and output: whether they differ there
    words: str  # which runs differ
    again: _Run | None  # the second run, where that differs
    suspects: tuple[jaxapi.Device, ...] | None = None  # where that is known otherwise


class Rechecks:
    """Runs executions again.

    Args:
        filing: Writes what is recorded.
        failed: Is told of each execution that is recorded, and what its files say.
        say_once: Tells the user what it was not told before.
    """

    def __init__(
        self,
        filing: Filing,
        failed: Callable[[HeldExecution, Cause], None],
        say_once: Callable[[str], None],
    ) -> None:
        self._filing = filing
        self._failed = failed
        self._say_once = say_once
        self._counts: dict[str, int] = {}  # how many of each graph ran again
        self._left_alone: set[str] = set()  # graphs that the processes did not meet for
        self._not_deterministic: set[str] = set()  # graphs
        self._reported: set[object] = set()  # of copies that differ

    def applies(self, executable: RecordedExecutable, conditions: Sequence[Condition]) -> bool:
        """Return whether executions may run again for these conditions; say once why not.

        What it goes by is the same in all processes of a program.
        """
        what = f"{executable.name}.{executable.graph_id} is not re-checked"
        if not executable.is_pure:
            self._say_once(f"{what}: its effects, such as callbacks, would happen twice")
        elif executable.graph_id in self._left_alone:
            return False
        elif spans_processes(executable) and any(condition.is_local for condition in conditions):
            self._say_once(
                f"{what}: it spans processes, and rank=, time= and clock= may hold in some of them "
                "only. With recheck, use execution=, step=, every= or first="
            )
        else:
            return True
        return False

    def check(self, execution: HeldExecution) -> None:
        """Run an execution again whose outputs are on their way, and record it if they differ.

        Raises:
            ExecutionError: It could not run again here, while other processes wait for that.
        """
        executable = execution.executable
        places = bits.comparable(execution.outputs or (), executable.devices)
        if not places:
            return
        try:
            execution.wait()
        except Exception:  # it failed: that is told elsewhere
            return
        with metrics.timed("RecheckTime"):
            number = self._counts[executable.graph_id] = (
                self._counts.get(executable.graph_id, 0) + 1
            )
            try:
                finding = self._look(execution, places, number)
            except ExecutionError:
                raise
            except Exception as error:
                if spans_processes(executable):
                    raise ExecutionError(
                        f"{executable.name}.{executable.graph_id} could not be run again for a "
                        f"re-check, in which other processes take part: {error}",
                        hint="remove recheck from --when or SNAPRT_RECORD",
                    ) from error
                self._filing.writer.complain(error, f"re-checking {executable.name}")
                return
        if finding is not None:
            self._accuse(execution, places, finding)

    def _look(self, execution: HeldExecution, places: list[int], number: int) -> _Finding | None:
        """Run it again, once more if that differs, and return what is wrong, if anything is."""
        devices = execution.executable.devices
        elsewhere = self._other_devices(execution, number)
        try:
            ready = _inputs(execution)
        except Exception as error:  # no memory for copies: the other processes do not wait for long
            self._left_alone.add(execution.executable.graph_id)
            self._filing.writer.complain(error, f"re-checking {execution.executable.name}")
            return None
        if not self._meet(execution, f"{number}.2"):
            return None
        first: _Run = [execution.outputs[place] for place in places], None  # type: ignore[index]
        second = _run(execution, places, ready, elsewhere[0] if elsewhere else None)
        del ready
        table = bits.differences(first[0], second[0], devices)
        copies = bits.deviating_copies(first[0], devices)
        metrics.counter_add("Rechecks")
        if table.any():
            third_device = elsewhere[1] if len(elsewhere) > 1 else None
            return self._judge(execution, places, table, (first, second), third_device, number)
        return self._judge_copies(execution, places, copies) if copies else None

    def _judge(
        self,
        execution: HeldExecution,
        places: list[int],
        table: np.ndarray,
        runs: tuple[_Run, _Run],
        device: jaxapi.Device | None,
        number: int,
    ) -> _Finding | None:
        """Run it a third time, which tells which of two runs was wrong, if one was."""
        executable = execution.executable
        first, second = runs
        ready = _inputs(execution)
        if not self._meet(execution, f"{number}.3"):
            return _Finding(0, table, "runs 1 and 2 differ; there was no third run", second)
        third = _run(execution, places, ready, device)
        with_first, with_second = (
            not bits.differences(run[0], third[0], executable.devices).any() for run in runs
        )
        graph = executable.graph_id
        if graph in self._not_deterministic or not (with_first or with_second):
            self._not_deterministic.add(graph)
            metrics.counter_add("RecheckNotDeterministic")
            self._say_once(
                f"{executable.name}.{graph} is not deterministic: three runs of one execution gave "
                "three different results. Such executions are counted (RecheckNotDeterministic), "
                "but not recorded"
            )
            return None
        own = executable.devices[0]
        if second[1] is None:
            if with_second:
                return _Finding(1, table, "run 1 differs from runs 2 and 3, which agree", second)
            return _Finding(2, table, "run 2 differs from runs 1 and 3, which agree", second)
        where = [f"{_name(run[1] or own)}" for run in (first, second, third)]
        if with_second:
            words = f"run 1 on {where[0]} differs from runs 2 and 3 on {where[1]} and {where[2]}"
            return _Finding(1, table, f"{words}, which agree", second, (own,))
        if third[1] is not None:
            words = f"run 2 on {where[1]} differs from runs 1 and 3 on {where[0]} and {where[2]}"
            return _Finding(2, table, f"{words}, which agree", second, (second[1],))
        words = f"run 1 on {where[0]} differs from run 2 on {where[1]}, and run 3 on {where[2]}"
        return _Finding(0, table, f"{words} agrees with run 1: one of the two is wrong", second, ())

    def _judge_copies(
        self, execution: HeldExecution, places: list[int], copies: dict[int, tuple[int, ...]]
    ) -> _Finding | None:
        """Return what is wrong where devices hold other copies of an output, unless it is known."""
        metrics.counter_add("RecheckReplicaMismatch")
        mismatch = execution.executable.graph_id, tuple(copies.items())
        if mismatch in self._reported:
            return None
        self._reported.add(mismatch)
        devices = execution.executable.devices
        table = np.zeros((len(devices), len(places)), bool)
        for place, deviating in copies.items():
            table[list(deviating), place] = True
        suspects = {number for deviating in copies.values() for number in deviating}
        is_majority = 2 * len(suspects) < len(devices)
        words = "replicas of outputs differ from those on most devices"
        if not is_majority:
            words = "replicas of outputs differ, and no version of them is on most devices"
        words += (
            ", in both runs (jax.shard_map with check_vma=False may return different values as "
            "replicas; this is reported once)"
        )
        accused = tuple(devices[number] for number in sorted(suspects)) if is_majority else ()
        return _Finding(0, table, words, None, accused)

    def _accuse(self, execution: HeldExecution, places: list[int], finding: _Finding) -> None:
        """Count it, say it, and record the execution with the outputs of both runs."""
        executable, devices = execution.executable, execution.executable.devices
        if finding.again is not None:
            metrics.counter_add("RecheckMismatch")
        differing = np.flatnonzero(finding.table.any(1))
        suspects = finding.suspects
        if suspects is None:
            suspects = tuple(devices[number] for number in _most(finding.table))
        names = [
            executable.output_names[places[column]]
            for column in np.flatnonzero(finding.table.any(0))
        ]
        whose = f"execution {execution.moment.execution} of {executable.name}.{executable.graph_id}"
        step = f" (step {execution.moment.step})" if execution.moment.step >= 0 else ""
        on = ", ".join(map(_name, suspects or [devices[number] for number in differing]))
        where = f", on {on}" if finding.again is None or finding.again[1] is None else ""
        if not suspects and finding.suspects is None:
            where += " alike, so the device at fault cannot be identified"
        sentence = (
            f"{whose}{step} on host {platform.node()}: {finding.words}. Outputs that differ: "
            f"{', '.join(names)}{where}"
        )
        second = finding.again[1] if finding.again is not None else None
        ran_on = [devices[0], second or devices[0]] if len(devices) == 1 else []
        execution.recheck = schema.RecheckRecord(
            wrong_run=finding.wrong_run,
            devices=tuple(describe_device(devices[number]) for number in differing),
            suspects=tuple(map(describe_device, suspects)),
            outputs=tuple(names),
            ran_on=tuple(map(describe_device, ran_on)),
            finding=sentence,
        )
        conditions = execution.rechecked_for
        cause = Cause(f"{conditions[0].text} ({finding.words})")
        _log.error(
            "a device computed wrong results: %s. Recorded in %s", sentence, execution.plan.folder
        )
        if self._filing.admits(execution, conditions, runs=2):
            self._filing.queue(execution, "inputs", conditions, cause)
            self._filing.queue(execution, "outputs", conditions, cause)
            if finding.again is not None:
                again = copy.copy(execution)
                again.run_number, again.outputs = 2, list(execution.outputs or ())
                for place, array in zip(places, finding.again[0], strict=True):
                    again.outputs[place] = array
                self._filing.queue(again, "outputs", conditions, cause)
        self._failed(execution, cause)

    def _other_devices(self, execution: HeldExecution, number: int) -> list[jaxapi.Device]:
        """Return the devices on which to run it again, where another one is asked for."""
        if all(condition.value != OTHER_DEVICE for condition in execution.rechecked_for):
            return []
        executable = execution.executable
        own = executable.devices[0]
        others = [] if len(executable.devices) > 1 else _devices_like(own)
        if not others:
            of_one = len(executable.devices) == 1
            why = "it runs on several devices"
            if of_one:
                why = f"this process has no other {own.device_kind} device"
            self._say_once(
                f"{executable.name}.{executable.graph_id} is re-checked where it ran, despite "
                f"recheck=device: {why}"
            )
            return []
        turn = number % len(others)
        return [*others[turn:], *others[:turn]]

    def _meet(self, execution: HeldExecution, run: str) -> bool:
        """Return whether all processes of a program are about to run it again; wait for them."""
        executable = execution.executable
        if not spans_processes(executable):
            return True
        processes = jaxapi.processes_of(executable.devices)
        name = f"snaprt/recheck/{executable.graph_id}/{execution.moment.execution}/{run}"
        if jaxapi.all_arrive(name, processes, SECONDS_TO_MEET):
            return True
        self._left_alone.add(executable.graph_id)
        self._say_once(
            f"{executable.name}.{executable.graph_id} is no longer re-checked: not all of its "
            f"processes were ready to run execution {execution.moment.execution} again within "
            f"{SECONDS_TO_MEET:g} s. Start all processes with the same --when"
        )
        return False


def spans_processes(executable: RecordedExecutable) -> bool:
    """Return whether a program runs on devices of several processes."""
    return len(jaxapi.processes_of(executable.devices)) > 1


def _inputs(execution: HeldExecution) -> list[Any]:
    """Return the inputs of an execution for another run, which may take the memory of its own."""
    donated = frozenset(execution.executable.donated)
    return [
        jaxapi.copy_array(array) if place in donated and isinstance(array, jax.Array) else array
        for place, array in enumerate(execution.inputs)
    ]


def _run(
    execution: HeldExecution, places: list[int], inputs: Sequence[Any], device: jaxapi.Device | None
) -> _Run:
    """Run it again; return the outputs that are compared, on the devices of the first run."""
    results = execution.executable.run_again(inputs, device)
    if device is None:
        return [results[place] for place in places], None
    assert execution.outputs is not None
    moved = []
    for place in places:
        like: Any = execution.outputs[place]
        data = jax.device_put(results[place], jaxapi.data_of_keys(like).sharding)
        moved.append(jaxapi.keys_of_data(data, like))
    return moved, device


def _most(table: np.ndarray) -> list[int]:
    """Return the devices on which most outputs differ, unless all do alike."""
    counts = table.sum(1)
    most = [int(number) for number in np.flatnonzero(counts == counts.max())]
    return most if len(most) < len(counts) or len(counts) == 1 else []


def _name(device: jaxapi.Device) -> str:
    name = f"{device.platform}:{device.id}"
    return name if jax.process_count() == 1 else f"{name} of rank {device.process_index}"


@functools.cache
def _devices_like(device: jaxapi.Device) -> list[jaxapi.Device]:
    """Return this process's other devices of the same kind."""
    return [
        other
        for other in jax.local_devices(backend=device.platform)
        if other != device and other.device_kind == device.device_kind
    ]
