"""The language of ``--when`` and SNAPRT_RECORD: which executions are recorded.

``name=train_step, step=100-200, every=10`` is one condition: all its words must hold. Several,
separated by ``;``, are alternatives: one that holds is enough. `WORDS` is the whole vocabulary; a
word that waits for the end of an execution is a row of `triggers.TRIGGERS`.
"""

from __future__ import annotations

import datetime
import difflib
import functools
import math
import re
import shlex
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from snaprt import units
from snaprt.errors import UsageError
from snaprt.snapshot.recorder.triggers import TRIGGERS, Trigger

MASTER: Final = "master"


class Moment(NamedTuple):
    """An execution about to begin."""

    name: str  # the graph's
    graph_id: str  # 16 hex digits that are the same for the same graph
    execution: int  # how many executions of its executable came before
    step: int  # how many steps of its thread came before; -1 where nobody counts them
    seconds: float  # since recording was first asked for
    rank: int  # which of the processes of a job this is


Span = tuple[float, float]
"""The lowest and the highest of some numbers."""
EVER: Final[Span] = (-math.inf, math.inf)
NEVER: Final[Span] = (math.inf, -math.inf)


@dataclass(frozen=True)
class Ranges:
    """Numbers, as ``5|100-200|1000-`` lists them; both ends of a range belong to it."""

    spans: tuple[Span, ...]

    def __contains__(self, number: float) -> bool:
        return any(low <= number <= high for low, high in self.spans)

    def span(self) -> Span:
        """Return the lowest and the highest of the numbers."""
        return _around(self.spans)


@dataclass(frozen=True)
class Word:
    """One word of the language that is judged when an execution begins."""

    name: str  # what the user writes before `=`, or alone
    parse: Callable[[str], Any]  # turns what stands after `=` into a value; raises ValueError
    allowed: str  # what may stand there, for the user; empty for a word that stands alone
    help: str  # what it means, one sentence
    # Whether a moment meets the value; None for words that say something else.
    holds: Callable[[Any, Moment], bool] | None = None
    lasts: bool = False  # whether that is the same for every execution of an executable
    is_local: bool = False  # whether the processes of a job may differ on it


_Test = tuple[Callable[[Any, Moment], bool], Any]


@dataclass(frozen=True)
class Condition:
    """One condition: what must hold of an execution, and when it then strikes."""

    text: str  # as the user wrote it
    tests: tuple[_Test, ...]  # each must hold of the moment
    lasting: tuple[_Test, ...]  # of these, one execution tells what all of its executable would
    executions: Span  # the first and the last execution of which it may hold
    steps: Span  # the first and the last step in which it may hold
    is_local: bool  # whether the processes of a job may differ on what holds
    depends_on_time: bool  # whether it may begin to hold between two executions
    trigger: Trigger | None  # what must then happen; None where nothing more has to
    value: Any  # what the trigger is given
    devices: Ranges | None  # the addressable devices that are recorded; None for all
    roles: frozenset[str]  # `inputs`, `outputs`, or both
    every: int  # only the first of so many executions of a graph that pass
    first: int | None  # only so many executions of a graph, of those that pass all else
    _passed: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)

    def holds(self, moment: Moment) -> bool:
        """Return whether the words that can be judged when an execution begins hold of it."""
        for test, value in self.tests:  # noqa: SIM110 - a generator takes three times as long
            if not test(value, moment):
                return False
        return True

    def may_hold(self, moment: Moment) -> bool:
        """Return whether it may hold of any execution of the executable of a moment."""
        return all(test(value, moment) for test, value in self.lasting)

    def is_left_to_the_end(self) -> bool:
        """Return whether, where it may hold, only how an execution ends decides if it does."""
        trigger = self.trigger
        return trigger is not None and not trigger.runs_again and self.tests == self.lasting

    @functools.cached_property
    def is_judged_each_time(self) -> bool:
        """Whether no number of executions can be told for which it will want nothing."""
        waits = self.trigger is not None and not self.trigger.runs_again
        return waits or self.depends_on_time

    @functools.cached_property
    def wants_each(self) -> bool:
        """Whether it wants each execution of an executable for which it may hold."""
        return (
            self.tests == self.lasting
            and self.executions == self.steps == EVER
            and self.every == 1
            and self.first is None
        )

    def rest(self, graph_id: str, execution: int, step: int) -> Rest:
        """Return how long it wants nothing of an executable, for which it may hold.

        Args:
            graph_id: Of its graph.
            execution: How many executions of it came before.
            step: How many steps of the thread came before.
        """
        first_step, last_step = self.steps
        if step < first_step:
            return Rest(math.inf, first_step)
        if step > last_step:
            return Rest()
        if self.tests == self.lasting and (self.every > 1 or self.first is not None):
            before = self._passed.get(graph_id, 0)
            left = -before % self.every
            if self.first is not None and (before + left) // self.every >= self.first:
                return Rest()
            return Rest(execution + left, passing=((self, graph_id),))
        first, last = self.executions
        return Rest(max(first, execution)) if execution <= last else Rest()

    def pass_by(self, graph_id: str) -> bool:
        """Count an execution that it does not take; return whether it takes the next one."""
        with self._lock:
            before = self._passed[graph_id] = self._passed.get(graph_id, 0) + 1
        return before % self.every == 0

    def takes(self, graph_id: str) -> bool:
        """Count an execution of which all else holds; return whether ``every``, ``first`` do."""
        if self.every == 1 and self.first is None:
            return True
        with self._lock:
            before = self._passed.get(graph_id, 0)
            self._passed[graph_id] = before + 1
        place, rest = divmod(before, self.every)
        return rest == 0 and (self.first is None or place < self.first)


