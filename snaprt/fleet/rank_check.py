"""Compares, before a program of several processes first runs, what each of them is about to run.

XLA does not: ranks whose programs differ compute wrong numbers, or wait for each other forever. A
program that all ranks have agreed on is not compared again.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from blake3 import blake3

from snaprt import jaxapi, metrics, settings
from snaprt.channel import Channel, channel
from snaprt.compile.cached.fast_key import devices_of_placement
from snaprt.compile.lower import digest_of_lowering, lowering, placed
from snaprt.compile.summaries import difference_lines, summarize, summary_text
from snaprt.errors import RankError
from snaprt.graph.digest import Unstable
from snaprt.graph.program import Program
from snaprt.runtime.events import Cut, Subscriber, subscribe
from snaprt.snapshot.recorder.plan import steps_ended
from snaprt.units import format_spans

#: Seconds that a rank which has found a difference waits for what only others know.
_PATIENCE: Final = 10.0
_MOST_PLACES: Final = 3
_PAUSES: Final = (0.001, 0.05)  # between two looks at who has arrived: the first, and the longest
_MOST_KEPT: Final = 64
_LARGEST_KEPT: Final = 1 << 22  # bytes of a module
_CHUNK: Final = 0.5  # of waiting for the answer, after which a rank looks what it is asked for
_LAZY_GRAPH: Final = "the lazy graph"


_log = logging.getLogger("snaprt.fleet")

Reports = Mapping[int, Mapping[str, str]]
"""What each rank is about to run: the name, the digest, and the user's line."""


@dataclass(frozen=True)
class _Planned:
    """A program that this rank is about to run for the first time."""

    name: str
    digest: str  # the same where the program, its devices and compile options are
    ranks: tuple[int, ...]  # whose devices it runs on
    summarize: Callable[[], str]  # its operations, as `snaprt.compile.summaries` writes them
    # The program of this name that all ranks agreed on before, likewise.
    summarize_last: Callable[[], str] | None = None


@functools.cache
def start() -> None:
    """Compare programs from here on, of lazy graphs and of ``jax.jit``."""
    jaxapi.when_job_is_joined(channel)  # others ask where this rank is, or whether it has ended
    check = _RankCheck()
    subscribe(_LazyPrograms(check))
    jaxapi.before_compile_or_load(check.of_jit)


class _LazyPrograms(Subscriber):
    def __init__(self, check: _RankCheck) -> None:
        self._check = check

    def compiling(self, cut: Cut, program: Program, promoted: frozenset[int]) -> None:
        self._check.of_graph(program, promoted)


