"""The language of ``--when`` and SNAPRT_RECORD: which executions are recorded; knows no arrays.

``name=train_step, step=100-200, every=10`` is one condition: all its words must hold. Several,
separated by ``;``, are alternatives: one that holds is enough. `WORDS` is the whole vocabulary.
"""

from __future__ import annotations

import datetime
import difflib
import math
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from snaprt import units
from snaprt.errors import UsageError

Trigger = Literal["", "nan", "error", "slower"]
"""When a condition strikes: at once, or when it is known how the execution ended."""

MASTER: Final = "master"


class Moment(NamedTuple):
    """An execution about to begin.

    Attributes:
        name: The graph's name.
        graph_id: 16 hex digits that are the same for the same graph.
        execution: How many executions of its executable came before.
        step: How many steps of its thread came before; -1 where nobody counts them.
        seconds: Since recording was first asked for.
        rank: Which of the processes of a job this is.
    """

    name: str
    graph_id: str
    execution: int
    step: int
    seconds: float
    rank: int


Span = tuple[float, float]
"""The lowest and the highest of some numbers."""
EVER: Final[Span] = (-math.inf, math.inf)
NEVER: Final[Span] = (math.inf, -math.inf)


@dataclass(frozen=True)
class Ranges:
    """Numbers, as ``5|100-200|1000-`` lists them; both ends of a range belong to it."""

    spans: tuple[tuple[float, float], ...]

    def __contains__(self, number: float) -> bool:
        return any(low <= number <= high for low, high in self.spans)

    def span(self) -> Span:
        """Return the lowest and the highest of the numbers."""
        return _around(self.spans)


@dataclass(frozen=True)
class Word:
    """One word of the language.

    Attributes:
        name: What the user writes before ``=``, or alone.
        parse: Turns what stands after ``=`` into a value; raises ValueError.
        allowed: What may stand there, for the user; empty for a word that stands alone.
        help: What it means, one sentence.
        holds: Whether a moment meets the value; None for words that say something else.
        lasts: Whether that is the same for every execution of an executable.
    """

    name: str
    parse: Callable[[str], Any]
    allowed: str
    help: str
    holds: Callable[[Any, Moment], bool] | None = None
    lasts: bool = False


@dataclass(frozen=True)
class Condition:
    """One condition: what must hold of an execution, and when it then strikes.

    Attributes:
        tests: ``(test, value)``; each must hold of the moment.
        lasting: Those of which one execution tells what all of its executable would.
        executions: The first and the last execution of which it may hold.
        steps: The first and the last step in which it may hold.
        trigger: What must then happen; empty where nothing more has to.
        devices: The addressable devices that are recorded; None for all.
        roles: ``inputs``, ``outputs``, or both.
        slower: Nanoseconds that the execution must take at least, for that trigger.
        every: Only the first of so many executions of a graph that pass.
        first: Only so many executions of a graph, of those that pass all else.
        text: As the user wrote it.
    """

    tests: tuple[tuple[Callable[[Any, Moment], bool], Any], ...]
    lasting: tuple[tuple[Callable[[Any, Moment], bool], Any], ...]
    executions: Span
    steps: Span
    trigger: Trigger
    devices: Ranges | None
    roles: frozenset[str]
    slower: float
    every: int
    first: int | None
    text: str
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
        """Tell whether, where it may hold, only how an execution ends decides whether it does."""
        return bool(self.trigger) and self.tests == self.lasting

    def takes(self, graph_id: str) -> bool:
        """Count an execution of which all else holds; tell whether ``every`` and ``first`` do."""
        if self.every == 1 and self.first is None:
            return True
        with self._lock:
            before = self._passed.get(graph_id, 0)
            self._passed[graph_id] = before + 1
        place, rest = divmod(before, self.every)
        return rest == 0 and (self.first is None or place < self.first)


class Prospect(NamedTuple):
    """Which conditions may hold of an executable, and when.

    Attributes:
        conditions: Those that may hold of some of its executions.
        executions: Around all of which they may hold.
        steps: Around all in which they may hold.
        is_left_to_the_end: Whether only how an execution ends decides whether they hold.
        limit: Nanoseconds after which it matters that an execution has not ended; else infinity.
    """

    conditions: tuple[Condition, ...]
    executions: Span
    steps: Span
    is_left_to_the_end: bool
    limit: float


def prospect(conditions: Sequence[Condition], moment: Moment) -> Prospect:
    """Judge once what of conditions is the same for every execution of a moment's executable."""
    found = tuple(condition for condition in conditions if condition.may_hold(moment))
    return Prospect(
        found,
        _around([condition.executions for condition in found]),
        _around([condition.steps for condition in found]),
        bool(found) and all(condition.is_left_to_the_end() for condition in found),
        shortest_limit(found),
    )


