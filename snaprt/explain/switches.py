"""Which subscribers the environment asks for; looked at when a graph is cut.

A row of the table says which variables a kind of subscriber depends on, and how it is made of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from snaprt import logs, settings
from snaprt.compile.ahead import collection
from snaprt.explain import execution_log, nodes
from snaprt.explain.debug_files import ANALYSIS_VARIABLES, analysis, saved_graphs, step_metrics
from snaprt.explain.recompiles import history
from snaprt.runtime.events import Subscriber, subscribe


class _Switch:
    """A kind of subscriber, and the one that the variables asked for when they were last seen."""

    def __init__(self, variables: tuple[str, ...], make: Callable[[], Subscriber | None]) -> None:
        self.variables = variables
        self.subscriber: Subscriber | None = None
        self._make = make
        self._texts = settings.Texts(*variables)
        self._seen: list[Any] = [None] * len(variables)

    def look(self) -> None:
        """Make the subscriber anew if a variable has changed."""
        now = self._texts.now()
        if now != self._seen:
            self.subscriber = self._make()
            self._seen = now


class _CollectedSteps(Subscriber):
    def step_ended(self, step: int) -> None:
        """End the run where it was to be collected for so many steps."""
        collection.step_ended(step)


def _trace_folder() -> Subscriber | None:
    if settings.get("SNAPRT_TRACE") is None:
        return None
    from snaprt.explain.trace.folder import trace_folder  # templates take long to import

    return trace_folder()


#: ``make()`` returns a subscriber, or ``None`` where the variables do not ask for one.
_SWITCHES: Final = (
    _Switch(("SNAPRT_COLLECT",), _CollectedSteps),
    _Switch(("RANK", "SNAPRT_TRACE"), _trace_folder),
    _Switch(ANALYSIS_VARIABLES, analysis),
    _Switch(
        (
            *("RANK", "SNAPRT_LOG_FILE"),
            *("TF_CPP_LOG_THREAD_ID", "TF_CPP_MIN_LOG_LEVEL", "TF_CPP_VMODULE"),
        ),
        logs.follow_environment,
    ),
    _Switch(("RANK", "XLA_METRICS_FILE"), step_metrics),
    _Switch(("RANK", "XLA_SAVE_TENSORS_FILE", "XLA_SAVE_TENSORS_FMT"), saved_graphs),
)

_texts: Final = settings.Texts(*{name for switch in _SWITCHES for name in switch.variables})
#: What is told where a logger is at DEBUG.
_LOGS: Final = (
    (nodes.LOGGER, nodes.OperationLog()),
    (execution_log.LOGGER, execution_log.ExecutionLog()),
)
# And what they ask for.
_seen: tuple[list[Any], list[bool], tuple[Subscriber, ...]] = ([], [], ())
subscribe(history)  # always there, for it is told of compilations alone


def subscribers() -> tuple[Subscriber, ...]:
    """Return the subscribers that the environment asks for now: the same tuple while it does.

    Raises:
        UsageError: A variable asks for what cannot be.
    """
    global _seen
    texts, is_logged = _texts.now(), _are_logged()
    if texts != _seen[0] or is_logged != _seen[1]:
        for switch in _SWITCHES:
            switch.look()
        is_logged = _are_logged()  # as the variables may just have asked
        asked_for = [one.subscriber for one in _SWITCHES if one.subscriber is not None]
        told = [log for (_, log), is_on in zip(_LOGS, is_logged, strict=True) if is_on]
        _seen = texts, is_logged, (*asked_for, *told)
    return _seen[2]


def _are_logged() -> list[bool]:
    return [logger.isEnabledFor(logging.DEBUG) for logger, _ in _LOGS]
