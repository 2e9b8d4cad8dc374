"""Runs the first call of a jitted function while JAX still traces it: ``SNAPRT_SPECULATE=1``.

The last start remembered which executable the first call of a function with such arguments ran.
As soon as that is loaded, it runs on the arguments of this start's call, while the program traces
and looks for its executable as ever; it is lowered where it was traced to something else than last
time. Only when JAX is about to execute is it told the results: where its executable is that very
object, and its inputs are those very arrays. So nothing is taken for granted, and what turns out
otherwise is dropped before anybody has seen it.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, Final

import jax
import numpy as np
from blake3 import blake3
from snaprt_cache.key import Key
from snaprt_cache.store import Cache

from snaprt import jaxapi, metrics
from snaprt.compile.cached import prefetch
from snaprt.compile.key import FIRST_CALLS, Subject, key_of
from snaprt.graph.digest import lowering_digest
from snaprt.host.collector import collecting_seldom
from snaprt.host.interruptions import raise_if_interrupted

_log = logging.getLogger("snaprt.cache")

#: A first call that takes less time is not remembered: there is nothing to win.
_MIN_SECONDS: Final = 0.02
#: How many calls are remembered.
_MAX_CALLS: Final = 64
#: The copies of what a call donates may have so many bytes, at most.
_MAX_COPIED: Final = 1 << 30
#: Arguments that are no arrays of JAX's are compared, so they are small.
_MAX_COMPARED: Final = 64 << 20


@dataclass(frozen=True)
class _Remembered:
    """What the first call of a function ran.

    Attributes:
        digest: Of the key of its executable.
        kept_arguments: Which arguments go in.
        donated: Which arguments may lose their memory.
        lowering: The digest of what its module was lowered from; "" where it has none.
        module: The digest of its module.
    """

    digest: str
    kept_arguments: tuple[int, ...]
    donated: tuple[int, ...]
    lowering: str
    module: str


class _Speculation:
    """An execution that is started ahead of the call that it is for.

    Attributes:
        was_used: Whether the call took its results.
    """

    def __init__(self, remembered: _Remembered, operands: Sequence[Any]) -> None:
        self._inputs = [operands[place] for place in remembered.kept_arguments]
        donated = frozenset(remembered.donated)
        self._donated = [place in donated for place in remembered.kept_arguments]
        self._lock = threading.Lock()
        self._is_over = False
        self._started: tuple[Any, Sequence[jax.Array], Any] | None = None
        self.was_used = False

    def start(self, ready: prefetch.Prefetched) -> None:
        """Start the execution, unless the call has been faster."""
        with self._lock:
            if self._is_over or len(ready.devices) != 1:
                return
            try:
                arguments = [
                    self._given(value, is_donated, ready.devices[0])
                    for value, is_donated in zip(self._inputs, self._donated, strict=True)
                ]
                results = jaxapi.start_execution(ready.loaded, arguments)
            except Exception as error:  # the call meets it, too, or does without
                _log.info("cannot run a program ahead of its call: %s", error)
                return
            self._started = ready.loaded[0], arguments, results

    @staticmethod
    def _given(value: Any, is_donated: bool, device: jaxapi.Device) -> jax.Array:
        if not jaxapi.is_single_array(value):
            return jax.device_put(np.array(value), device)  # the caller may write to it
        array: jax.Array = value
        return jaxapi.copy_array(array) if is_donated else array

    def answer(self, executable: Any, inputs: Sequence[Any]) -> Any:
        """Return the results, where the same executable is to run on the same inputs."""
        with self._lock:
            started = self._started
            if started is None or started[0] is not executable or self.was_used:
                return None
            _, arguments, results = started
            if len(inputs) != len(arguments) or not all(
                map(self._is_same, self._inputs, arguments, inputs)
            ):
                return None
            self.was_used = True
        for array, used, is_donated in zip(inputs, arguments, self._donated, strict=True):
            if is_donated and used.is_deleted():
                array.delete()
        return results

    @staticmethod
    def _is_same(value: Any, used: jax.Array, array: Any) -> bool:
        if jaxapi.is_single_array(value):
            return array is value and not value.is_deleted()
        return (
            array.aval == used.aval
            and array.devices() == used.devices()
            and np.asarray(array).tobytes() == np.asarray(used).tobytes()
        )

    def end(self) -> None:
        """Drop what was not used."""
        with self._lock:
            self._is_over = True
            self._started = None
            self._inputs.clear()


class Speculator:
    """Makes the first calls of the user's jitted functions, and remembers what they ran."""

    def __init__(
        self,
        cache: Cache,
        key_asked_for: Callable[[], Key | None],
        lowered: Callable[[], tuple[jaxapi.Lowering, str] | None],
    ) -> None:
        """Take the cache, and what tells of the key that this thread last asked it for.

        Args:
            cache: Where what is remembered is kept.
            key_asked_for: Returns that key.
            lowered: Returns what its module was lowered from, and its digest, where that was asked.
        """
        self._cache = cache
        self._key_asked_for = key_asked_for
        self._lowered = lowered
        self._lock = threading.Lock()
        self._key = key_of(Subject(FIRST_CALLS, prefetch.path_of_program(), cache.folder))
        self._remembered = _read(cache, self._key)
        self._calls = dict(self._remembered)  # what is to be remembered
        self._seen: set[str] = set()
        atexit.register(self._finish)
        jaxapi.ask_before_jit(Speculator, self._ask)

    def _ask(self, fun: Any, info: Any, args: Any, kwargs: Any) -> jaxapi.MakeCall | None:
        source = info.fun_sourceinfo
        if (
            (jaxapi.is_source_of_jax(source) and not isinstance(source, jaxapi.UsersSource))
            or not jaxapi.is_evaluating()
            or jaxapi.watch() is not None
        ):
            return None
        try:
            signature, operands = jaxapi.parse_jit_call(info, args, kwargs)
            name = _name_of_call(fun, source, signature, operands)
        except Exception as error:  # JAX says what is wrong with the call
            raise_if_interrupted(error)
            return None
        if name is None:
            return None
        with self._lock:
            if name in self._seen:
                return None
            self._seen.add(name)
        arrays = [jaxapi.data_of_keys(operand) for operand in operands]
        return lambda: self._call(name, arrays, fun, info, args, kwargs)

    def _call(self, name: str, operands: Sequence[Any], *call: *jaxapi.JitCall) -> tuple[Any, ...]:
        before: list[Key | None] = []

        def traced() -> None:
            before.append(self._key_asked_for())

        def known(lowering: jaxapi.Lowering) -> str | None:
            if remembered is None or not remembered.lowering:
                return None
            if not prefetch.is_coming(remembered.digest):
                return None
            if _digest_of_lowering(lowering) != remembered.lowering:
                return None
            metrics.counter_add("LoweringSkipped")
            return remembered.module

        started = time.perf_counter()
        remembered = self._remembered.get(name)
        if remembered is not None and not _fits(remembered, len(operands)):
            remembered = None
            with self._lock:
                self._calls.pop(name, None)
        if remembered is None or not _can_be_copied(remembered, operands):
            pure_call = jaxapi.PureCall(traced, known, *call)
        else:
            speculation = _Speculation(remembered, operands)
            prefetch.when_loaded(remembered.digest, speculation.start)
            try:
                with collecting_seldom(), jaxapi.answering(speculation.answer):
                    pure_call = jaxapi.PureCall(traced, known, *call)
            finally:
                speculation.end()
            if speculation.was_used:
                metrics.counter_add("SpeculationUsed")
            else:
                metrics.counter_add("SpeculationUnused")
        key, lowered = self._key_asked_for(), self._lowered()
        if key is None or key is before[0]:  # JAX had its executable already
            return pure_call.done
        with self._lock:
            if remembered is not None and remembered.digest != key.digest:
                self._calls.pop(name, None)
                metrics.counter_add("SpeculationWrong")
                _log.warning(
                    "%s runs a different program than at the last start: its code, what it uses "
                    "or the configuration has changed. What ran ahead was dropped.",
                    call[1].fun_sourceinfo,
                )
                return pure_call.done
        if pure_call.kept_arguments is None or time.perf_counter() - started < _MIN_SECONDS:
            return pure_call.done
        if lowered is not None or remembered is None:
            lowering, module = lowered or (None, "")
            digest = "" if lowering is None else _digest_of_lowering(lowering)
            with self._lock:
                self._calls[name] = _Remembered(
                    key.digest, pure_call.kept_arguments, pure_call.donated, digest, module
                )
        return pure_call.done

    def _finish(self) -> None:
        """Store what is to be remembered, at exit."""
        with self._lock:
            calls = dict(list(self._calls.items())[-_MAX_CALLS:])
        if calls != self._remembered:
            stored = {name: dataclasses.astuple(call) for name, call in calls.items()}
            fields = {"name": "first calls", "kind": "list"}
            self._cache.put(self._key, json.dumps(stored).encode(), fields, counted=False)


