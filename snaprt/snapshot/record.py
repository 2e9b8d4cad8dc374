"""Sees executions and hands what is to be recorded to the writer; must not know graphs or files.

While recording is off, an execution costs a comparison and a count. While it is on, arrays are not
copied here either: JAX's are immutable, so the writer's thread fetches what it holds references to.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from snaprt import jaxapi, metrics
from snaprt.snapshot import layout, policy, surroundings
from snaprt.snapshot.content import Artifacts, gather
from snaprt.snapshot.steps import steps_ended
from snaprt.snapshot.writer import SnapshotWriter


class _Executable(Protocol):
    """What the recorder needs to know of an executable.

    ``graph_id`` has 16 hex digits, ``number`` is unique in the process, ``donated`` are the numbers
    of the arguments whose memory an execution may reuse. ``artifacts`` is called in the writer's
    thread, and may lower the module again.
    """

    @property
    def name(self) -> str: ...
    @property
    def graph_id(self) -> str: ...
    @property
    def number(self) -> int: ...
    @property
    def devices(self) -> tuple[jaxapi.Device, ...]: ...
    @property
    def input_names(self) -> tuple[str, ...]: ...
    @property
    def output_names(self) -> tuple[str, ...]: ...
    @property
    def donated(self) -> tuple[int, ...]: ...
    def artifacts(self) -> Artifacts: ...


@dataclass(frozen=True)
class _Surroundings:
    """What is noted when an execution begins, for it may change before the file is written."""

    folder: Path
    count: int
    step: int
    time: float
    xla_flags: str
    environment: Mapping[str, str]
    jax_config: Mapping[str, str]


@dataclass(frozen=True)
class _Recording:
    """An execution under way of which the outputs are to be recorded on some devices."""

    executable: _Executable
    surroundings: _Surroundings
    devices: tuple[tuple[int, jaxapi.Device], ...]


class Recorder:
    """Records executions as the policy says; an observer of ``snaprt.execute.run``.

    Args:
        writer: Writes the files; by default one of its own.
        step: Returns how many steps came before; called in the thread that executes.
    """

    def __init__(
        self, writer: SnapshotWriter | None = None, step: Callable[[], int] | None = None
    ) -> None:
        self.writer = SnapshotWriter() if writer is None else writer
        self._step = step
        self._counters: dict[int, itertools.count[int]] = {}

    def before(self, executable: _Executable, inputs: Sequence[Any]) -> _Recording | None:
        """See an execution begin: ask the policy, and queue its inputs if they are wanted.

        Returns:
            None, unless its outputs are wanted.
        """
        counter = self._counters.get(executable.number)
        if counter is None:
            counter = self._counters.setdefault(executable.number, itertools.count())
        count = next(counter)
        folder = policy.dump_folder()
        if folder is None:
            return None
        try:
            return self._begin(executable, inputs, folder, count)
        except Exception as error:
            self.writer.complain(error)
            return None

    def after(self, token: _Recording, outputs: Sequence[Any]) -> None:
        """See the outputs of an execution, which may not be computed yet, and queue them."""
        try:
            for index, device in token.devices:
                self._submit(
                    token.executable, "outputs", index, device, outputs, token.surroundings
                )
        except Exception as error:
            self.writer.complain(error)

    def failed(self, token: _Recording, error: BaseException) -> None:
        """Learn that an execution failed: there are no outputs; its inputs stay queued."""
        metrics.counter_add("SnapshotFailedExecution")

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything recorded so far is on disk, at most ``timeout`` seconds."""
        return self.writer.flush(timeout)

    def _begin(
        self, executable: _Executable, inputs: Sequence[Any], folder: Path, count: int
    ) -> _Recording | None:
        process = jax.process_index()
        here = (device for device in executable.devices if device.process_index == process)
        wanted = [
            (index, device, words)
            for index, device in enumerate(here)
            if (words := policy.decide(executable.name, index, count))
        ]
        if not wanted:
            return None
        surrounding = _Surroundings(
            folder=folder,
            count=count,
            step=-1 if self._step is None else self._step(),
            time=time.time(),
            xla_flags=os.environ.get("XLA_FLAGS", ""),
            environment=surroundings.environment(),
            jax_config=surroundings.jax_config(),
        )
        with_inputs = [(index, device) for index, device, words in wanted if "inputs" in words]
        if with_inputs:
            kept = _kept(inputs, executable.donated)
            for index, device in with_inputs:
                self._submit(executable, "inputs", index, device, kept, surrounding)
        with_outputs = tuple(
            (index, device) for index, device, words in wanted if "outputs" in words
        )
        return _Recording(executable, surrounding, with_outputs) if with_outputs else None

    def _submit(
        self,
        executable: _Executable,
        role: layout.Role,
        index: int,
        device: jaxapi.Device,
        arrays: Sequence[Any],
        surrounding: _Surroundings,
    ) -> None:
        execution = layout.Execution(
            role=role,
            name=executable.name,
            graph_id=executable.graph_id,
            process=jax.process_index(),
            executable=executable.number,
            device_index=index,
            execution_count=surrounding.count,
            step=surrounding.step,
            time=surrounding.time,
            device=surroundings.describe_device(device),
            devices=tuple(surroundings.describe_device(one) for one in executable.devices),
            platform_version=surroundings.platform_version(device),
            versions=surroundings.versions(),
            xla_flags=surrounding.xla_flags,
            environment=surrounding.environment,
            jax_config=surrounding.jax_config,
            input_names=_unique(executable.input_names),
            output_names=_unique(executable.output_names),
            donated=tuple(executable.donated),
            source_locations=(),
        )
        names = execution.input_names if role == "inputs" else execution.output_names
        self.writer.submit(
            surrounding.folder / layout.file_name(execution),
            lambda: gather(execution, executable.artifacts, names, arrays, device),
            sum(_nbytes(array) for array in arrays),
        )


@functools.cache
def process_recorder() -> Recorder:
    """Return the recorder of this process, made at its first use: every program shares it."""
    return Recorder(step=steps_ended)


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names, each that was there before with its number added."""
    taken: dict[str, None] = {}
    for number, name in enumerate(names):
        while name in taken:
            name = f"{name}#{number}"
        taken[name] = None
    return tuple(taken)


def _kept(inputs: Sequence[Any], donated: Sequence[int]) -> list[Any]:
    """Return arrays that stay as they are: copies of what is donated, and of NumPy's own."""
    return [
        jnp.copy(array)
        if number in donated
        else array
        if isinstance(array, jax.Array)
        else np.array(array)
        for number, array in enumerate(inputs)
    ]


def _nbytes(array: Any) -> int:
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return 16 * array.size  # of keys: as many as the largest of JAX's own PRNGs takes
    return int(array.nbytes)
