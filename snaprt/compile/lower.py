"""Lower a recorded program to StableHLO; it knows nothing of caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import jax

from snaprt import jaxapi, metrics, settings
from snaprt.compile import times
from snaprt.compile.downcast import names_of, narrowed, narrowings
from snaprt.compile.nan_flag import watched
from snaprt.graph.digest import program_digest
from snaprt.graph.program import Placement, Program


@contextmanager
def placed(placement: Placement) -> Iterator[None]:
    """Lower and run what is inside as the code that recorded it would have run it."""
    with (
        jaxapi.evaluating_compiled(),
        jaxapi.x64(placement.x64),
        jaxapi.under_mesh(placement.mesh),
    ):
        if placement.default_device is None:
            yield
        else:
            with jax.default_device(placement.default_device):
                yield


def lowering(
    program: Program, promoted: frozenset[int], is_watched: bool = False
) -> Callable[[], jax.stages.Lowered]:
    """Return what traces and lowers ``program``, now or later; it does not hold its arrays.

    Args:
        program: The program, with its inputs.
        promoted: Its literals that become trailing arguments.
        is_watched: Whether it gets a flag; see `snaprt.compile.nan_flag`.
    """
    function = program.as_function(promoted)
    if is_watched:
        function = watched(function)
    shapes = jaxapi.shapes_of(program.arguments(promoted))
    placement, donated = program.placement, program.donated
    shardings = [*program.shardings(), *([None] if is_watched else ())]
    asked = narrowings()
    stacks = jaxapi.whole_stacks if settings.get("XLA_HLO_DEBUG") else nullcontext

    def lower() -> jax.stages.Lowered:
        with (
            placed(placement),
            stacks(),
            times.stage(times.LOWER),
            metrics.timed("LowerTime"),
        ):
            lowered = jaxapi.lower(function, shapes, donated, shardings)
            return narrowed(lowered, asked) if asked else lowered

    return lower


def digest_of_lowering(program: Program, promoted: frozenset[int], is_watched: bool = False) -> str:
    """Return what stands, in every process, for the module that `lowering` makes.

    Raises:
        Unstable: See `snaprt.graph.digest`.
    """
    digest = program_digest(program, promoted) + names_of(narrowings())
    return f"{digest} watched" if is_watched else digest
