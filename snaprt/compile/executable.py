"""What a program becomes when it is compiled: what tells it from others, and how it is run."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from blake3 import blake3

from snaprt import jaxapi, metrics
from snaprt.compile.obtain import Executable

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
