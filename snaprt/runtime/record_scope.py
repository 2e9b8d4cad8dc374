"""When calls of jitted functions are recorded: the `record` scope, and `record_process`."""

from __future__ import annotations

import os
from contextlib import ContextDecorator
from pathlib import Path
from types import TracebackType
from typing import Any

from snaprt import jaxapi
from snaprt.runtime.jit_calls import leaves_to_jax, start_watching
from snaprt.snapshot.recorder import flags
from snaprt.snapshot.recorder.conditions import names_in, parse_conditions
from snaprt.snapshot.recorder.plan import Plan, check_plan, current_plan, plan_with, set_thread_plan
from snaprt.snapshot.recorder.record import process_recorder


class record(ContextDecorator):  # noqa: N801 - reads as a function, used as a scope and a decorator
    """Record calls of jitted functions inside: ``with snaprt.record(): ...``, ``@snaprt.record()``.

    Each call from Python of what `jax.jit` returned is one execution; a function jitted inside it
    is part of it. Results are those of plain JAX. Functions of JAX's own (`jax.numpy.where`) count
    where a condition names them. Lazy graphs that run inside are recorded in the same way. Scopes
    nest, and each thread has its own.

    Args:
        when: Which executions, in the words of SNAPRT_RECORD; several conditions are separated by
            semicolons. By default what SNAPRT_RECORD and its like say, else all.
        folder: Where their files go. By default SNAPRT_DUMP_DIR, else ``snaprt-dump``.

    Raises:
        UsageError: ``when`` cannot be understood.
    """

    def __init__(self, when: str | None = None, folder: str | Path | None = None) -> None:
        self._conditions = None if when is None else parse_conditions(when)
        self._folder = None if folder is None else Path(folder).expanduser().absolute()
        # One for all calls of a decorated function: `first=2` is twice, not twice a call.
        self._plans: list[Plan] = []
        self._outer: list[Any] = []

    def __enter__(self) -> None:
        flags.take_over()
        start_watching()
        plan = self._plan()
        outer = set_thread_plan(plan)
        conditions = () if plan is None else plan.conditions
        self._outer.append((outer, jaxapi.set_watch(names_in(conditions))))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            process_recorder().program_failed(error)
        outer, watch = self._outer.pop()
        jaxapi.restore_watch(watch)
        set_thread_plan(outer)

    def _plan(self) -> Plan | None:
        """Return the plan of the scope, None for the environment's, which may change in it."""
        if self._conditions is None and self._folder is None and current_plan() is not None:
            return None
        if not self._plans:
            self._plans.append(plan_with(self._conditions, self._folder))
        return self._plans[0]

    def _recreate_cm(self) -> record:
        again = record(folder=self._folder)
        again._conditions, again._plans = self._conditions, self._plans
        return again


def watch_process() -> None:
    """Look at calls of jitted functions in every thread from here on, for SNAPRT_REPRO_AFTER.

    Unlike `record_process`, it records nothing that the environment does not ask for. JAX may be
    about to look for its devices.
    """
    start_watching()
    plan = current_plan()
    jaxapi.set_process_watch(names_in(() if plan is None else plan.conditions))


def record_process() -> None:
    """Record calls of jitted functions in every thread from here on, as the environment says.

    Where it says nothing of what to record, everything is.

    Raises:
        UsageError: A variable has a value that is not allowed.
    """
    flags.take_over()
    check_plan()
    if current_plan() is None and "NEURON_DUMP_HLO_SNAPSHOT" not in os.environ:
        os.environ["SNAPRT_RECORD"] = "all"
    is_watched_already = jaxapi.process_watch() is not None
    watch_process()
    for name, source in () if is_watched_already else jaxapi.jit_calls_under_way():
        if not leaves_to_jax(source):
            process_recorder().missed(name, "recording began while JAX was already calling it")
