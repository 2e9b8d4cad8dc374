"""Run pieces of the two sides and remember the results.

A folder keeps every result under the hash of the module and its inputs, so that an interrupted
search repeats its steps without running anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from snaprt.errors import ExecutionError, SnaprtError
from snaprt.hlo.literals import dtype_of
from snaprt.hlo.proto import XlaMessage, serialize
from snaprt.host.regular_files import read_file
from snaprt.host.whole_files import whole_file
from snaprt_replay import floatbits
from snaprt_replay.hlo.extract import Extract, Piece, Value, extract
from snaprt_replay.hlo.hlo_module import entry_computation, parameters
from snaprt_replay.localize.program import FlatModule, Line
from snaprt_replay.run.workers import Outcome

Values = Mapping[Value, np.ndarray]
"""Arrays, by the value of the computation that each of them is."""


RunModule = Callable[[bytes, Sequence[np.ndarray]], "Future[Outcome]"]
"""Start a serialized HloModuleProto on inputs, for example `Workers.submit` with a variant."""


@dataclasses.dataclass(frozen=True, eq=False)
class Side:
    """One of the two sides that are compared."""

    name: str  # the variant as the user wrote it, and whose program it runs
    program: FlatModule  # the program that it runs
    run: RunModule  # how it runs a module


@dataclasses.dataclass(frozen=True, eq=False)
class Order:
    """Some pieces of one computation of a side, and the values that they take."""

    side: Side
    line: Line
    pieces: Sequence[Piece]
    values: Sequence[Values]


_KEPT_EXTRACTS = 8
_ANSWER = ".answer"


class BudgetSpentError(Exception):
    """The user's budget of seconds is spent. This error never leaves this package."""