def shortest_limit(conditions: Sequence[Condition]) -> float:
    """Return the nanoseconds after which the first of them asks how long an execution takes."""
    return min((one.slower for one in conditions if one.trigger == "slower"), default=math.inf)


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


def _ranges(one: Callable[[str], float]) -> Callable[[str], Ranges]:
    def parse(text: str) -> Ranges:
        spans = []
        for part in text.split("|"):
            low, dash, high = part.partition("-")
            if not (low.strip() or high.strip()):
                raise ValueError(text)
            start = one(low) if low.strip() else 0
            end = one(high) if high.strip() else float("inf") if dash else start
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


def _alone(text: str) -> bool:
    return True


def _time_of_day() -> float:
    now = datetime.datetime.now().time()
    return now.hour * 3600.0 + now.minute * 60 + now.second


BOTH_ROLES: Final = frozenset(("inputs", "outputs"))
_NUMBERS: Final = "numbers and ranges, such as 5, 100-200, 1000- or 0|10|20"

WORDS: Final[tuple[Word, ...]] = (
    Word("all", _alone, "", "Every execution; of use where there is nothing else to say."),
    Word(
        "name",
        _pattern,
        "a regular expression; \\, and \\; stand for a comma and a semicolon",
        "Graphs in whose name the expression is found.",
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
        "Of the executions of a graph for which the other words hold, the first and every Nth.",
    ),
    Word(
        "first",
        _positive,
        "a number, 1 or more",
        "Of the executions of a graph for which the other words hold, so many.",
    ),
    Word(
        "time",
        _ranges(units.parse_duration),
        "a range of us, ms, s, m or h since the start, such as 90s-5m or 1h-",
        "Executions that begin in this time since recording was first asked for.",
        lambda ranges, moment: moment.seconds in ranges,
    ),
    Word(
        "clock",
        _ranges(_clock),
        "a range of the local time, such as 14:00-15:30",
        "Executions that begin at this time of the day.",
        lambda ranges, moment: _time_of_day() in ranges,
    ),
    Word(
        "rank",
        _rank,
        "numbers and ranges, or master",
        "Processes by RANK, or where it is not set by `jax.process_index()`; master is 0.",
        lambda ranges, moment: moment.rank in ranges,
        lasts=True,
    ),
    Word(
        "device",
        _ranges(_number),
        _NUMBERS,
        "The devices that are recorded, by their place among this process's own of the program.",
    ),
    Word("record", _roles, "inputs, outputs or inputs|outputs", "What is written; else both are."),
    Word(
        "slower",
        units.parse_duration,
        "a time, such as 50ms or 2s; without a unit it is seconds",
        "Executions that take longer than this; their inputs are held until that is known.",
    ),
    Word("nan", _alone, "", "A NaN or an infinity appears in an output and was in no input."),
    Word(
        "error",
        _alone,
        "",
        "Compiling or executing fails, or an exception ends the program or leaves a lazy scope.",
    ),
)

_BY_NAME: Final = {word.name: word for word in WORDS}
_TRIGGERS: Final[tuple[Trigger, ...]] = ("nan", "error", "slower")


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
            if bool(equals) != bool(word.allowed):
                raise ValueError(part)
            values[word.name] = word.parse(re.sub(r"\\([,;])", r"\1", value))
        except ValueError:
            if word.allowed:
                hint = f"{word.name}=... takes {word.allowed}"
            else:
                hint = f"write {word.name} alone, without ="
            raise _wrong(text, f"{part.strip()!r} cannot be understood", hint) from None
    triggers: list[Trigger] = [trigger for trigger in _TRIGGERS if trigger in values]
    if len(triggers) > 1:
        both = " and ".join(triggers)
        raise _wrong(text, f"{both} cannot hold together", f"--when {triggers[0]} --when ...")
    told = [word for word in WORDS if word.name in values]
    execution, step = values.get("execution"), values.get("step")
    return Condition(
        tests=tuple((word.holds, values[word.name]) for word in told if word.holds),
        lasting=tuple(
            (word.holds, values[word.name]) for word in told if word.holds and word.lasts
        ),
        executions=EVER if execution is None else execution.span(),
        steps=EVER if step is None else step.span(),
        trigger=triggers[0] if triggers else "",
        devices=values.get("device"),
        roles=values.get("record", BOTH_ROLES),
        slower=1e9 * values.get("slower", 0.0),
        every=values.get("every", 1),
        first=values.get("first"),
        text=text.strip(),
    )


def _word(name: str, text: str) -> Word:
    if name in _BY_NAME:
        return _BY_NAME[name]
    close = difflib.get_close_matches(name, _BY_NAME, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    raise _wrong(text, f"there is no word {name!r}", f"{meant}The words are {', '.join(_BY_NAME)}")


def _wrong(text: str, what: str, hint: str) -> UsageError:
    return UsageError(f"the condition {text.strip()!r}: {what}", hint=hint)
