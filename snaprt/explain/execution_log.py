"""Logs each execution of a lazy program as PyTorch/XLA does: when it starts, and that it has.

Source: ``xla_graph_executor.cpp`` of PyTorch/XLA 2, whose words scripts look for.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

from snaprt.runtime.events import Execution, Subscriber

LOGGER: Final = logging.getLogger("snaprt.execution")


class ExecutionLog(Subscriber):
    """Logs a line before an execution, and one once the device has it."""

    def ready(self, run: Execution) -> None:
        """Log that it is about to run."""
        LOGGER.debug("%s ...", _text(run))

    def ran(self, run: Execution, results: Sequence[Any]) -> None:
        """Log that it was started; its results may still be on their way."""
        LOGGER.debug("%s done!", _text(run))


def _text(run: Execution) -> str:
    devices = run.executable.devices
    device = f"{devices[0].platform.upper()}:{devices[0].id}"
    more = f" and {len(devices) - 1} more" if len(devices) > 1 else ""
    return f"Executing IR graph hash {run.executable.graph_id} on device {device}{more}"
