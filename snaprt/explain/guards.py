"""What a graph was compiled for: if one of these changes, the next call compiles again.

The counterpart of `snaprt.explain.reasons`, which says what has changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from snaprt import jaxapi
from snaprt.explain.reasons import ADVICE, Outline, name_of, outline_of, value_text
from snaprt.graph.program import LITERAL
from snaprt.runtime.events import Execution
from snaprt.units import counted


@dataclass(frozen=True)
class Guard:
    """One thing that must stay as it is for a graph to run again without a compilation."""

    # ``shape`` (with dtype and weak type), ``sharding``, ``constant``, ``operations``, ``outputs``,
    # ``donation`` or ``devices``.
    kind: str
    text: str  # what it is now
    place: jaxapi.Frame | None  # the user's line that uses it; ``None`` where there is no such line

    @property
    def advice(self) -> str:
        """What to write so that it stays; empty where there is nothing to write."""
        return ADVICE.get(self.kind, "")

    def __str__(self) -> str:
        where = "" if self.place is None else f" at {jaxapi.place_text(self.place)}"
        return f"{self.kind}: {self.text}{where}"


def argument_names(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[int, str]:
    """Return what a function calls the arrays it is given, such as ``batch['x']``, by their id."""
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # a function without a signature, or a call that will fail
        return {}
    return {
        id(leaf): f"{name}{jax.tree_util.keystr(path)}"
        for name, value in given.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(value)
    }


def guards_of(run: Execution, known: Mapping[int, str]) -> tuple[Guard, ...]:
    """Return the guards of a graph that is about to run, the most telling ones first.

    Args:
        run: The graph, with its inputs.
        known: Names of arrays by their id; for others, the user's variables are looked through.
    """
    outline = outline_of(run.program, run.promoted, is_watched=run.executable.is_watched)
    names = [
        known.get(id(array)) or name_of(array) or f"input {number}"
        for number, array in enumerate(run.program.inputs)
    ]
    return (
        *_inputs(outline, names),
        *_constants(outline),
        *_operations(outline),
        *_donations(outline, names),
        *_devices(run),
    )


def _inputs(outline: Outline, names: list[str]) -> Iterator[Guard]:
    for number, (name, (aval, sharding, is_committed)) in enumerate(
        zip(names, outline.inputs, strict=True)
    ):
        use = outline.first_use(number)
        place = None if use is None else use.place
        weak = ", weakly typed, like a Python scalar" if aval.weak_type else ""
        yield Guard("shape", f"`{name}` is {aval.str_short(True)}{weak}", place)
        if is_committed:
            yield Guard("sharding", f"`{name}` lies as {sharding}", place)


def _constants(outline: Outline) -> Iterator[Guard]:
    for number, literal in enumerate(outline.literals):
        if number in outline.promoted:
            continue
        use = outline.first_use(number, LITERAL)
        if use is not None:
            text = f"a constant of {use.name} is {value_text(literal.value)}"
            yield Guard("constant", text, use.place)


def _operations(outline: Outline) -> Iterator[Guard]:
    names = list(dict.fromkeys(outline.names))
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    count = counted(len(outline.names), "operation")
    text = f"{count} ({shown}), with the same parameters and in the same order"
    yield Guard("operations", text, outline.operations[0].place if names else None)
    for position in sorted({position for position, _ in outline.outputs}):
        operation = outline.operations[position]
        text = f"the result of {operation.name} is alive at the graph break"
        yield Guard("outputs", text, operation.place)


def _donations(outline: Outline, names: list[str]) -> Iterator[Guard]:
    if outline.donated:
        reused = ", ".join(f"`{names[index]}`" for index in outline.donated)
        yield Guard("donation", f"results reuse the memory of {reused}", None)


def _devices(run: Execution) -> Iterator[Guard]:
    placement: Any = run.program.placement
    devices = ", ".join(map(str, run.executable.devices))
    types = "enabled" if placement.x64 else "disabled"
    mesh = (
        "" if placement.mesh is None or placement.mesh.empty else f", mesh {placement.mesh.shape}"
    )
    yield Guard("devices", f"it runs on {devices}, with 64-bit types {types}{mesh}", None)
