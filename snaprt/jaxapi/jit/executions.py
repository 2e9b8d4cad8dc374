"""Starts executions before JAX asks for them, and hands it their results when it does."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax._src import array as _array
from jax._src import core as _core
from jax._src.interpreters import pxla as _pxla

from snaprt.jaxapi.compiler.known_lowerings import Known, NotLowered, knowing_lowering
from snaprt.jaxapi.jit.entry import infer_jit, run_jit
from snaprt.jaxapi.tracing.traces import current_trace_setting, once

JitCall = tuple[Any, Any, Any, Any]
"""A call of a jitted function: the function, what JAX knows of the jit, and the arguments."""

Answer = Callable[[Any, Sequence[Any]], Any]
"""Takes an executable and its inputs, as placed by JAX; returns the results of that execution if it
was started before, else None."""


class _Answering(threading.local):
    answer: Answer | None = None


_answering = _Answering()


@contextlib.contextmanager
def answering(answer: Answer) -> Iterator[None]:
    """Ask ``answer`` before each execution without effects that this thread starts inside."""
    _answer_executions()
    before, _answering.answer = _answering.answer, answer
    try:
        yield
    finally:
        _answering.answer = before


class _Answered:
    """Stands in the place of an executable while one thread calls it."""

    def __init__(self, executable: Any, answer: Answer) -> None:
        self._executable = executable
        self._answer = answer
        self._thread = threading.get_ident()

    def execute_sharded(self, inputs: Sequence[Any], **options: Any) -> Any:
        if not options and threading.get_ident() == self._thread:
            results = self._answer(self._executable, inputs)
            if results is not None:
                return results
        return self._executable.execute_sharded(inputs, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executable, name)


@once
def _answer_executions() -> None:
    """Let JAX's Python ask before it executes what it has compiled.

    Checked with jax 0.10.2 and 0.12.0: the call reads its executable from an attribute each time.
    """
    call = _pxla.ExecuteReplicated.__call__

    @functools.wraps(call)
    def ask_and_call(self: Any, *args: Any) -> Any:
        answer, executable = _answering.answer, self.xla_executable
        if answer is None or type(executable) is _Answered:
            return call(self, *args)
        self.xla_executable = _Answered(executable, answer)
        try:
            return call(self, *args)
        finally:
            self.xla_executable = executable

    replicated: Any = _pxla.ExecuteReplicated
    replicated.__call__ = ask_and_call


def start_execution(loaded: tuple[Any, int], inputs: Sequence[jax.Array]) -> Any:
    """Start what `load_jit_executable` returned; return what JAX makes its results of."""
    return loaded[0].execute_sharded(inputs)


def is_single_array(value: Any) -> bool:
    """Return whether JAX hands a value to an executable for one device as it is."""
    return type(value) is _array.ArrayImpl and len(value.sharding.device_set) == 1


def is_evaluating() -> bool:
    """Return whether operations of this thread run at once, as in plain eager JAX."""
    return current_trace_setting.value is _core.eval_trace


class PureCall:
    """A call of a jitted function that JAX has made, whose program does nothing but compute.

    Attributes:
        done: What JAX's C++ takes.
        kept_arguments: Which of its arguments its executable takes; None where more goes in.
        donated: Which of the arguments the executable may take the memory of.
    """

    def __init__(self, traced: Callable[[], None], known: Known, *call: *JitCall) -> None:
        """Make a call.

        Args:
            traced: Called once the function has been traced.
            known: Asked before it is lowered.
            call: The call.
        """
        fun, info, args, kwargs = call
        inferred, flat = infer_jit(fun, info, args, kwargs)
        traced()
        try:
            with knowing_lowering(known):
                self.done = run_jit(inferred, flat, fun, args, kwargs)
        except NotLowered:
            self.done = run_jit(inferred, flat, fun, args, kwargs)
        jaxpr, compiled, const_args = self.done[4], self.done[5], self.done[7]
        execute = getattr(compiled, "unsafe_call", None)
        self.kept_arguments: tuple[int, ...] | None = None
        self.donated: tuple[int, ...] = ()
        if (
            isinstance(execute, _pxla.ExecuteReplicated)
            and not (jaxpr.effects or const_args or inferred.consts)
            and not (execute.mut or execute.ordered_effects or execute.has_unordered_effects)
            and not execute.has_host_callbacks
        ):
            self.kept_arguments = tuple(sorted(execute.kept_var_idx))
            flags = inferred.params["donated_invars"]
            self.donated = tuple([place for place, flag in enumerate(flags) if flag])
