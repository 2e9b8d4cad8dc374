"""Executions whose arrays are held until they are written or let go.

JAX's arrays never change, so a reference holds one, until a program donates it: whoever runs one
that does says so first (`about_to_donate`), and what is held elsewhere is copied.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from snaprt import jaxapi
from snaprt.graph.artifacts import ModuleArtifacts
from snaprt.host.identities import identity
from snaprt.snapshot.format import schema
from snaprt.snapshot.format.content import to_host
from snaprt.snapshot.recorder.conditions import Condition, Moment
from snaprt.snapshot.recorder.plan import Hold, Plan

_POLL_SECONDS = 0.001


class RecordedExecutable(Protocol):
    """What the recorder needs to know of an executable."""

    @property
    def name(self) -> str:
        """The name of its module."""
        ...

    @property
    def graph_id(self) -> str:
        """16 hex digits that are the same for the same graph."""
        ...

    @property
    def number(self) -> int:
        """Unique in the process."""
        ...

    @property
    def devices(self) -> tuple[jaxapi.Device, ...]:
        """All that it runs on, in its own order."""
        ...

    @property
    def input_names(self) -> tuple[str, ...]:
        """A name for each argument."""
        ...

    @property
    def output_names(self) -> tuple[str, ...]:
        """A name for each result."""
        ...

    @property
    def donated(self) -> tuple[int, ...]:
        """The numbers of the arguments whose memory an execution may reuse."""
        ...

    @property
    def is_pure(self) -> bool:
        """Whether an execution does nothing but compute its results, and may be repeated."""
        ...

    def artifacts(self) -> ModuleArtifacts:
        """Return its module; called in the writer's thread, for it may lower it again."""
        ...

    def run_again(self, inputs: Sequence[Any], device: jaxapi.Device | None) -> Sequence[Any]:
        """Run it where it ran, or on another device if it ran on one; return all its results.

        Args:
            inputs: What it takes; those in ``donated`` are gone then.
            device: The other device, None for those that it is compiled for.
        """
        ...


def is_there_or_gone(array: Any) -> bool:
    """Return whether an array is computed or deleted, without waiting.

    jax 0.10.2 crashes where `is_ready` is called on a deleted array. Another thread may delete it,
    so C code alone asks both questions, and no other thread runs Python in between.

    Raises:
        RuntimeError: It was deleted, as some versions of JAX say it.
    """
    return any(map(operator.call, (array.is_deleted, array.is_ready)))


