"""What each cause of a cut looks like in a program, and what to write instead: a table."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

from snaprt import jaxapi, settings
from snaprt.errors import GraphBreakError
from snaprt.trace.array import READ_METHODS, READ_PROPERTIES
from snaprt.units import counted


class Break(NamedTuple):
    """A cause of cuts."""

    what: str  # what the program does, in words; begins with code or a lower-case letter
    advice: str  # what to write instead; empty where a cut is what was asked for


_LOG: Final = (
    "log it in a step closure, which runs after the step: snaprt.add_step_closure(log, "
    "args=(x,)); or read it after mark_step, once every few steps"
)
_BRANCH: Final = (
    "select with jnp.where(x, a, b), or branch on the device with jax.lax.cond and "
    "jax.lax.while_loop"
)
_SIZE: Final = (
    "use a value that is known without running: a Python int, x.shape; or keep the number on "
    "the device"
)
_HOST: Final = "stay with jax.numpy on the device, or move it to the host after mark_step"
_DYNAMIC: Final = (
    "the shape of the result depends on the value: pass size= if the function accepts it, or "
    "keep the shape with jnp.where(mask, x, fill)"
)
_ONE_PLACE: Final = "move the arrays to one device or sharding first, with jax.device_put"
_AFTER: Final = "read it after mark_step"
_MARK: Final = (
    "call snaprt.mark_step() at the end of each iteration of the outermost loop; the iteration "
    "then becomes one program"
)
_JIT: Final = "put it inside a jax.jit function, which is recorded as one operation"

#: By the cause, as it is counted under ``host::CAUSE`` or ``cut::CAUSE``.
BREAKS: Final[Mapping[str, Break]] = {
    "mark_step": Break("mark_step", ""),
    "end": Break("the end of the function, or of the program", ""),
    "graph_size": Break(
        "no mark_step: SNAPRT_AUTO_STEP_SIZE or SNAPRT_MAX_GRAPH_SIZE operations were pending",
        _MARK,
    ),
    "graph_bytes": Break("no mark_step: SNAPRT_AUTO_STEP_BYTES bytes were pending", _MARK),
    "graph_work": Break("no mark_step: a fraction of a second of work was pending", _MARK),
    "own_program": Break(
        "no mark_step: a large jax.jit call, a loop, or an operation that draws random numbers "
        "runs as a separate program",
        _MARK,
    ),
    "repeats": Break(
        "no mark_step: the operations up to this line repeat",
        "call snaprt.mark_step() before this line, in each iteration of the loop",
    ),
    "array": Break("`np.asarray(x)`", _HOST),
    "bool": Break("`if x:`, or `bool(x)`", _BRANCH),
    "complex": Break("`complex(x)`", _LOG),
    "float": Break("`float(x)`", _LOG),
    "int": Break("`int(x)`", _SIZE),
    "item": Break("`x.item()`", _LOG),
    "format": Break("`f'{x:...}'`", _LOG),
    "repr": Break(
        "`print(x)`", "use jax.debug.print, which prints when the graph runs; or " + _LOG
    ),
    "hex": Break("`hex(x)`", _SIZE),
    "oct": Break("`oct(x)`", _SIZE),
    "index": Break("`range(x)`, `jnp.zeros(x)`, or `a_list[x]`", _SIZE),
    "slice": Break(
        "`a[:x]`", "take a slice of a fixed size: jax.lax.dynamic_slice(a, start, size)"
    ),
    "shape": Break("`jnp.zeros((x,))`, or another shape computed from a value", _SIZE),
    "bool_mask": Break(
        "`a[mask]`", "keep the shape: jnp.where(mask, a, fill); or jnp.nonzero(mask, size=n)"
    ),
    "nonzero": Break(
        "`jnp.nonzero(x)`, or `jnp.where(x)`", "pass size=; or select with jnp.where(x, a, b)"
    ),
    "unique": Break("`jnp.unique(x)`", "pass size="),
    "repeat": Break("`jnp.repeat(a, x)`", "pass total_repeat_length="),
    "bincount": Break("`jnp.bincount(x)`", "pass length="),
    "arange": Break("`jnp.arange(x)`", _SIZE),
    "linspace": Break("`jnp.linspace(..., num=x)`", _SIZE),
    "tolist": Break("`x.tolist()`", _HOST),
    "tobytes": Break("`x.tobytes()`", _HOST),
    "pickle": Break("pickling, for example for a checkpoint", "save after mark_step"),
    "dlpack": Break("passing x to another library through DLPack", _HOST),
    "device_get": Break("`jax.device_get(x)`", _LOG),
    "block_until_ready": Break("`x.block_until_ready()`", "wait with mark_step(wait=True)"),
    "device_put": Break(
        "`jax.device_put(x, device)`",
        "place arrays before the step, or inside it with jax.lax.with_sharding_constraint",
    ),
    "sharding": Break("`x.sharding` of an array on several devices", _AFTER),
    "devices": Break("an operation on arrays on different devices", _ONE_PLACE),
    "ref": Break("reading or writing a `jax.new_ref`", _JIT),
    "effect": Break(
        "`checkify.check`, or another effect that must happen immediately",
        "functionalize it: checkify.checkify(f); and throw its error after mark_step",
    ),
    "primitive": Break(
        "an operation that JAX can run but not compile",
        "register a lowering for it with jax.interpreters.mlir.register_lowering",
    ),
    "scope_end": Break("the end of the scope, with effects pending", ""),
    "debug_nans": Break("the end of `jax.debug_nans(True)`", "set it for the whole program"),
    "fork": Break(
        "`os.fork()`, or starting a process with multiprocessing's fork method",
        "start the process before the loop, or after mark_step",
    ),
    "effects_barrier": Break("`jax.effects_barrier()`", "wait with mark_step(wait=True)"),
    "shard_map": Break("an eager `jax.shard_map`", _JIT),
    "compiler_options": Break(
        "a `jax.jit` with compiler_options", "set them for the whole process, in XLA_FLAGS"
    ),
    "breakpoint": Break("`jax.debug.breakpoint()`", "remove it"),
    "callback": Break(
        "a new function of `jax.debug.callback`, or format of `jax.debug.print`, at each call",
        "define it outside of the loop, and pass what varies as an argument",
    ),
    "static": Break(
        "an operation with a Python number that changes each time, such as `x ** i` or `x[:i]`",
        "pass the number as an array: x ** jnp.asarray(i)",
    ),
    "new_graphs": Break(
        "no mark_step, and the graphs of this line keep being new: the thread runs eagerly for now",
        "keep shapes, Python numbers and control flow the same in each iteration; "
        "snaprt.CompilationProfiler() reports what differs",
    ),
    "compiled": Break(
        "a call of an executable from `jax.jit(f).lower(x).compile()`",
        "call the jax.jit function itself, which is recorded as one operation",
    ),
    "ahead_of_time": Break(
        "`jax.jit(f).lower(x)` or `.trace(x)`, or `jax.make_jaxpr(f)`, where f closes over x",
        "trace it before the loop, or pass x as an argument",
    ),
    "convert_to_metaty": Break(
        "`jax.jit(f).lower(x)` or `.trace(x)`, or `jax.make_jaxpr(f)(x)`",
        "pass jax.ShapeDtypeStruct(x.shape, x.dtype) instead of x",
    ),
    "x64": Break(
        "an array of a 64-bit type used while jax_enable_x64 is off",
        "convert it to a 32-bit type, or enable x64 where it is used",
    ),
    "key_reuse": Break(
        "an operation on PRNG keys while jax_debug_key_reuse is on",
        "turn it off once no key is reused; inside jitted functions it breaks no graph",
    ),
    "float0": Break(
        "a derivative with respect to integers",
        "differentiate only with respect to floating-point arguments",
    ),
    "abstract": Break("an argument that only describes an array", "pass an array"),
    "donation": Break(
        "donating or deleting an array that pending operations take",
        "call mark_step before it, or donate in a jax.jit function, which is recorded",
    ),
    "thread": Break(
        "another thread that uses x", "call mark_step before passing x to another thread"
    ),
    "eager": Break(
        "plain JAX using x outside the lazy scope, or eager mode",
        "move it into the scope, or call mark_step before it",
    ),
}


_ATTRIBUTES: Final = frozenset({*READ_METHODS.values(), *READ_PROPERTIES.values(), "committed"})


def describe_break(cause: str) -> Break:
    """Return what a cause looks like, and what to write instead."""
    entry = BREAKS.get(cause)
    if entry is not None:
        return entry
    if cause in _ATTRIBUTES:
        return Break(f"`x.{cause}`", _AFTER)
    return Break(f"`{cause}`", _DYNAMIC)  # the function of JAX that needed the value


def graph_break(cause: str, operation: str | None = None) -> GraphBreakError:
    """Return the error of a cut where none may be."""
    what, advice = describe_break(cause)
    place = jaxapi.users_place(jaxapi.user_frames())
    where = "" if place is None else f" at {jaxapi.place_text(place)}"
    alone = "" if operation is None else f": {operation} cannot be part of a graph"
    return GraphBreakError(
        f"{what} breaks the graph{where}{alone}; snaprt.lazy(fullgraph=True) allows no break "
        "except mark_step",
        hint=advice,
    )


_log = logging.getLogger("snaprt.explain")


@contextmanager
def told_when_slow(operations: int, cause: str) -> Iterator[None]:
    """Warn if what is inside takes longer than ``SNAPRT_SLOW_COMPILE`` seconds."""
    seconds = settings.get("SNAPRT_SLOW_COMPILE")
    if not seconds:
        yield
        return
    place = jaxapi.place_text(jaxapi.users_place(jaxapi.user_frames()))

    def tell() -> None:
        _log.warning(
            "%s (%s): a graph of %s has been compiling for %g s; still running",
            place,
            cause,
            counted(operations, "operation"),
            seconds,
        )

    timer = threading.Timer(seconds, tell)
    timer.daemon = True
    with suppress(RuntimeError):  # from 3.12 on, none starts while the program ends
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