class Session:
    """Count, remember and limit the runs of modules.

    Args:
        state: A folder to keep results in; None to keep none.
        budget: Seconds after which no further module is started; None for no limit.
        tell: Called with a line of progress before each round of runs.
    """

    def __init__(
        self,
        state: Path | None = None,
        budget: float | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.compiles = 0
        self.executions = 0
        self.remembered = 0
        self.tell = tell
        self._state = state
        self._started = time.perf_counter()
        self._budget = budget
        self._compiled: set[str] = set()
        # Keep the line itself too, so that no other line can get its id in the meantime.
        self._extracts: dict[object, tuple[Line, Extract, bytes]] = {}

    @property
    def seconds(self) -> float:
        """Return the time since the session began."""
        return time.perf_counter() - self._started

    def run(self, *orders: Order) -> list[list[Values]]:
        """Run all orders at the same time, and return the results of the pieces of each.

        Raises:
            BudgetSpentError: The budget was spent before an order could start.
            ExecutionError: A side cannot compile or run a piece.
            DeviceError: There is no such device or interpreter as a side runs on.
            UsageError: A side cannot run such a program.
        """
        return [[*finish()] for finish in [self._start(order) for order in orders]]

    def _start(self, order: Order) -> Callable[[], list[Values]]:
        extracted, hlo = self._extract(order)
        inputs = _inputs(extracted, order.values)
        key, module_key = _key(order.side.name, hlo, inputs)
        remembered = self._recall(key)
        if remembered is not None:
            self.remembered += 1
            return lambda: _sort(extracted, remembered)
        if self._budget is not None and self.seconds > self._budget:
            raise BudgetSpentError
        self.executions += 1
        if module_key not in self._compiled:
            self._compiled.add(module_key)
            self.compiles += 1
        future = order.side.run(hlo, inputs)

        def finish() -> list[Values]:
            outcome = future.result()
            if outcome.outputs is None:
                raise _failed(order.side, outcome)
            self._remember(key, outcome.outputs)
            return _sort(extracted, outcome.outputs)

        return finish

    def _extract(self, order: Order) -> tuple[Extract, bytes]:
        """Return a module of the order's pieces; the iterations of a loop share theirs."""
        key = (id(order.line), tuple(order.pieces))
        if key not in self._extracts:
            while len(self._extracts) >= _KEPT_EXTRACTS:
                del self._extracts[next(iter(self._extracts))]
            extracted = extract(order.line.program.module, order.line.computation, order.pieces)
            self._extracts[key] = (order.line, extracted, serialize(extracted.module))
        return self._extracts[key][1:]

    def _recall(self, key: str) -> tuple[np.ndarray, ...] | None:
        if self._state is None:
            return None
        try:
            check, _, content = read_file(self._state / f"{key}{_ANSWER}").partition(b"\n")
        except OSError:
            return None
        if check != _check([content]):
            return None  # damaged, or of an older version
        header, _, arrays = content.partition(b"\n")
        outputs, start = [], 0
        for dtype, shape, size in json.loads(header):
            piece, kind = arrays[start : start + size], floatbits.dtype_named(dtype)
            outputs.append(np.frombuffer(piece, kind).reshape(shape))
            start += size
        return tuple(outputs)

    def forget(self) -> None:
        """Remove the results from the folder, and the folder if it is empty then."""
        if self._state is None:
            return
        with contextlib.suppress(OSError):
            for path in self._state.glob(f"*{_ANSWER}"):
                path.unlink()
            self._state.rmdir()

    def _remember(self, key: str, outputs: Sequence[np.ndarray]) -> None:
        if self._state is None:
            return
        kinds = [(output.dtype.name, output.shape, output.nbytes) for output in outputs]
        parts: list[bytes | memoryview] = [json.dumps(kinds).encode() + b"\n"]
        for output in outputs:
            parts.append(np.ascontiguousarray(output).reshape(-1).view(np.uint8).data)
        try:
            self._state.mkdir(parents=True, exist_ok=True)
            with whole_file(self._state / f"{key}{_ANSWER}") as file:
                file.writelines([_check(parts) + b"\n", *parts])
        except OSError as error:
            self.tell(
                f"cannot write {self._state} ({error.strerror}): the state of the search is "
                "not saved"
            )
            self._state = None


def _check(parts: Iterable[bytes | memoryview]) -> bytes:
    """Return a checksum of bytes in several parts."""
    check = 0
    for part in parts:
        check = zlib.crc32(part, check)
    return f"{check:08x}".encode()


def _inputs(extracted: Extract, values: Sequence[Values]) -> list[np.ndarray]:
    arrays = [
        values[index][value] for index, piece in enumerate(extracted.parameters) for value in piece
    ]
    return typed(extracted.module, arrays)


def typed(module: XlaMessage, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return a module's inputs in the dtypes of its parameters."""
    declared = parameters(entry_computation(module))
    return [
        np.ascontiguousarray(array.astype(dtype_of(parameter.shape), copy=False)).reshape(
            array.shape
        )
        for array, parameter in zip(arrays, declared, strict=True)
    ]


def _sort(extracted: Extract, outputs: Sequence[np.ndarray]) -> list[Values]:
    """Give each piece its own results."""
    arrays = iter(outputs)
    return [{value: next(arrays) for value in piece} for piece in extracted.results]


def _key(side: str, hlo: bytes, inputs: Sequence[np.ndarray]) -> tuple[str, str]:
    of_module = hashlib.blake2b(side.encode() + b"\0" + hlo, digest_size=16)
    of_run = of_module.copy()
    for array in inputs:
        of_run.update(f"{array.dtype.name}{array.shape}".encode())
        of_run.update(array.tobytes())
    return of_run.hexdigest(), of_module.hexdigest()


def _failed(side: Side, outcome: Outcome) -> SnaprtError:
    assert outcome.failure is not None
    if outcome.failure.cannot_run:
        return outcome.failure.as_error(side.name)
    return ExecutionError(
        f"{side.name} fails on a part of the program: {outcome.failure}: {outcome.failure.message}",
        hint="`snaprt minify` finds the smallest program with this failure",
    )