class _RankCheck:
    """What this process has compared so far."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._agreed: set[str] = set()
        self._modules: dict[str, Any] = {}  # of ``jax.jit``, the last of each name
        self._counts: Counter[str] = Counter()

    def of_jit(self, planned: jaxapi.PlannedCompilation) -> None:
        """Compare a program of ``jax.jit``; see `_compare`."""
        ranks = jaxapi.processes_of(planned.devices)
        opened = channel() if len(ranks) > 1 else None
        if opened is None:
            return
        calls = jaxapi.custom_calls(planned.module)
        content = jaxapi.content_in_any_process(planned.module, names_objects=bool(calls.bound_to))
        digest = _digest(content, planned.options, planned.devices)
        name = planned.name.removeprefix("jit_")
        last = self._modules.get(name)
        self._compare(
            opened,
            _Planned(
                name,
                digest,
                ranks,
                lambda: summarize(planned.module),
                None if last is None else lambda: summarize(last),
            ),
        )
        if len(content) <= _LARGEST_KEPT:
            self._modules[name] = planned.module
            if len(self._modules) > _MOST_KEPT:
                del self._modules[next(iter(self._modules))]

    def of_graph(self, program: Program, promoted: frozenset[int]) -> None:
        """Compare a lazy graph; see `_compare`."""
        devices = devices_of_placement(program.placement)
        ranks = jaxapi.processes_of(devices)
        opened = channel() if len(ranks) > 1 else None
        if opened is None:
            return

        @functools.cache
        def module() -> Any:
            with placed(program.placement):
                return lowering(program, promoted)().compiler_ir("stablehlo")

        try:
            content = digest_of_lowering(program, promoted).encode()
        except Unstable:
            calls = jaxapi.custom_calls(module())
            content = jaxapi.content_in_any_process(module(), names_objects=bool(calls.bound_to))
        digest = _digest(content, jaxapi.options_in_effect(devices), devices)
        self._compare(opened, _Planned(_LAZY_GRAPH, digest, ranks, lambda: summarize(module())))

    def _compare(self, opened: Channel, planned: _Planned) -> None:
        """Wait until all ranks of a program are about to run it.

        Raises:
            RankError: One of them runs another program, or does not arrive in time.
        """
        with self._lock:
            if planned.digest in self._agreed:
                return
            group = blake3(repr(planned.ranks).encode()).hexdigest()[:16]
            # The main threads of all ranks come to their programs in one order. Other threads may
            # not, so theirs are told apart by their names.
            is_main = threading.current_thread() is threading.main_thread()
            order = f"{group}/{'main' if is_main else 'thread ' + planned.name}"
            number = self._counts[order]
            self._counts[order] += 1
        with metrics.timed("RankCheckTime"):
            _Comparison(opened, planned, f"check/{order}", number).run()
        metrics.counter_add("RankChecks")
        with self._lock:
            self._agreed.add(planned.digest)


def _digest(content: bytes, options: bytes, devices: Sequence[jaxapi.Device]) -> str:
    parts = (content, options, repr([device.id for device in devices]).encode())
    return blake3(b"".join(blake3(part).digest() for part in parts)).hexdigest()


class _Comparison:
    """One program, as one rank compares it with the others.

    The lowest rank reads what all have to say, and writes the answer that the others wait for.
    """

    def __init__(self, opened: Channel, planned: _Planned, order: str, number: int) -> None:
        self._channel = opened
        self._planned = planned
        self._order = order
        self._number = number
        self._folder = f"{order}/{number}"
        self._timeout: float = settings.get("SNAPRT_CHECK_RANKS_TIMEOUT")
        self._step = steps_ended()

    def run(self) -> None:
        opened, planned = self._channel, self._planned
        report = {
            "name": planned.name,
            "digest": planned.digest,
            "place": jaxapi.place_text(jaxapi.users_place(jaxapi.user_frames())),
        }
        if not opened.put(f"{self._folder}/said/{opened.rank}", json.dumps(report).encode()):
            _log.warning("%s is not checked: the coordinator does not answer", self._what())
            return
        answer = self._lead() if opened.rank == planned.ranks[0] else self._follow()
        if answer:
            metrics.counter_add("RankMismatch")
            late = f" after {self._timeout:g} s; " in answer
            raise RankError(answer, hint=_LATE if late else _DIFFERENT)

    def _lead(self) -> str:
        """Return what is wrong, after all have been told; empty where nothing is."""
        opened, planned = self._channel, self._planned
        reports = self._wait_for_all()
        missing = [rank for rank in planned.ranks if rank not in reports]
        answer = "\n".join(
            [
                *(self._difference_lines(reports) if _differs(reports) else ()),
                *(self._missing_lines(missing) if missing else ()),
            ]
        )
        opened.put(f"{self._folder}/answer", answer.encode())
        if self._number:  # all have read the answer before, or they would not be here
            opened.delete(f"{self._order}/{self._number - 1}")
        return answer

    def _wait_for_all(self) -> Reports:
        """Return what each rank has said, of those that have come in time."""
        opened, planned = self._channel, self._planned
        end = time.monotonic() + self._timeout
        pause, longest = _PAUSES
        while True:
            reports = {
                int(rank): json.loads(text)
                for rank, text in opened.below(f"{self._folder}/said").items()
            }
            missing = set(planned.ranks) - set(reports)
            if not missing or time.monotonic() > end:
                return reports
            # Whoever differs is told at once, whether all have come or not.
            if pause == longest and _differs(reports):
                end = min(end, time.monotonic() + _PATIENCE)
            if pause == longest and missing & opened.ended():
                return reports
            time.sleep(pause)
            pause = min(longest, 1.5 * pause)

    def _follow(self) -> str:
        opened, planned = self._channel, self._planned
        lead = planned.ranks[0]
        has_come = False
        is_asked = False
        end = time.monotonic() + self._timeout
        while True:
            answer = opened.get(f"{self._folder}/answer", _CHUNK)
            if answer is not None:
                return answer.decode()
            if not has_come and opened.get(f"{self._folder}/said/{lead}") is not None:
                has_come = True
                end = time.monotonic() + self._timeout + 2 * _PATIENCE
            if time.monotonic() > end:
                return "\n".join(self._missing_lines([lead]))
            if not is_asked and opened.get(f"{self._folder}/wanted/{opened.rank}") is not None:
                is_asked = True
                opened.put(f"{self._folder}/summary/{opened.rank}", planned.summarize().encode())
            if opened.get(f"ended/{lead}") is not None:
                end = 0.0  # its answer may have come just before

    def _missing_lines(self, missing: Sequence[int]) -> Iterator[str]:
        opened = self._channel
        ended = opened.ended()
        places = opened.places(set(missing) - ended, _PATIENCE)
        waited = "" if ended.issuperset(missing) else f" after {self._timeout:g} s"
        for rank in missing[:_MOST_PLACES]:
            if rank in ended:
                where = "its program has ended"
            elif rank in places:
                where = f"it is at {places[rank]}"
            else:
                where = "it does not answer: it is dead, or stuck in native code"
            yield f"rank {rank} has not reached {self._what()}{waited}; {where}"
        if len(missing) > _MOST_PLACES:
            yield f"nor have {_ranks(missing[_MOST_PLACES:])}"
        # They may run a program that needs no comparison any more, where this rank needs a new one.
        last = self._planned.summarize_last
        if last is not None and not ended.issuperset(missing):
            yield f"rank {opened.rank} compiles {self._planned.name} again, for it has changed:"
            before, after = summary_text(last()), summary_text(self._planned.summarize())
            yield from difference_lines(before, after, "before", "now")

    def _what(self) -> str:
        return self._planned.name + (f" (step {self._step})" if self._step else "")

    def _difference_lines(self, reports: Reports) -> Iterator[str]:
        groups: dict[str, list[int]] = {}
        for rank in sorted(reports):
            groups.setdefault(reports[rank]["digest"], []).append(rank)
        ordered = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))
        in_step = f" in step {self._step}" if self._step else ""
        yield f"ranks are about to run different programs{in_step}:"
        for ranks in ordered:
            program = reports[ranks[0]]
            yield f"  {_ranks(ranks)}: {program['name']}, at {program['place']}"
        if len({reports[ranks[0]]["name"] for ranks in ordered[:2]}) > 1:
            return
        first, second = (self._summary(ranks[0]) for ranks in ordered[:2])
        if first and second:
            yield from difference_lines(first, second, _ranks(ordered[0]), _ranks(ordered[1]))

    def _summary(self, rank: int) -> str:
        if rank == self._channel.rank:
            return summary_text(self._planned.summarize())
        self._channel.put(f"{self._folder}/wanted/{rank}", b"")
        summary = self._channel.get(f"{self._folder}/summary/{rank}", _PATIENCE)
        return "" if summary is None else summary_text(summary.decode())


_DIFFERENT: Final = (
    "All ranks must run the same programs in the same order. Look for code that depends on the "
    "rank, on a file that differs between machines, or on the order of a set."
)
_LATE: Final = "SNAPRT_CHECK_RANKS_TIMEOUT sets how many seconds a rank waits for the others."


def _differs(reports: Reports) -> bool:
    return len({program["digest"] for program in reports.values()}) > 1


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks as in ``rank 3`` or ``ranks 0-2, 5``."""
    return f"rank{'' if len(ranks) == 1 else 's'} {format_spans(ranks)}"
