"""One trigger, all ranks: what one rank records for how it ended, the others record too.

A NaN or an error appears on one rank, and its part of the arrays cannot be replayed without the
parts of the others. So the rank that strikes publishes which execution it records, and the others
write that execution from what they hold. Nothing here waits for another rank for more than 10 s.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from blake3 import blake3

from snaprt import jaxapi, metrics
from snaprt.channel import Channel, channel
from snaprt.snapshot.recorder.conditions import Condition
from snaprt.snapshot.recorder.describe import Cause
from snaprt.snapshot.recorder.filing import KEEP_LAST, Filing
from snaprt.snapshot.recorder.pending import HeldExecution, bytes_held
from snaprt.snapshot.recorder.plan import Plan, current_plan
from snaprt.snapshot.recorder.ranks.states import missing_file
from snaprt.units import format_spans

SECONDS: Final = 10.0
"""How long ranks wait for each other at most."""

_SECONDS_TO_LEAVE: Final = 4.0
_EVENT: Final = "record"
#: What is held of executions that have ended, for another rank may yet ask for them: at least the
#: last two, and more while their inputs are small.
_LEAST_HELD: Final = 2
_MOST_HELD: Final = 64
_MOST_BYTES: Final = 64 << 20
_MOST_SUSPECTS: Final = 4
_LOOK_SECONDS: Final = 0.05  # how long the writer waits for outputs before it writes something else
_log = logging.getLogger("snaprt.snapshot")

_Key = tuple[str, int]
"""A graph id, and the number of the execution."""


class Sharing:
    """Tells other ranks what this one records, and records what they tell.

    Args:
        filing: Writes what is recorded.
        dump_ring: Writes what the flight recorder holds.
    """

    def __init__(self, filing: Filing, dump_ring: Callable[[Cause], object]) -> None:
        self._filing = filing
        self._dump_ring = dump_ring
        self._channel: Channel | None = None
        self._plan: Plan | None = None
        self._lock = threading.RLock()  # a signal may come while the main thread has it
        self._lately: deque[tuple[HeldExecution, int]] = deque()
        self._lately_bytes = 0
        self._bytes: dict[int, int] = {}  # of the inputs of each executable
        self._suspects: deque[HeldExecution] = deque(maxlen=_MOST_SUSPECTS)
        self._begun: dict[str, int] = {}  # the last execution of each graph
        self._requested: dict[_Key, Cause] = {}  # that have not begun here
        self._awaited: set[_Key] = set()  # those of them that run on devices of this rank too
        self._recorded: set[_Key] = set()
        self._has_other_folder = False  # and so has said it
        self._recording_folder = ""  # where all ranks say that they record what this one does
        self._agreeing = threading.Lock()
        self._agreed: dict[str, bool] = {}  # whether programs of a group of ranks have flags

    def wants_flags(self, plan: Plan, ranks: Sequence[int]) -> bool:
        """Return whether programs of these ranks are to say of themselves if they have a NaN.

        Such a program has a collective operation more, so either all of its ranks run it or none
        does: those that look for nothing, or for something else, run the program as it is.
        """
        opened = channel() if len(ranks) > 1 else None
        if opened is None:
            return True
        texts = plan.texts
        group = _digest((texts, tuple(ranks)))
        with self._agreeing:
            if group not in self._agreed:
                self._agreed[group] = self._agree(opened, texts, group, ranks)
            return self._agreed[group]

    def _agree(
        self, opened: Channel, texts: Sequence[str], group: str, ranks: Sequence[int]
    ) -> bool:
        folder = _tell_what_is_recorded(opened, texts)
        end = time.monotonic() + SECONDS
        while True:
            missing = set(ranks) - {int(rank) for rank in opened.below(folder)}
            if not missing or time.monotonic() > end:
                break
            time.sleep(_LOOK_SECONDS)
        # Who looks a moment later may see one more: the first answer counts for all.
        answer = opened.put_first(f"flags/{group}", b"no" if missing else b"yes")
        if answer != b"yes":
            _log.warning(
                "not all ranks record what rank %d does (%s)%s: programs that they run together "
                "stay as they are, and their results are read to find NaN, which takes longer. "
                "Start all ranks with the same --when.",
                opened.rank,
                "; ".join(texts),
                f"; those that do not: {format_spans(missing)}" if missing else "",
            )
        return answer == b"yes"

    def join(self, plan: Plan) -> None:
        """Hear from the other ranks, if this process is one of several and a trigger is armed."""
        if not plan.triggers and not plan.keep_last:
            return
        self._plan = plan
        if self._channel is None:
            opened = channel()
            if opened is not None:
                self._channel = opened
                opened.listen(_EVENT, self._asked)
        if self._channel is not None:
            self._recording_folder = _tell_what_is_recorded(self._channel, plan.texts)

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank to tell, or none is to be told."""
        return self._channel is None

    def hold(self, execution: HeldExecution) -> None:
        """Hold an execution that begins; record it if another rank has asked for it already."""
        if self._channel is None:
            return
        key = _key(execution)
        number = execution.executable.number
        with self._lock:
            nbytes = self._bytes.get(number)
            if nbytes is None:
                nbytes = self._bytes[number] = bytes_held(execution.inputs)
            self._lately.append((execution, nbytes))
            self._lately_bytes += nbytes
            while len(self._lately) > _LEAST_HELD and (
                len(self._lately) > _MOST_HELD or self._lately_bytes > _MOST_BYTES
            ):
                self._lately_bytes -= self._lately.popleft()[1]
            self._begun[key[0]] = key[1]
            cause = self._requested.pop(key, None) if self._requested else None
        if cause is not None:
            self._filing.writer.call(functools.partial(self._record, execution, cause))
            self._awaited.discard(key)

    def suspect(self, execution: HeldExecution) -> None:
        """Hold an execution that another rank may accuse: its own arrays say nothing."""
        if self._channel is not None:
            with self._lock:
                self._suspects.append(execution)

    def claim(self, execution: HeldExecution) -> bool:
        """Take it upon oneself to record an execution; return whether nobody had yet."""
        if self._channel is None:
            return True
        with self._lock:
            key = _key(execution)
            is_new = key not in self._recorded
            self._recorded.add(key)
        return is_new

    def struck(self, execution: HeldExecution, reason: str) -> None:
        """Tell the other ranks that this one records an execution, and what for."""
        opened = self._channel
        if opened is None:
            return
        metrics.counter_add("SnapshotShared")
        graph_id, number = _key(execution)
        data = {
            "name": execution.executable.name,
            "graph_id": graph_id,
            "execution": number,
            "reason": reason,
            "folder": str(execution.plan.folder),
            "ranks": jaxapi.processes_of(execution.executable.devices),
        }
        opened.publish(_EVENT, data)  # at once: the launcher may be about to end the others

    def dumped(self) -> None:
        """Tell the other ranks that this one writes what its flight recorder holds."""
        if self._channel is not None:
            self._channel.publish(_EVENT, {"ring": True})

    def awaits_execution(self) -> bool:
        """Return whether another rank has recorded an execution that has yet to begin here.

        In the handler of a signal, it records what other ranks have asked for. The coordinator may
        not answer for seconds, so nobody asks it again until the process ends.
        """
        if self._channel is not None and threading.current_thread() is threading.main_thread():
            self._channel.hear()
        return bool(self._awaited)

    def leave(self) -> None:
        """Let the other ranks write what they have, before a signal ends this one."""
        if self._channel is not None:
            self._channel.leave(_SECONDS_TO_LEAVE)

    def finish(self, *, has_failed: bool) -> None:
        """Record what other ranks ask for while they, too, come to their end.

        A program that has failed waits for nobody: the others may wait for it.
        """
        opened = self._channel
        if opened is None:
            return
        self._filing.writer.flush(SECONDS)
        if not has_failed and all(self._agreed.values()):
            ranks = range(opened.count)
            if not jaxapi.all_arrive("snaprt/recorded", ranks, SECONDS - 1):  # with all else, 10 s
                self._warn_of_others(opened)
        opened.hear()
        with self._lock:
            requested, self._requested = self._requested, {}
            self._awaited.clear()
        for key, cause in requested.items():
            self._miss(key, cause, "it did not run here while it was watched")

    def _warn_of_others(self, opened: Channel) -> None:
        """Say which ranks do not share what they record, if some have not said that they do."""
        missing = set(range(opened.count)) - {
            int(rank) for rank in opened.below(self._recording_folder)
        }
        if missing - opened.ended():
            _log.warning(
                "rank %d waited %g s for ranks that do not record what it does: %s. Start all "
                "ranks with the same --when and --keep-last.",
                opened.rank,
                SECONDS,
                format_spans(missing),
            )

    def _asked(self, rank: int, data: dict[str, Any]) -> None:
        """Hear that a rank records an execution, in the channel's thread."""
        opened, plan = self._channel, self._plan
        if opened is None or plan is None or rank == opened.rank:
            return
        if data.get("ring"):
            if plan.keep_last:
                self._dump_ring(Cause(KEEP_LAST, f"rank {rank} wrote what it held"))
            return
        if data["folder"] != str(plan.folder) and not self._has_other_folder:
            self._has_other_folder = True
            _log.warning(
                "rank %d records into %s, and rank %d into %s: put the files of all ranks into one "
                "folder to replay them",
                *(rank, data["folder"], opened.rank, plan.folder),
            )
        key = data["graph_id"], data["execution"]
        cause = Cause(f"rank {rank}: {data['reason']}")
        with self._lock:
            if key in self._recorded:
                return
            execution = self._find(key)
            if execution is None and self._begun.get(key[0], -1) < key[1]:
                self._requested[key] = cause
                if opened.rank in data["ranks"]:
                    self._awaited.add(key)
                return
        if execution is None:
            self._miss(key, cause, "it no longer holds that execution")
        else:
            self._filing.writer.call(functools.partial(self._record, execution, cause))

    def _find(self, key: _Key) -> HeldExecution | None:
        candidates = [*self._suspects, *(execution for execution, _ in self._lately)]
        return next((execution for execution in candidates if _key(execution) == key), None)

    def _record(self, execution: HeldExecution, cause: Cause) -> None:
        """Record an execution for another rank, in the writer's thread."""
        if not self.claim(execution):
            return
        conditions: tuple[Condition, ...] = tuple(execution.watching) or execution.plan.conditions
        if self._filing.admits(execution, conditions):
            self._filing.queue(execution, "inputs", conditions, cause)
            metrics.counter_add("SnapshotForOtherRank")
            self._record_outputs(execution, cause, conditions, time.monotonic() + SECONDS)

    def _record_outputs(
        self, execution: HeldExecution, cause: Cause, conditions: Sequence[Condition], until: float
    ) -> None:
        """Record the outputs once they are there; an execution may wait for a rank that is dead.

        What else is to be written does not wait for them.
        """
        has_ended = execution.ends_within(_LOOK_SECONDS)
        if has_ended and execution.has_outputs():
            self._filing.queue(execution, "outputs", conditions, cause)
        elif not has_ended and time.monotonic() < until:
            again = functools.partial(self._record_outputs, execution, cause, conditions, until)
            self._filing.writer.call(again)

    def _miss(self, key: _Key, cause: Cause, why: str) -> None:
        """Say that an execution is missing from the set, in the log and beside the states."""
        opened, plan = self._channel, self._plan
        assert opened is not None
        assert plan is not None
        metrics.counter_add("SnapshotMissing")
        _log.warning(
            "execution %d of graph %s is recorded without rank %d: %s (%s)",
            key[1],
            key[0],
            opened.rank,
            why,
            cause.reason,
        )
        line = {"graph_id": key[0], "execution": key[1], "why": why, "time": time.time()}
        path = missing_file(plan.folder, opened.rank)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**line, "reason": cause.reason}) + "\n")
        except OSError as error:
            _log.warning("%s cannot be written: %s", path, error)


def tell_plan() -> None:
    """Tell the other ranks what this one records, so that they need not wait for its first program.

    To be called once the job is joined.
    """
    plan, opened = current_plan(), channel()
    if plan is not None and opened is not None:
        _tell_what_is_recorded(opened, plan.texts)


def _tell_what_is_recorded(opened: Channel, texts: Sequence[str]) -> str:
    """Tell the other ranks for which conditions this one records; return where all do so."""
    folder = f"recording/{_digest(texts)}"
    opened.put(f"{folder}/{opened.rank}", b"")
    return folder


def _digest(content: object) -> str:
    return blake3(repr(content).encode()).hexdigest()[:16]


def _key(execution: HeldExecution) -> _Key:
    return execution.executable.graph_id, execution.moment.execution