@dataclass(eq=False)
class HeldExecution:
    """One execution, with its arrays."""

    executable: RecordedExecutable  # what ran
    plan: Plan  # what was to be recorded when it began
    moment: Moment  # which execution it is
    devices: tuple[tuple[int, jaxapi.Device, frozenset[str]], ...]  # that may be recorded: roles
    inputs: list[Any]
    watching: Sequence[Condition]  # those that hold if it ends as they say
    limit: float  # nanoseconds after which it matters that it has not ended; else infinity
    began: int  # `time.perf_counter_ns()` when it began
    time: float  # seconds since 1970 when it began
    # An armed program makes one of these for each execution: the class holds these until then.
    outputs: list[Any] | None = field(default=None, init=False)  # once there are any
    # A bool scalar: whether an output has a NaN or an infinity; None where the program does not say
    # so, and the outputs have to be looked at.
    flag: Any = field(default=None, init=False)
    _last_to_come: Any = field(default=None, init=False)
    # The conditions for which it is recorded, whatever comes of it, and what its manifests say.
    recorded_for: Sequence[Condition] = field(default=(), init=False)
    cause: Any = field(default=None, init=False)
    # The conditions for which it runs again, and what came of that; which run the outputs are of.
    rechecked_for: Sequence[Condition] = field(default=(), init=False)
    recheck: schema.RecheckRecord | None = field(default=None, init=False)
    run_number: int = field(default=1, init=False)

    def take_outputs(self, outputs: Sequence[Any], flag: Any) -> None:
        """Learn its outputs, which may be on their way, and its flag."""
        self.outputs, self.flag = _kept(outputs), flag
        _holds(self, self.outputs)
        if flag is not None:
            self._last_to_come = flag
        else:
            for array in outputs:
                if hasattr(array, "is_ready"):  # arrays of PRNG keys cannot say it
                    self._last_to_come = array
                    break

    def let_go(self) -> None:
        """Hold its arrays no longer: they lie elsewhere."""
        self.inputs, self.outputs, self._last_to_come = [], None, None

    def is_ready(self) -> bool:
        """Return whether it has ended, without waiting."""
        return self._last_to_come is None or _is_ready(self._last_to_come)

    def wait(self) -> None:
        """Wait until it has ended; raise its error if it failed."""
        if self._last_to_come is not None:
            _wait_for(self._last_to_come)

    def ends_within(self, seconds: float) -> bool:
        """Wait until it has ended, but not longer than this; return whether it has."""
        until = time.monotonic() + seconds
        while self.outputs is None or not self.is_ready():
            if time.monotonic() > until:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def has_outputs(self) -> bool:
        """Return whether it has ended without an error, without waiting."""
        if self.outputs is None or not self.is_ready():
            return False
        try:
            self.wait()
        except Exception:
            return False
        return True

    def may_have_infinity_or_nan(self, error: BaseException | None) -> bool:
        """Return whether the flag of an execution that has ended is up; true where it has none.

        Args:
            error: What it failed with: JAX's settings may forbid such values.
        """
        if error is not None:
            return jaxapi.forbidden_value(error) is not None
        return self.flag is None or bool(np.asarray(self.flag))

    def has_new_infinity_or_nan(self, error: BaseException | None) -> bool:
        """Read all arrays: does an output have a NaN, or an infinity, and no input one?

        Args:
            error: What it failed with: JAX may have found one, and handed out no outputs.
        """
        kind = None if error is None else jaxapi.forbidden_value(error)
        of_outputs = _kinds(self.outputs or ()) if kind is None else frozenset({kind})
        return bool(of_outputs) and bool(of_outputs - _kinds(self.inputs))


def _is_ready(array: Any) -> bool:
    try:
        return is_there_or_gone(array)
    except RuntimeError:  # it was donated, so it was there
        return True


def _wait_for(array: Any) -> None:
    try:
        array.block_until_ready()
    except Exception:
        if not array.is_deleted():  # else somebody else has used it, so it was there
            raise


Trailing = tuple[list[Any], list[Any], Any]
"""An execution whose call has returned, of which all else can wait: its inputs, outputs, and what
the recorder makes a `HeldExecution` of. The first output, where there is one, is what tells how it
ended."""

_trails: list[Trail] = []


class Trail:
    """Such executions, the oldest first; their arrays are not donated either.

    Args:
        take_up: Makes a `HeldExecution` of one.
    """

    def __init__(self, take_up: Callable[[Trailing], None]) -> None:
        self._take_up = take_up
        self.start_afresh()
        _trails.append(self)

    def start_afresh(self) -> None:
        """Hold nothing."""
        self._executions: deque[Trailing] = deque()
        self._moving = threading.RLock()  # held by who takes one out, until it is elsewhere

    def __len__(self) -> int:
        return len(self._executions)

    def add(self, execution: Trailing, keep: float) -> None:
        """Hold an execution, and forget the oldest that have succeeded.

        Args:
            execution: The execution.
            keep: So many are held in any case.
        """
        self._executions.append(execution)
        if _unannounced:
            self.take_up()
        elif self._moving.acquire(False):
            try:
                while len(self._executions) > keep and _has_succeeded(self._executions[0]):
                    self._executions.popleft()
            except Exception:
                self.take_up()  # whoever waits for that one finds the error
            finally:
                self._moving.release()

    def take_up(self) -> None:
        """Have each of them made a `HeldExecution`."""
        while self._executions:
            self.take_up_oldest()

    def take_up_oldest(self) -> None:
        """Have the oldest of them made a `HeldExecution`, if there is one."""
        with self._moving:
            if self._executions:
                self._take_up(self._executions.popleft())

    @contextlib.contextmanager
    def still(self) -> Iterator[list[list[Any]]]:
        """Return the lists of their arrays; nobody takes one out inside."""
        with self._moving:
            executions = list(self._executions)  # others may be added meanwhile
            yield [arrays for *both, _ in executions for arrays in both]