class Rest(NamedTuple):
    """How long conditions want nothing of an executable; without end by default."""

    execution: float = math.inf  # the first execution of it that one of them may want
    step: float = math.inf  # the first step in which one of them may
    # Those that count the executions which they do not take, and of which graph.
    passing: tuple[tuple[Condition, str], ...] = ()


def rest_of(rests: Sequence[Rest]) -> Rest:
    """Return how long several conditions want nothing."""
    return Rest(
        min((rest.execution for rest in rests), default=math.inf),
        min((rest.step for rest in rests), default=math.inf),
        tuple(passing for rest in rests for passing in rest.passing),
    )


class Prospect(NamedTuple):
    """Which conditions may hold of an executable, and when."""

    conditions: tuple[Condition, ...]  # those that may hold of some of its executions
    executions: Span  # around all of which they may hold
    steps: Span  # around all in which they may hold
    is_left_to_the_end: bool  # whether only how an execution ends decides whether they hold
    limit: float  # nanoseconds after which it matters that an execution has not ended


def prospect(conditions: Sequence[Condition], moment: Moment) -> Prospect:
    """Judge once what of conditions is the same for every execution of a moment's executable."""
    possible = tuple(condition for condition in conditions if condition.may_hold(moment))
    return Prospect(
        possible,
        _around([condition.executions for condition in possible]),
        _around([condition.steps for condition in possible]),
        bool(possible) and all(condition.is_left_to_the_end() for condition in possible),
        shortest_limit(possible),
    )


def shortest_limit(conditions: Sequence[Condition]) -> float:
    """Return the nanoseconds after which the first of them asks how long an execution takes."""
    limits = [
        condition.trigger.limit(condition.value) for condition in conditions if condition.trigger
    ]
    return min(limits, default=math.inf)


def _around(spans: Sequence[Span]) -> Span:
    lows, highs = zip(NEVER, *spans, strict=True)
    return min(lows), max(highs)


def _clock(text: str) -> float:
    time = datetime.time.fromisoformat(text.strip())
    return time.hour * 3600.0 + time.minute * 60 + time.second


def _number(text: str) -> float:
    if not re.fullmatch(r"\d{1,15}", text.strip(), re.ASCII):
        raise ValueError(text)
    return int(text)


def _ranges(number: Callable[[str], float]) -> Callable[[str], Ranges]:
    def parse(text: str) -> Ranges:
        spans = []
        for part in text.split("|"):
            low, dash, high = part.partition("-")
            if not (low.strip() or high.strip()):
                raise ValueError(text)
            start = number(low) if low.strip() else 0
            end = number(high) if high.strip() else math.inf if dash else start
            if end < start:
                raise ValueError(text)
            spans.append((start, end))
        return Ranges(tuple(spans))

    return parse


def _rank(text: str) -> Ranges:
    return Ranges(((0, 0),)) if text.strip() == MASTER else _ranges(_number)(text)


def _positive(text: str) -> int:
    number = int(_number(text))
    if not number:
        raise ValueError(text)
    return number


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(text) from error


def _roles(text: str) -> frozenset[str]:
    roles = frozenset(role.strip() for role in text.split("|"))
    if not roles <= BOTH_ROLES:
        raise ValueError(text)
    return roles


def _time_of_day() -> float:
    now = datetime.datetime.now().time()
    return now.hour * 3600.0 + now.minute * 60 + now.second


BOTH_ROLES: Final = frozenset(("inputs", "outputs"))
_NUMBERS: Final = "numbers and ranges, such as 5, 100-200, 1000- or 0|10|20"

