"""What a program becomes when it is compiled: what tells it from others, and how it is run."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax

from snaprt import jaxapi, metrics
from snaprt.compile import times
from snaprt.compile.module import run_elsewhere
from snaprt.graph.artifacts import ModuleArtifacts, proof_of
from snaprt.host.interruptions import raise_if_interrupted

_numbers = itertools.count()


def new_number() -> int:
    """Return a number that no other executable of this process has."""
    return next(_numbers)


@dataclass(frozen=True, eq=False)
class Executable:
    """A compiled program, ready to be called with flat arguments."""

    name: str
    graph_id: str  # the first 16 hexadecimal digits of the digest of its StableHLO
    number: int  # counts the executables of this process
    devices: tuple[jaxapi.Device, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    donated: tuple[int, ...]  # the arguments whose memory it takes
    from_cache: bool  # whether it came from the persistent cache rather than from the compiler
    call: Callable[..., Sequence[jax.Array]]  # runs it: arrays in, list of arrays out
    # Lowers the program again (or returns what compiling left), for recording.
    lowered: Callable[[], jax.stages.Lowered]
    # Whether it was written down to be compiled later, and its results are zeros.
    is_collected: bool = False
    is_watched: bool = False  # whether its last result is the flag of `snaprt.compile.lower`
    is_pure: bool = True  # whether an execution does nothing but compute its results
    times: times.ProgramTimes = field(default_factory=times.ProgramTimes)
    # What a snapshot says of the error that ended its recording, if one did.
    trace_error: Any = None

    def artifacts(self) -> ModuleArtifacts:
        """Return the program in the forms in which it is recorded; the first call makes them."""
        return _artifacts(self)

    def run_again(self, inputs: Sequence[Any], device: jaxapi.Device | None) -> Sequence[jax.Array]:
        """Run it once more, as whoever observes it may ask; see the recorder's `Executable`."""
        if device is not None:
            return run_elsewhere(self, inputs, device)
        try:
            return self.call(*inputs)
        except ValueError as error:
            return self.call(*_laid_out(inputs, error))


@functools.lru_cache(maxsize=8)
def _artifacts(executable: Executable) -> ModuleArtifacts:
    artifacts = artifacts_of(executable.lowered(), executable.call)
    return replace(artifacts, trace_error=executable.trace_error)


def artifacts_of(lowered: jax.stages.Lowered, compiled: Any) -> ModuleArtifacts:
    """Return a program in the forms in which it is recorded."""
    return ModuleArtifacts(
        stablehlo=jaxapi.portable_stablehlo(lowered),
        hlo=jaxapi.hlo_proto(lowered),
        compile_options=jaxapi.compile_options_of_lowered(lowered).SerializeAsString(),
        num_devices=len(jaxapi.devices_of_lowered(lowered)),
        proof=proof_of(jaxapi.loaded_executable(compiled)),
    )


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
        outputs = _timed_call(executable, inputs)
    except Exception as error:
        raise_if_interrupted(error)
        if token is not None and observer is not None:
            observer.failed(token, error)
        raise
    if token is not None and observer is not None:
        observer.after(token, outputs, outputs[-1] if executable.is_watched else None)
    return outputs[:-1] if executable.is_watched else outputs


def _timed_call(executable: Executable, inputs: Sequence[jax.Array]) -> Sequence[jax.Array]:
    started = time.perf_counter_ns()
    try:
        return executable.call(*inputs)
    except ValueError as error:
        return executable.call(*_laid_out(inputs, error))
    finally:
        elapsed = time.perf_counter_ns() - started
        metrics.metric_add("ExecuteTime", elapsed)
        executable.times.executed(elapsed)


def _laid_out(inputs: Sequence[jax.Array], error: ValueError) -> Sequence[jax.Array]:
    """Return inputs in the layouts that programs have, if that is what JAX refuses them for.

    Nothing has run by then: JAX compares layouts first.
    """
    laid_out = jaxapi.with_default_layouts(inputs)
    if laid_out is None:
        raise error
    return laid_out