def _has_succeeded(execution: Trailing) -> bool:
    """Return whether one has ended, without waiting; raise its error if it failed."""
    for output in execution[1][:1]:
        if not _is_ready(output):
            return False
        _wait_for(output)
    return True


def _kinds(arrays: Iterable[Any]) -> frozenset[str]:
    """Return ``nan`` and ``inf``, as this process's parts of the arrays hold them."""
    kinds: set[str] = set()
    for array in arrays:
        if jnp.issubdtype(array.dtype, jnp.inexact):
            for part in _parts(array):
                if np.isnan(part).any():
                    kinds.add("nan")
                if np.isinf(part).any():
                    kinds.add("inf")
    return frozenset(kinds)


def _parts(array: Any) -> Iterable[np.ndarray]:
    if isinstance(array, jax.Array):
        return [to_host(part) for _, _, part in jaxapi.parts_of_array(array)]
    return [np.asarray(array)]


def hold_inputs(inputs: Sequence[Any], donated: Sequence[int], hold: Hold) -> list[Any]:
    """Return arrays that stay as they are while and after the execution runs.

    Args:
        inputs: What the execution is called with.
        donated: Numbers of those whose memory it may take.
        hold: Whether copies lie on the device or the host; ``host``: whether all are copies there.
    """
    # NumPy's own may change.
    arrays = [array if _is_of_jax(array.__class__) else np.array(array) for array in inputs]
    if donated or hold == "host":
        for number, array in enumerate(inputs):
            if isinstance(array, jax.Array) and (
                number in donated or (hold == "host" and not _is_on_host(array))
            ):
                arrays[number] = copy(array, hold)
    return arrays


def has_deleted(inputs: Sequence[Any]) -> bool:
    """Return whether one of the inputs has been deleted: then JAX makes no execution of a call."""
    if jaxapi.are_arrays(inputs):
        return any(map(jaxapi.ArrayImpl.is_deleted, inputs))  # in a tenth of the time
    return any(_is_of_jax(array.__class__) and array.is_deleted() for array in inputs)


@functools.cache
def _is_of_jax(kind: type) -> bool:
    """Return what `isinstance` takes ten times as long to find out of each array."""
    return issubclass(kind, jax.Array)


def copy(array: jax.Array, hold: Hold) -> jax.Array:
    """Return a copy, with the same sharding, that nobody else can donate."""
    if hold == "device" or _is_on_host(array):
        return jaxapi.copy_array(array)
    return jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))


