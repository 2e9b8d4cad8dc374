"""Profiles under the names of PyTorch/XLA: spans, steps and a server, on `jax.profiler`."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import jax

from snaprt.processes import is_master_ordinal
from snaprt.runtime.step import mark_step


class Trace(jax.profiler.TraceAnnotation):
    """A span of the host in a profile: ``with snaprt.Trace("load data"): ...``.

    Args:
        name: What the profile shows.
        kwargs: What it says beside the name.

    Examples:
        >>> with snaprt.Trace("load data"):
        ...     batch = np.ones(8)
    """


class StepTrace(jax.profiler.StepTraceAnnotation):
    """A step in a profile; at its end, the step is marked, as by `snaprt.mark_step`.

    Args:
        name: What the profile shows.
        kwargs: What it says beside the name; ``step_num`` is the number of the step.

    Examples:
        >>> with snaprt.lazy():
        ...     for step in range(3):
        ...         with snaprt.StepTrace("train", step_num=step):
        ...             y = jnp.arange(3.0) + step
        >>> print(y)
        [2. 3. 4.]
    """

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Mark the step, unless an error ends it."""
        try:
            if kind is None:
                mark_step()
        finally:
            super().__exit__(kind, error, traceback)


def start_server(port: int, only_on_master: bool = True) -> Any:
    """Start the server from which XProf and TensorBoard take profiles of this process.

    Args:
        port: The port, 1 to 65535.
        only_on_master: Whether the other processes of a job start none.

    Returns:
        The server, which runs as long as it is referenced and until the process ends; ``None``
        where there is none.

    Examples:
        >>> server = snaprt.start_server(9012)  # doctest: +SKIP
    """
    if only_on_master and not is_master_ordinal():
        return None
    return jax.profiler.start_server(port)
