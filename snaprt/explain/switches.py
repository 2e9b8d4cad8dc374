"""Which subscribers the environment asks for; looked at when a graph is cut.

A row of the table says which variables a kind of subscriber depends on, and how it is made of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from snaprt import logs, settings
from snaprt.compile.ahead import collection
from snaprt.explain import nodes
from snaprt.explain.debug_files import ANALYSIS_VARIABLES, analysis, saved_graphs, step_metrics
from snaprt.explain.recompiles import history
from snaprt.runtime.events import Execution, Subscriber, subscribe


class _Switch:
    """A kind of subscriber, and the one that the variables asked for when they were last seen."""

    def __init__(self, variables: tuple[str, ...], make: Callable[[], Subscriber | None]) -> None:
        self.variables = variables
        self.subscriber: Subscriber | None = None
        self._make = make
        self._texts = settings.Texts(*variables)
        self._last_texts: list[Any] = [None] * len(variables)

    def look(self) -> None:
        """Make the subscriber anew if a variable has changed."""
        now = self._texts.now()
        if now != self._last_texts:
            self.subscriber = self._make()
            self._last_texts = now


class _CollectedSteps(Subscriber):
    def step_ended(self, step: int) -> None:
        """End the run where it was to be collected for so many steps."""
        collection.step_ended(step)


_EXECUTIONS: Final = logging.getLogger("snaprt.execution")


class _ExecutionLog(Subscriber):
    """Logs a line before an execution, and one once the device has it.

    Source: ``xla_graph_executor.cpp`` of PyTorch/XLA 2, whose words scripts look for.
    """

    def ready(self, run: Execution) -> None:
        _EXECUTIONS.debug("%s ...", _text(run))

    def ran(self, run: Execution, results: Sequence[Any]) -> None:
        _EXECUTIONS.debug("%s done!", _text(run))


def _text(run: Execution) -> str:
    devices = run.executable.devices
    device = f"{devices[0].platform.upper()}:{devices[0].id}"
    more = f" and {len(devices) - 1} more" if len(devices) > 1 else ""
    return f"Executing IR graph hash {run.executable.graph_id} on device {device}{more}"


def _trace_folder() -> Subscriber | None:
    path = settings.get("SNAPRT_TRACE")
    if path is None:
        return None
    from snaprt.explain.trace_folder import TraceFolder  # templates take long to import

    return TraceFolder(path)


#: ``make()`` returns a subscriber, or ``None`` where the variables do not ask for one.
_SWITCHES: Final = (
    _Switch(("SNAPRT_COLLECT",), _CollectedSteps),
    _Switch(("RANK", "SNAPRT_TRACE", "SNAPRT_TRACE_FORMS"), _trace_folder),
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
    (_EXECUTIONS, _ExecutionLog()),
)
# And what they ask for.
_last: tuple[list[Any], list[bool], tuple[Subscriber, ...]] = ([], [], ())
subscribe(history)  # always there, for it is told of compilations alone


def subscribers() -> tuple[Subscriber, ...]:
    """Return the subscribers that the environment asks for now: the same tuple while it does.

    Raises:
        UsageError: A variable asks for what cannot be.
    """
    global _last
    texts, is_logged = _texts.now(), _are_logged()
    if texts != _last[0] or is_logged != _last[1]:
        for switch in _SWITCHES:
            switch.look()
        is_logged = _are_logged()  # as the variables may just have asked
        asked_for = [switch.subscriber for switch in _SWITCHES if switch.subscriber is not None]
        log_subscribers = [log for (_, log), is_on in zip(_LOGS, is_logged, strict=True) if is_on]
        _last = texts, is_logged, (*asked_for, *log_subscribers)
    return _last[2]


def _are_logged() -> list[bool]:
    return [logger.isEnabledFor(logging.DEBUG) for logger, _ in _LOGS]
