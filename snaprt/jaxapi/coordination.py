"""The coordination service of ``jax.distributed``: keys and values that all processes share.

Uses ``jax._src.distributed.global_state``, which has no public name. Its client is the same in JAX
0.10 to 0.12.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import distributed as _distributed


@dataclass(frozen=True)
class Coordination:
    """The service as one process of the job reaches it.

    Attributes:
        rank: Which of the processes this is.
        count: How many processes the job has.
        client: JAX's connection.
    """

    rank: int
    count: int
    client: Any

    def put(self, key: str, value: bytes) -> None:
        """Store a value, in the place of another one.

        Raises:
            RuntimeError: The service cannot be reached.
        """
        self.client.key_value_set_bytes(key, value, allow_overwrite=True)

    def put_new(self, key: str, value: bytes) -> bool:
        """Store a value unless the key has one; return whether it had none.

        Raises:
            RuntimeError: The service cannot be reached.
        """
        try:
            self.client.key_value_set_bytes(key, value, allow_overwrite=False)
        except RuntimeError as error:
            if _status(error) == "ALREADY_EXISTS":
                return False
            raise
        return True

    def get(self, key: str) -> bytes | None:
        """Return the value of a key, or None where it has none yet.

        Raises:
            RuntimeError: The service cannot be reached.
        """
        try:
            value: bytes = self.client.key_value_try_get_bytes(key)
        except RuntimeError as error:
            if _status(error) == "NOT_FOUND":
                return None
            raise
        return value

    def wait_for(self, key: str, seconds: float) -> bytes | None:
        """Return the value of a key as soon as it has one, or None after so many seconds.

        Raises:
            RuntimeError: The service cannot be reached.
        """
        try:
            milliseconds = max(1, round(1000 * seconds))
            value: bytes = self.client.blocking_key_value_get_bytes(key, milliseconds)
        except RuntimeError as error:
            if _status(error) == "DEADLINE_EXCEEDED":
                return None
            raise
        return value

    def below(self, folder: str) -> dict[str, bytes]:
        """Return the values of all keys that begin with ``folder/``, by the rest of the key.

        Raises:
            RuntimeError: The service cannot be reached.
        """
        pairs = self.client.key_value_dir_get_bytes(f"{folder}/")
        return {key.rpartition(f"{folder}/")[2]: value for key, value in pairs}

    def delete(self, folder: str) -> None:
        """Delete a key, and all keys that begin with ``folder/``.

        Raises:
            RuntimeError: The service cannot be reached.
        """
        self.client.key_value_delete(folder)

    def is_current(self) -> bool:
        """Return whether ``jax.distributed`` has not been shut down since."""
        return _distributed.global_state.client is self.client


def coordination() -> Coordination | None:
    """Return the service of this job; None where JAX knows of one process only."""
    state = _distributed.global_state
    if state.client is None or (state.num_processes or 1) < 2:
        return None
    return Coordination(state.process_id, state.num_processes, state.client)


def when_job_is_joined(call: Callable[[], object]) -> None:
    """Call ``call`` when ``jax.distributed.initialize()`` has joined the job: now, if it has."""
    if _distributed.global_state.client is not None:
        call()
        return
    original = _distributed.State.initialize

    @functools.wraps(original)
    def initialize(*arguments: Any, **named: Any) -> None:
        original(*arguments, **named)
        call()

    _distributed.State.initialize = initialize  # type: ignore[method-assign]


def process_of_job() -> tuple[int, int]:
    """Return the number of this process in its job and how many there are, by `jax.distributed`.

    Unlike `jax.process_index` it starts no backend. Before `jax.distributed.initialize` it is 0
    of 1. Checked with jax 0.10.2 and 0.12.0.
    """
    state = _distributed.global_state
    return state.process_id, state.num_processes or 1


def processes_of(devices: Iterable[jax.Device]) -> tuple[int, ...]:
    """Return the processes that own some of ``devices``, in order."""
    return tuple(sorted({device.process_index for device in devices}))


def all_arrive(name: str, processes: Sequence[int], seconds: float) -> bool:
    """Wait until these processes of a job have all come here; return whether they have.

    All of them get the same answer: who comes too late is told so, and so are those that waited.

    Args:
        name: Of this place and time: it can be used once.
        processes: Of JAX's, this one among them.
        seconds: How long to wait.
    """
    client = _distributed.global_state.client
    if client is None:
        return False
    try:
        client.wait_at_barrier(name, int(1000 * seconds), process_ids=list(processes))
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _status(error: RuntimeError) -> str:
    """Return the status that an error of the service begins with, as in ``NOT_FOUND: ...``."""
    return str(error).partition(":")[0].strip().upper()
