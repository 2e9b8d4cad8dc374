"""The coordination service of ``jax.distributed``: keys and values that all processes share.

Uses ``jax._src.distributed.global_state``, which has no public name. Its client is the same in JAX
0.10 to 0.12; so is ``jax._src.clusters.ClusterEnv``.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from jax._src import distributed as _distributed
from jax._src import xla_bridge as _xla_bridge


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
        _answered(lambda: self.client.key_value_set_bytes(key, value, allow_overwrite=True))

    def put_new(self, key: str, value: bytes) -> bool:
        """Store a value unless the key has one; return whether it had none.

        Raises:
            RuntimeError: The service cannot be reached.
        """
        try:
            _answered(lambda: self.client.key_value_set_bytes(key, value, allow_overwrite=False))
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
            value: bytes = _answered(lambda: self.client.key_value_try_get_bytes(key))
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
        pairs = _answered(lambda: self.client.key_value_dir_get_bytes(f"{folder}/"))
        return {key.rpartition(f"{folder}/")[2]: value for key, value in pairs}

    def delete(self, folder: str) -> None:
        """Delete a key, and all keys that begin with ``folder/``.

        Raises:
            RuntimeError: The service cannot be reached.
        """
        _answered(lambda: self.client.key_value_delete(folder))

    def is_current(self) -> bool:
        """Return whether ``jax.distributed`` has not been shut down since."""
        return _distributed.global_state.client is self.client


ANSWER_SECONDS: Final = 5.0
"""How long a coordinator that is stopped or cannot be reached is waited for."""

_Answer = TypeVar("_Answer")
_unanswered: list[threading.Thread] = []


def _answered(call: Callable[[], _Answer], seconds: float = ANSWER_SECONDS) -> _Answer:
    """Return what a call of the service returns.

    JAX's own calls wait until the heartbeat fails, which takes 100 s by default. After a call
    without an answer, others fail at once until that one returns.

    Raises:
        RuntimeError: The service does not answer in time, or the call has failed.
    """
    _unanswered[:] = [thread for thread in _unanswered if thread.is_alive()]
    if _unanswered:
        raise RuntimeError("UNAVAILABLE: the coordinator does not answer")
    answer: Future[_Answer] = Future()

    def ask() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    thread = threading.Thread(target=ask, name="snaprt-coordination", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # Python ends, and JAX is about to wait for the coordinator in any case
        return call()
    try:
        return answer.result(seconds)
    except TimeoutError:
        _unanswered.append(thread)
        raise RuntimeError(
            f"UNAVAILABLE: the coordinator has not answered within {seconds:g} s"
        ) from None


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
    def initialize(*arguments: Any, **kwargs: Any) -> None:
        original(*arguments, **kwargs)
        call()

    _distributed.State.initialize = initialize  # type: ignore[method-assign]


def process_of_job() -> tuple[int, int]:
    """Return JAX's number of this process in its job, and how many there are.

    Unlike `jax.process_index` it starts no backend, and does not wait for one that starts. Without
    `jax.distributed.initialize` it is 0 of 1, unless the backend knows of others, as on TPUs.
    Checked with jax 0.10.2 and 0.12.0.
    """
    state, backend = _distributed.global_state, _xla_bridge._default_backend
    if (state.num_processes or 1) > 1 or backend is None:
        return state.process_id, state.num_processes or 1
    return backend.process_index(), 1 + max(device.process_index for device in backend.devices())


def processes_of(devices: Iterable[Any]) -> tuple[int, ...]:
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
        milliseconds, ids = int(1000 * seconds), list(processes)
        _answered(lambda: client.wait_at_barrier(name, milliseconds, process_ids=ids), seconds + 1)
    except RuntimeError:
        return False
    return True


def _status(error: RuntimeError) -> str:
    """Return the status that an error of the service begins with, as in ``NOT_FOUND: ...``."""
    return str(error).partition(":")[0].strip().upper()


_VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def register_torchrun() -> None:
    """Have ``jax.distributed.initialize()`` take the variables of torchrun, where they are set.

    They come before those of SLURM and Open MPI: who launches processes inside of an allocation
    means these processes: JAX takes the first subclass, in the order of their definitions, whose
    variables are set.
    """
    from jax._src.clusters import ClusterEnv

    class Torchrun(ClusterEnv):
        name = "torchrun"

        @classmethod
        def is_env_present(cls) -> bool:
            return all(os.environ.get(variable) for variable in _VARIABLES)

        @classmethod
        def get_coordinator_address(
            cls, timeout_secs: int | None, override_coordinator_port: str | None
        ) -> str:
            port = override_coordinator_port or os.environ["MASTER_PORT"]
            return f"{os.environ['MASTER_ADDR']}:{port}"

        @classmethod
        def get_process_count(cls) -> int:
            return int(os.environ["WORLD_SIZE"])

        @classmethod
        def get_process_id(cls) -> int:
            return int(os.environ["RANK"])

        @classmethod
        def get_local_process_id(cls) -> int | None:
            # One device for each process of a machine, unless there is one process, or the
            # launcher has shown each its own devices.
            if (
                os.environ.get("LOCAL_WORLD_SIZE", "1") == "1"
                or "SNAPRT_LAUNCH_DEVICES" in os.environ
            ):
                return None
            return int(os.environ.get("LOCAL_RANK", "0"))

    cluster_types = ClusterEnv._cluster_types
    cluster_types.insert(0, cluster_types.pop(cluster_types.index(Torchrun)))
