"""Which watchers the environment asks for; looked at when a graph is cut.

A row of the table says which variables a kind of watcher depends on, and how it is made of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from snaprt import logs, settings
from snaprt.explain.debug_files import ANALYSIS_VARIABLES, analysis, saved_graphs, step_metrics
from snaprt.explain.nodes import LOGGER, OperationLog
from snaprt.explain.recompiles import history
from snaprt.runtime.events import Watcher, attach


class _Switch:
    """A kind of watcher, and the one that the variables asked for when they were last seen."""

    def __init__(self, variables: tuple[str, ...], make: Callable[[], Watcher | None]) -> None:
        self.variables = variables
        self.watcher: Watcher | None = None
        self._make = make
        self._texts = settings.Texts(*variables)
        self._seen: list[Any] = [None] * len(variables)

    def look(self) -> None:
        """Make the watcher anew if a variable has changed."""
        now = self._texts.now()
        if now != self._seen:
            self.watcher = self._make()
            self._seen = now


def _trace_folder() -> Watcher | None:
    if settings.get("SNAPRT_TRACE") is None:
        return None
    from snaprt.explain.trace.folder import trace_folder  # templates take long to import

    return trace_folder()


#: ``make()`` returns a watcher, or ``None`` where the variables do not ask for one.
_SWITCHES: Final = (
    _Switch(("RANK", "SNAPRT_TRACE"), _trace_folder),
    _Switch(ANALYSIS_VARIABLES, analysis),
    _Switch(
        ("TF_CPP_LOG_THREAD_ID", "TF_CPP_MIN_LOG_LEVEL", "TF_CPP_VMODULE"), logs.follow_environment
    ),
    _Switch(("RANK", "XLA_METRICS_FILE"), step_metrics),
    _Switch(("RANK", "XLA_SAVE_TENSORS_FILE", "XLA_SAVE_TENSORS_FMT"), saved_graphs),
)

_texts: Final = settings.Texts(*{name for switch in _SWITCHES for name in switch.variables})
_seen: tuple[list[Any], tuple[Watcher, ...]] = ([], ())
_operation_log: Final = OperationLog()
attach(history)  # always there, for it is told of compilations alone


def watchers() -> tuple[Watcher, ...]:
    """Return the watchers that the environment asks for now.

    Raises:
        UsageError: A variable asks for what cannot be.
    """
    global _seen
    now = _texts.now()
    if now != _seen[0]:
        for switch in _SWITCHES:
            switch.look()
        _seen = now, tuple(one.watcher for one in _SWITCHES if one.watcher is not None)
    return (*_seen[1], _operation_log) if LOGGER.isEnabledFor(logging.DEBUG) else _seen[1]