def _read(cache: Cache, key: Key) -> dict[str, _Remembered]:
    entry = cache.get(key, counted=False)
    try:
        stored = {} if entry is None else json.loads(entry.payload)
        return {
            name: _Remembered(digest, tuple(kept_arguments), tuple(donated), lowering, module)
            for name, (digest, kept_arguments, donated, lowering, module) in stored.items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        cache.discard(key, f"cannot read its list: {error!r}")
        return {}


def _fits(remembered: _Remembered, count: int) -> bool:
    """Return whether it can be of a call with so many arguments."""
    places = (*remembered.kept_arguments, *remembered.donated)
    digests = (remembered.digest, remembered.lowering, remembered.module)
    return all(isinstance(digest, str) for digest in digests) and all(
        type(place) is int and 0 <= place < count for place in places
    )


def _digest_of_lowering(lowering: jaxapi.Lowering) -> str:
    try:
        return lowering_digest(lowering)
    except Exception as error:  # `Unstable`, or a form of JAX's that is not foreseen
        _log.info("cannot compute the digest of a program: %r", error)
        return ""


def _can_be_copied(remembered: _Remembered, operands: Sequence[Any]) -> bool:
    copied = sum(_bytes(operands[place]) for place in remembered.donated)
    compared = sum(_bytes(o) for o in operands if not jaxapi.is_single_array(o))
    return copied <= _MAX_COPIED and compared <= _MAX_COMPARED


def _bytes(operand: Any) -> int:
    return getattr(operand, "nbytes", 0)  # none of a Python number


def _name_of_call(fun: Any, source: str, signature: Any, operands: Sequence[Any]) -> str | None:
    """Return what a call is known by at the next start; None where it is not to be known.

    It is a guess alone: no more depends on it than whether work is done in vain.
    """
    words = [source.partition(":")[0], str(signature)]
    for operand in operands:
        if jaxapi.is_single_array(jaxapi.data_of_keys(operand)):
            array: jax.Array = operand
            words.append(f"{array.aval} {array.sharding} {array.committed}")
        elif isinstance(operand, np.ndarray | np.generic | bool | int | float | complex):
            words.append(f"{type(operand).__name__} {np.result_type(operand)} {np.shape(operand)}")
        else:
            return None
    content = blake3("\n".join(words).encode())
    code = getattr(getattr(fun, "__func__", fun), "__code__", None)
    if isinstance(code, CodeType):
        _feed(content, code)
    return content.hexdigest()


def _feed(content: Any, code: CodeType) -> None:
    """Feed a digest with what code does, wherever it stands."""
    content.update(code.co_code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _feed(content, constant)
        else:
            content.update(repr(constant).encode())
    content.update(repr(code.co_names).encode())
