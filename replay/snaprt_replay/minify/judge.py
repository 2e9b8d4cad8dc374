"""Ask a check about candidates, several at a time, none twice; it must not know what they are of.

A failure that does not always show counts as shown where it is seen in so many of so many looks.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Literal

from snaprt.errors import SnaprtError
from snaprt_replay.hlo import hlo_module
from snaprt_replay.minify.candidate import Candidate
from snaprt_replay.minify.checks import Check, Run, Signature, UnjudgedError

Answer = Literal["fails", "passes", "fails otherwise", "cannot be told"]


class BudgetSpentError(Exception):
    """The seconds that the user gave are over. It never leaves this package."""


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long to look.

    Args:
        repeat: How often to look at a candidate at most.
        needed: In how many of the looks the failure must be seen.
        budget: Seconds after which no further candidate is looked at; None for no limit.
        jobs: How many candidates to look at at the same time.
    """

    repeat: int = 1
    needed: int = 1
    budget: float | None = None
    jobs: int = 2


class Judge:
    """Answers about candidates.

    Args:
        check: What to look for.
        run: How candidates are run.
        patience: See there.

    Attributes:
        signature: What the failure looks like; None until `look_first` has seen it.
        asked: How many different candidates were looked at.
        passing: Those that pass and were made of the last program that fails.
    """

    def __init__(self, check: Check, run: Run, patience: Patience) -> None:
        self.check = check
        self.run = run
        self.patience = patience
        self.signature: Signature | None = None
        self.asked = 0
        self.passing: list[Candidate] = []
        self._answers: dict[str, Answer] = {}
        self._started = time.perf_counter()
        self._pool = concurrent.futures.ThreadPoolExecutor(patience.jobs)

    def __enter__(self) -> Judge:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    @property
    def seconds(self) -> float:
        """Return the time since the judge began."""
        return time.perf_counter() - self._started

    def look_first(self, candidate: Candidate) -> Signature | None:
        """Look at a program without knowing what its failure looks like.

        Returns:
            What was seen most often; None if it was in fewer looks than are needed.
        """
        looks = [self._look(candidate) for _ in range(self.patience.repeat)]
        seen = [one for one in looks if isinstance(one, Signature)]
        if len(seen) < self.patience.needed:
            return None
        return max(seen, key=seen.count)

    def adopt(self, signature: Signature) -> None:
        """Look for this failure from now on."""
        self.signature = signature
        self._answers.clear()

    def first(self, candidates: Iterable[Candidate]) -> Candidate | None:
        """Return the first of some candidates that still fails; several are looked at at a time.

        Raises:
            BudgetSpentError: Before it was found.
        """
        source = iter(candidates)
        waiting = [(one, self._start(one)) for one in itertools.islice(source, self.patience.jobs)]
        try:
            while waiting:
                candidate, future = waiting.pop(0)
                answer = future.result()
                if answer == "fails":
                    self.passing.clear()
                    return candidate
                if answer == "passes":
                    self.passing.append(candidate)
                if self.patience.budget is not None and self.seconds > self.patience.budget:
                    raise BudgetSpentError
                waiting += [(one, self._start(one)) for one in itertools.islice(source, 1)]
        finally:
            for _, future in waiting:
                future.cancel()
        return None

    def _start(self, candidate: Candidate) -> concurrent.futures.Future[Answer]:
        return self._pool.submit(self.answer, candidate)

    def answer(self, candidate: Candidate) -> Answer:
        """Say what becomes of a candidate."""
        known = self._answers.get(candidate.key)
        if known is None:
            self.asked += 1
            known = self._answers[candidate.key] = self._judge(candidate)
        return known

    def _judge(self, candidate: Candidate) -> Answer:
        assert self.signature is not None
        try:
            for module in candidate.modules:
                hlo_module.verify(module)
        except SnaprtError:
            return "cannot be told"
        left, needed = self.patience.repeat, self.patience.needed
        answer: Answer = "cannot be told"
        while needed <= left:
            left -= 1
            seen = self._look(candidate)
            if isinstance(seen, Signature) and self.check.persists(self.signature, seen):
                needed -= 1
                if not needed:
                    return "fails"
            else:
                answer = "fails otherwise" if isinstance(seen, Signature) else seen
        return answer

    def _look(self, candidate: Candidate) -> Signature | Literal["passes", "cannot be told"]:
        try:
            return self.check.see(candidate, self.run) or "passes"
        except UnjudgedError:
            return "cannot be told"