WORDS: Final[tuple[Word, ...]] = (
    Word("all", bool, "", "Every execution. Use it alone."),
    Word(
        "name",
        _pattern,
        "a regular expression; \\, and \\; stand for a comma and a semicolon",
        "Graphs whose name the expression matches, in whole or in part.",
        lambda pattern, moment: pattern.search(moment.name) is not None,
        lasts=True,
    ),
    Word(
        "execution",
        _ranges(_number),
        _NUMBERS,
        "Executions of an executable by their number, from 0.",
        lambda ranges, moment: moment.execution in ranges,
    ),
    Word(
        "step",
        _ranges(_number),
        _NUMBERS,
        "Executions in these steps, from 0; `mark_step` ends one.",
        lambda ranges, moment: moment.step in ranges,
    ),
    Word(
        "every",
        _positive,
        "a number, 1 or more",
        "The first and every Nth execution of a graph that meets the other conditions.",
    ),
    Word(
        "first",
        _positive,
        "a number, 1 or more",
        "The first N executions of a graph that meet the other conditions.",
    ),
    Word(
        "time",
        _ranges(units.parse_duration),
        "a range of us, ms, s, m or h since the start, such as 90s-5m or 1h-",
        "Executions that begin this long after recording was first requested.",
        lambda ranges, moment: moment.seconds in ranges,
        is_local=True,
    ),
    Word(
        "clock",
        _ranges(_clock),
        "a range of the local time, such as 14:00-15:30",
        "Executions that begin at this time of day.",
        lambda ranges, moment: _time_of_day() in ranges,
        is_local=True,
    ),
    Word(
        "rank",
        _rank,
        "numbers and ranges, or master",
        "Processes by `jax.process_index()`, or by RANK if JAX knows only one; master is 0.",
        lambda ranges, moment: moment.rank in ranges,
        lasts=True,
        is_local=True,
    ),
    Word(
        "device",
        _ranges(_number),
        _NUMBERS,
        "The devices to record, by their position among the program's devices in this process.",
    ),
    Word(
        "record", _roles, "inputs, outputs or inputs|outputs", "What to write. The default is both."
    ),
)

_ALL: Final[tuple[Word | Trigger, ...]] = (*WORDS, *TRIGGERS)
_BY_NAME: Final = {word.name: word for word in _ALL}


def parse_conditions(text: str) -> tuple[Condition, ...]:
    """Parse conditions separated by ``;``: the value of SNAPRT_RECORD.

    Raises:
        UsageError: A word that is not in ``WORDS``, or a value that its word does not take.
    """
    return tuple(_condition(part) for part in _split(text, ";") if part.strip())


def names_in(conditions: Sequence[Condition]) -> tuple[str, ...]:
    """Return the regular expressions by which conditions name graphs."""
    return tuple(
        value.pattern
        for condition in conditions
        for _, value in condition.tests
        if isinstance(value, re.Pattern)
    )


def _split(text: str, separator: str) -> list[str]:
    return re.split(rf"(?<!\\){separator}", text)


def _condition(text: str) -> Condition:
    values: dict[str, Any] = {}
    for part in _split(text, ","):
        name, equals, value = part.strip().partition("=")
        word = _word(name.strip(), text)
        if word.name in values:
            raise _wrong(text, f"{word.name} stands there twice", "alternatives: repeat --when")
        try:
            if bool(equals) != bool(word.allowed) and (equals or not _may_stand_alone(word)):
                raise ValueError(part)
            values[word.name] = word.parse(re.sub(r"\\([,;])", r"\1", value))
        except ValueError:
            if word.allowed:
                hint = f"{word.name}=... takes {word.allowed}"
            else:
                hint = f"write {word.name} alone, without ="
            raise _wrong(text, f"{part.strip()!r} cannot be understood", hint) from None
    triggers = [trigger for trigger in TRIGGERS if trigger.name in values]
    if len(triggers) > 1:
        both = " and ".join(trigger.name for trigger in triggers)
        raise _wrong(text, f"{both} cannot hold together", _alternatives(text, triggers))
    pairs = [(word, values[word.name]) for word in WORDS if word.name in values]
    execution, step = values.get("execution"), values.get("step")
    return Condition(
        text=text.strip(),
        tests=tuple((word.holds, value) for word, value in pairs if word.holds),
        lasting=tuple((word.holds, value) for word, value in pairs if word.holds and word.lasts),
        executions=EVER if execution is None else execution.span(),
        steps=EVER if step is None else step.span(),
        is_local=any(word.is_local for word, _ in pairs),
        depends_on_time=any(word.is_local and not word.lasts for word, _ in pairs),
        trigger=triggers[0] if triggers else None,
        value=values[triggers[0].name] if triggers else None,
        devices=values.get("device"),
        roles=values.get("record", BOTH_ROLES),
        every=values.get("every", 1),
        first=values.get("first"),
    )


def _alternatives(text: str, triggers: Sequence[Trigger]) -> str:
    """Return a condition with several triggers as several, each with one of them."""
    parts = {part.partition("=")[0].strip(): part.strip() for part in _split(text, ",")}
    names = {trigger.name for trigger in triggers}
    alternatives = [
        [part for word, part in parts.items() if word == name or word not in names]
        for name in parts
        if name in names
    ]
    return " ".join(f"--when {shlex.quote(', '.join(words))}" for words in alternatives)


def _may_stand_alone(word: Word | Trigger) -> bool:
    return isinstance(word, Trigger) and word.may_stand_alone


def _word(name: str, text: str) -> Word | Trigger:
    if name in _BY_NAME:
        return _BY_NAME[name]
    close = difflib.get_close_matches(name, _BY_NAME, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    raise _wrong(text, f"there is no word {name!r}", f"{meant}The words are {', '.join(_BY_NAME)}")


def _wrong(text: str, what: str, hint: str) -> UsageError:
    return UsageError(f"the condition {text.strip()!r}: {what}", hint=hint)
