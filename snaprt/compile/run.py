"""Run a compiled program once, letting an observer see its inputs and outputs.

It knows executables and arrays; what an observer does with them is not its business.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import jax

from snaprt import jaxapi, metrics
from snaprt.compile.obtain import Executable


class Observer(Protocol):
    """Sees every execution: the recorder is one."""

    def before(self, executable: Executable, inputs: Sequence[jax.Array]) -> Any:
        """See the inputs; return ``None`` to see no more of this execution, else a token."""

    def after(
        self, token: Any, outputs: Sequence[jax.Array], flag: jax.Array | None = None
    ) -> None:
        """See the outputs of the execution that ``token`` stands for.

        ``flag`` is the last of them where the executable is watched: a bool scalar that says
        whether another one has a NaN or an infinity.
        """

    def failed(self, token: Any, error: BaseException) -> None:
        """Learn that the execution that ``token`` stands for raised ``error``."""


def run(
    executable: Executable, inputs: Sequence[jax.Array], observer: Observer | None
) -> Sequence[jax.Array]:
    """Execute once and return the outputs without a flag, which may still be on their way.

    ``ExecuteTime`` is the time until JAX hands the outputs back: on an asynchronous device that
    is the time to enqueue, not to compute.
    """
    token = observer.before(executable, inputs) if observer is not None else None
    try:
        outputs = _call(executable, inputs)
    except Exception as error:
        if token is not None and observer is not None:
            observer.failed(token, error)
        raise
    if token is not None and observer is not None:
        observer.after(token, outputs, outputs[-1] if executable.is_watched else None)
    return outputs[:-1] if executable.is_watched else outputs


def _call(executable: Executable, inputs: Sequence[jax.Array]) -> Sequence[jax.Array]:
    started = time.perf_counter_ns()
    try:
        return executable.call(*inputs)
    except ValueError:  # before anything ran: JAX compares layouts, and programs have the default
        laid_out = jaxapi.with_default_layouts(inputs)
        if laid_out is None:
            raise
        return executable.call(*laid_out)
    finally:
        elapsed = time.perf_counter_ns() - started
        metrics.metric_add("ExecuteTime", elapsed)
        executable.times.executed(elapsed)
