"""Lower a recorded program to StableHLO; it knows nothing of caches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from snaprt import jaxapi, metrics
from snaprt.lazy.graph import Placement, Program


@contextmanager
def placed(placement: Placement) -> Iterator[None]:
    """Lower and run what is inside as the code that recorded it would have run it."""
    with jaxapi.evaluating(), jaxapi.x64(placement.x64):
        if placement.default_device is None:
            yield
        else:
            with jax.default_device(placement.default_device):
                yield


def lower_program(
    program: Program, promoted: frozenset[int], promoted_values: list[jax.Array]
) -> jax.stages.Lowered:
    """Trace and lower ``program``, with the ``promoted`` literals as trailing arguments."""
    with placed(program.placement), metrics.timed("LowerTime"):
        function = program.as_function(promoted)
        return jaxapi.lower(function, [*program.inputs, *promoted_values])
