"""What a program becomes when it is compiled: what tells it from others, and how it is run."""

from __future__ import annotations

import functools
import itertools
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
from blake3 import blake3

from snaprt import jaxapi, metrics
from snaprt.compile import times

# What the partitioner was allowed, which shows in what it did; with one device it does nothing.
_ALLOWED = re.compile(r", allow_spmd_sharding_propagation_to_\w+=\{[^}]*\}")
_LEFT_OUT = re.compile(r"\[([0-9,]*)\]\S* constant\(\{\.\.\.\}\)")  # group: its dimensions
_MOST_CONSTANTS = 1 << 14  # elements: printing so many takes 5 ms, and nobody can run meanwhile
_ALIAS = re.compile(r"\{([0-9, ]*)\}: \(([0-9]+), \{[0-9, ]*\}, (?:may|must)-alias\)")


@dataclass(frozen=True)
class Proof:
    """What tells which executable ran.

    Attributes:
        fingerprint: XLA's own of the executable, in its words; empty where it has none.
        optimised_hlo: BLAKE3, in hex, of the optimized module as text with canonical names and
            without source locations, and with ``{...}`` in place of constants of more than ten
            elements where those have more than 16,384 together; empty where the platform keeps it
            to itself.
        aliases: ``result <- parameter`` for each result that takes a parameter's memory.
    """

    fingerprint: str = ""
    optimised_hlo: str = ""
    aliases: tuple[str, ...] = ()


def proof_of(executable: Any) -> Proof:
    """Return what tells a loaded executable of XLA's from others; None gives an empty proof.

    Printing a large module takes a while: ask in a thread that may take its time.
    """
    if executable is None:
        return Proof()
    printed = jaxapi.optimised_hlo(executable, constants=False)
    if 0 < _elements_left_out(printed) <= _MOST_CONSTANTS:
        printed = jaxapi.optimised_hlo(executable, constants=True)
    header, _, body = printed.partition("\n")
    text = f"{_ALLOWED.sub('', header)}\n{body}"
    return Proof(
        fingerprint=jaxapi.executable_fingerprint(executable),
        optimised_hlo=blake3(text.encode()).hexdigest() if header else "",
        aliases=_aliases(header),
    )


def _elements_left_out(text: str) -> int:
    """Return how many elements the constants have that the text does not show."""
    shapes = [found.split(",") for found in _LEFT_OUT.findall(text)]
    return sum(math.prod(int(size) for size in shape) for shape in shapes)


def _aliases(header: str) -> tuple[str, ...]:
    _, _, told = header.partition("input_output_alias=")
    return tuple(f"{result or 0} <- {parameter}" for result, parameter in _ALIAS.findall(told))


_numbers = itertools.count()


def new_number() -> int:
    """Return a number that no other executable of this process has."""
    return next(_numbers)


@dataclass(frozen=True)
class ModuleArtifacts:
    """A program in the forms in which it is recorded.

    Attributes:
        stablehlo: Portable StableHLO artifact (versioned bytecode) with source locations.
        hlo: Serialized ``xla.HloModuleProto``, before optimization.
        compile_options: Serialized ``xla.CompileOptionsProto``.
        trace_error: What a snapshot says of the error that ended its recording, if one did.
    """

    stablehlo: bytes
    hlo: bytes
    compile_options: bytes
    num_devices: int
    proof: Proof = field(default_factory=Proof)
    trace_error: Any = None


@dataclass(frozen=True, eq=False)
class Executable:
    """A compiled program, ready to be called with flat arguments.

    Attributes:
        graph_id: The first 16 hexadecimal digits of the digest of its StableHLO.
        number: Counts the executables of this process.
        donated: The arguments whose memory it takes.
        from_cache: Whether it came from the persistent cache rather than from the compiler.
        call: Runs it: arrays in, list of arrays out.
        lowered: Lowers the program again (or returns what compiling left), for recording.
        is_collected: Whether it was written down to be compiled later, and its results are zeros.
        is_watched: Whether its last result is the flag of `snaprt.compile.lower`.
        trace_error: What a snapshot says of the error that ended its recording, if one did.
    """

    name: str
    graph_id: str
    number: int
    devices: tuple[jaxapi.Device, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    donated: tuple[int, ...]
    from_cache: bool
    call: Callable[..., Sequence[jax.Array]]
    lowered: Callable[[], jax.stages.Lowered]
    is_collected: bool = False
    is_watched: bool = False
    times: times.ProgramTimes = field(default_factory=times.ProgramTimes)
    trace_error: Any = None

    def artifacts(self) -> ModuleArtifacts:
        """Return the program in the forms in which it is recorded; the first call makes them."""
        return _artifacts(self)


@functools.lru_cache(maxsize=8)
def _artifacts(executable: Executable) -> ModuleArtifacts:
    found = artifacts_of(executable.lowered(), executable.call)
    return replace(found, trace_error=executable.trace_error)


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