def bytes_on_a_device(arrays: Iterable[Any]) -> int:
    """Return how many bytes of some arrays lie on each of their devices."""
    return sum(array.nbytes // parts for array, parts, _ in _divided(arrays))


def bytes_held(arrays: Iterable[Any]) -> int:
    """Return how many bytes this process holds of some arrays: on all of its devices, no others."""
    return sum(array.nbytes // parts * here for array, parts, here in _divided(arrays))


def _divided(arrays: Iterable[Any]) -> Iterator[tuple[Any, int, int]]:
    """Yield arrays, in how many parts each is, and how many of them, or copies, lie here."""
    for array in arrays:
        sharding = getattr(array, "sharding", None)
        if sharding is None or len(sharding.device_set) == 1:
            yield array, 1, 1
        else:
            part = math.prod(sharding.shard_shape(array.shape))
            yield array, array.size // part if part else 1, len(sharding.addressable_devices)


def _is_on_host(array: jax.Array) -> bool:
    kind = array.sharding.memory_kind
    if kind is not None and kind.endswith("host"):
        return True
    devices: set[Any] = array.sharding.device_set
    return all(device.platform == "cpu" for device in devices)


_alive: set[weakref.ref[HeldExecution]] = set()

_unannounced: dict[int, Callable[[], object]] = {}


def donate_unannounced(announce: Callable[[], object] | None) -> None:
    """Let this thread donate arrays without `about_to_donate`; it does not while some are held.

    Args:
        announce: Called in this thread when some are about to be held: from then on, it says so.
            None where it says so already.
    """
    if announce is None:
        _unannounced.pop(threading.get_ident(), None)
    else:
        _unannounced[threading.get_ident()] = announce


def _kept(arrays: Sequence[Any]) -> list[Any]:
    """Return arrays that no other thread donates without a word: copies where one might."""
    if _unannounced:
        announce = _unannounced.pop(threading.get_ident(), None)
        if announce is not None:
            announce()
        for ended in _unannounced.keys() - sys._current_frames().keys():
            _unannounced.pop(ended, None)
        if _unannounced:
            return [copy(a, "device") if isinstance(a, jax.Array) else a for a in arrays]
    return list(arrays)


def remember(execution: HeldExecution) -> None:
    """Let the arrays of ``execution`` be copied if somebody donates them while it is alive."""
    execution.inputs = _kept(execution.inputs)
    _holds(execution, execution.inputs)
    _alive.add(weakref.ref(execution, _alive.discard))


class _Holders:
    """Which executions hold an array; those that are gone are forgotten now and then.

    Attributes:
        by_array: The executions, by the identity of the array.
        count: How many are noted for all arrays together.
        most: With more, those that are gone are forgotten.
    """

    def __init__(self) -> None:
        self.by_array: dict[int, list[weakref.ref[HeldExecution]]] = {}
        self.count = 0
        self.most = _FEW_HOLDERS
        self.lock = threading.Lock()


_FEW_HOLDERS: Final = 4096
_holders = _Holders()


def _holds(execution: HeldExecution, arrays: Sequence[Any]) -> None:
    """Take note that an execution holds arrays."""
    reference, holders = weakref.ref(execution), _holders
    with holders.lock:
        for array in arrays:
            holders.by_array.setdefault(identity(array), []).append(reference)
        holders.count += len(arrays)
        if holders.count > holders.most:
            holders.by_array = {
                key: alive
                for key, references in holders.by_array.items()
                if (alive := [held for held in references if held() is not None])
            }
            holders.count = sum(map(len, holders.by_array.values()))
            holders.most = 2 * holders.count + _FEW_HOLDERS


def is_anything_held() -> bool:
    """Return whether an array that is donated may have to be copied: finding those takes time."""
    return bool(_alive) or any(_trails)


def about_to_donate(arrays: Iterable[Any], hold: Hold) -> None:
    """Copy, where they are held, arrays whose memory the next execution takes."""
    if not is_anything_held():
        return
    copies: dict[int, Any] = {}
    with contextlib.ExitStack() as stack:
        held = [places for trail in _trails for places in stack.enter_context(trail.still())]
        going = set(map(identity, arrays))
        by_array = _holders.by_array
        for execution in {holder() for number in going for holder in by_array.get(number, ())}:
            if execution is not None:
                held += execution.inputs, execution.outputs or []
        for places in held:
            for place, array in enumerate(places):
                number = identity(array)
                if number in going:
                    if number not in copies:
                        copies[number] = copy(array, hold)
                    places[place] = copies[number]


def about_to_delete(array: Any) -> None:
    """Copy, where it is held, an array that the program deletes."""
    about_to_donate([array], "device")


def read_again(fetch: Callable[[Any], np.ndarray], places: list[Any], place: int) -> np.ndarray:
    """Return ``fetch(places[place])``, once more where it was donated and copied meanwhile."""
    while True:
        array = places[place]
        try:
            return fetch(array)
        except RuntimeError:
            if places[place] is array:
                raise
