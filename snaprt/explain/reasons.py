"""Why a program had to be compiled although one like it was: two outlines, compared in words.

The outline of a program is what the next one at its place is compared with; it holds no arrays. The
guards are what the next program must repeat so that this one's executable is used again.
"""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import jax
import numpy as np

from snaprt import jaxapi
from snaprt.graph.program import INPUT, LITERAL, Literal, Node, Placement, Program
from snaprt.runtime.events import Execution
from snaprt.shown import cut
from snaprt.trace.array import LazyArray
from snaprt.units import counted, first_names

# Of what a program's input is told apart by.
InputKind = tuple[Any, Any, bool]


@dataclass(frozen=True, eq=False)
class OutlinedOperation:
    """An operation of a program."""

    name: str  # its primitive's name, with that of the function where it calls one: ``jit(relu)``
    signature: int  # equal for operations that compute the same of the same operands
    params: dict[str, Any]
    source: Any  # what `place` looks at

    @property
    def place(self) -> jaxapi.Frame | None:
        """The user's line."""
        return jaxapi.users_place(jaxapi.frames_of_operation(self.source))


@dataclass(frozen=True, eq=False)
class Outline:
    """What a program is told apart by."""

    names: tuple[str, ...]  # of each operation
    signatures: tuple[int, ...]
    sources: tuple[Any, ...]
    params: Mapping[int, dict[str, Any]]  # by signature
    wiring: tuple[tuple[tuple[int, int], ...], ...]  # see `snaprt.graph.program.Program`
    inputs: tuple[InputKind, ...]  # abstract value, sharding and whether it is committed, of each
    literals: tuple[Literal, ...]
    promoted: frozenset[int]  # those that are arguments, for their values vary
    outputs: tuple[tuple[int, int], ...]  # ``(operation, result)`` of each
    donated: tuple[int, ...]  # the inputs whose memory it takes
    placement: Placement
    is_watched: bool  # whether it tells of NaN, for the recorder

    @cached_property
    def operations(self) -> tuple[OutlinedOperation, ...]:
        """Its operations, which few outlines are ever asked for."""
        described = zip(self.names, self.signatures, self.sources, strict=True)
        return tuple(
            [
                OutlinedOperation(name, signature, self.params[signature], source)
                for name, signature, source in described
            ]
        )

    def first_use(self, index: int, origin: int = INPUT) -> OutlinedOperation | None:
        """Return the operation that uses an input, or a literal, first."""
        wire = (origin, index)
        pairs = zip(self.operations, self.wiring, strict=True)
        return next((operation for operation, wires in pairs if wire in wires), None)


def outline_of(program: Program, promoted: frozenset[int], *, is_watched: bool) -> Outline:
    """Return the outline of a program, given which of its literals are arguments."""
    signatures = tuple([node.operation.signature for node in program.nodes])
    first = dict(zip(reversed(signatures), reversed(program.nodes), strict=True))
    names = {signature: _name(node) for signature, node in first.items()}
    return Outline(
        names=tuple([names[signature] for signature in signatures]),
        signatures=signatures,
        sources=tuple([node.source for node in program.nodes]),
        params={  # without constants, which may be large
            signature: jaxapi.without_constants(node.params) for signature, node in first.items()
        },
        wiring=program.wiring,
        inputs=tuple([jaxapi.describe_input(array) for array in program.inputs]),
        literals=program.literals,
        promoted=promoted,
        outputs=program.outputs,
        donated=program.donated,
        placement=program.placement,
        is_watched=is_watched,
    )


def _name(node: Node) -> str:
    function = node.params.get("name")
    called = f"({function})" if isinstance(function, str) else ""
    return f"{node.primitive.name}{called}"


def nearest(outlines: Sequence[Outline], to: Outline) -> Outline:
    """Return which of some outlines, the latest last, is most like another."""
    return max(reversed(outlines), key=lambda outline: _likeness(outline, to))


def _likeness(outline: Outline, other: Outline) -> tuple[int, ...]:
    same_operations = outline.names == other.names
    start, end = (0, 0) if same_operations else common_ends(outline.names, other.names)
    return (
        same_operations,
        start + end,
        outline.wiring == other.wiring,
        outline.outputs == other.outputs,
        -sum(a != b for a, b in zip(outline.inputs, other.inputs, strict=False)),
        -sum(a.key != b.key for a, b in zip(outline.literals, other.literals, strict=False)),
    )


def common_ends(first: Sequence[Any], second: Sequence[Any]) -> tuple[int, int]:
    """Return how many elements two sequences begin with alike, and end with alike after those."""
    shorter = min(len(first), len(second))
    start = _alike(first, second)
    end = _alike(reversed(first), reversed(second))
    return start, min(end, shorter - start)


def _alike(first: Iterable[Any], second: Iterable[Any]) -> int:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return sum(1 for _ in pairs)


#: So many arrays are looked at at most.
_MOST_LEAVES: Final = 50_000

_NO_CONTAINERS: Final = (
    *(types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, str, bytes),
    *(int, float, complex, bool, type(None), range),
)


def name_of(array: jax.Array) -> str | None:
    """Return how the user's program calls an array, such as ``batch['x']``; ``None`` if unknown.

    The innermost frame that holds it counts. What no frame holds may have been made of a numpy
    array: it has the name of the only one of its shape and dtype in the innermost frame with any.
    """
    remaining = _MOST_LEAVES
    alike: dict[int, str] = {}
    for file, variables in jaxapi.user_variables():
        if jaxapi.is_installed(file):
            continue
        has_alike = bool(alike)
        for name, leaf in _leaves(variables):
            remaining -= 1
            if remaining < 0:
                break
            if leaf is array or (type(leaf) is LazyArray and leaf._value is array):
                return name
            if not has_alike and isinstance(leaf, np.ndarray) and _is_alike(leaf, array):
                alike.setdefault(id(leaf), name)
    return next(iter(alike.values())) if len(alike) == 1 else None


def _is_alike(leaf: np.ndarray, array: jax.Array) -> bool:
    return leaf.shape == array.shape and jax.dtypes.canonicalize_dtype(leaf.dtype) == array.dtype


def _leaves(variables: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what variables hold: arrays, then those in pytrees and in attributes of objects."""
    containers = {}
    for name, value in variables.items():
        if not name.isidentifier() or isinstance(value, _NO_CONTAINERS):
            continue
        if isinstance(value, (jax.Array, np.ndarray)):
            yield name, value
        else:
            containers[name] = value
    for name, value in containers.items():
        yield from _within(name, value)
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            for attribute, member in list(attributes.items()):
                if not isinstance(member, _NO_CONTAINERS):
                    yield from _within(f"{name}.{attribute}", member)


def _within(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (jax.Array, np.ndarray)):
        yield name, value
        return
    try:
        leaves, _ = jax.tree_util.tree_flatten_with_path(value)
    except Exception:  # keys that cannot be sorted, a node of the user's that fails
        return
    for path, leaf in leaves:
        if path:
            yield f"{name}{jax.tree_util.keystr(path)}", leaf


_LOOP: Final = (
    "for a loop: use jax.lax.scan or fori_loop, or jit the loop body and call mark_step in it; "
    "for an `if`: use jnp.where or jax.lax.cond, or jit each branch"
)

#: By the kind of a reason, what to write instead.
ADVICE: Final[Mapping[str, str]] = {
    "shape": "pad it to one shape, or to one of a few; or drop a last batch that is not full",
    "dtype": "convert it to one dtype before the step",
    "sharding": "give it the same placement at each step, with jax.device_put",
    "inputs": "use the same arrays at each step; an array used twice counts once",
    "constant": "from now on it is an argument and causes no more compilations; to avoid the first "
    "one, create an array from the constant before the loop: jnp.asarray(value)",
    "parameter": "a Python value became part of the program: pass it as an array, such as an "
    "index of jnp.take or jax.lax.dynamic_slice; or jit the code that depends on it",
    "longer": _LOOP,
    "shorter": "nothing, if only the first step does this, such as creating parameters; "
    f"else {_LOOP}",
    "branch": "select on the device with jnp.where or jax.lax.cond, or jit each branch",
    "outputs": "keep the same arrays alive at each graph break: create variables before the loop, "
    "del leftovers",
    "donation": "keep or release the same arrays at each step",
    "callback": "define the function outside of the loop, and pass what varies as an argument",
    "settings": "set JAX's configuration once, before the loop",
    "devices": "run on the same devices at each step",
    "lines": "",
    "recorder": "",
    "forgotten": "",
}


@dataclass(frozen=True)
class Reason:
    """A difference between a program and the nearest one before it.

    Attributes:
        kind: A key of `ADVICE`.
        is_named: Whether it is about an input that the user's program has a name for.
    """

    kind: str
    text: str
    place: jaxapi.Frame | None
    is_named: bool = False

    @property
    def advice(self) -> str:
        """What to write instead; empty where there is nothing."""
        return ADVICE[self.kind]


#: Returns how the user's program calls the input of a number, such as ``batch['x']``, or ``None``.
NameInput = Callable[[int], str | None]


def reasons(before: Outline, now: Outline, name_input: NameInput) -> tuple[Reason, ...]:
    """Return why the program ``now`` is not the program ``before``, the telling ones first."""
    inputs = list(_inputs(before, now, name_input))
    # What the program has no name for mostly follows from what it has.
    named = [reason for reason in inputs if reason.is_named]
    for kinds in (  # each is looked for only where those before it do not differ
        (named or inputs, _operations(before, now)),
        (_constants(before, now), _outputs(before, now)),
        (_parameters(before, now),),
        (_surroundings(before, now, name_input),),
    ):
        differences = dict.fromkeys(itertools.chain.from_iterable(kinds))
        if differences:
            return tuple(differences)
    return (_same_program(before, now),)


def _at(text: str, operation: OutlinedOperation | None, kind: str) -> Reason:
    place = None if operation is None else operation.place
    where = "" if place is None else f" at {jaxapi.place_text(place)}"
    return Reason(kind, f"{text}{where}", place)


def _inputs(before: Outline, now: Outline, name_input: NameInput) -> Iterator[Reason]:
    """Compare the inputs that both use in the operations that both begin with."""
    start = min(common_ends(before.names, now.names)[0], common_ends(before.wiring, now.wiring)[0])
    used = {wire for wires in now.wiring[:start] for wire in wires}
    pairs = enumerate(zip(before.inputs, now.inputs, strict=False))
    for index, (old, new) in pairs:
        if old != new and (INPUT, index) in used:
            name = name_input(index)
            reason = _input(index, old, new, now.first_use(index), name)
            yield replace(reason, is_named=name is not None)


def _input(
    index: int, old: Any, new: Any, use: OutlinedOperation | None, name: str | None
) -> Reason:
    was, old_sharding, _ = old
    now, new_sharding, _ = new
    if name is not None:
        subject = f"argument `{name}`"
    else:
        by = "" if use is None else f", used first by {use.name},"
        subject = f"input {index} ({now.str_short(True)}){by}"
    if was.shape != now.shape:
        return _at(f"{subject} changed shape {was.shape} to {now.shape}", use, "shape")
    if was.dtype != now.dtype:
        return _at(f"{subject} changed dtype {was.dtype} to {now.dtype}", use, "dtype")
    if was.weak_type != now.weak_type:
        kinds = ("weakly typed, like a Python scalar", "strongly typed")
        text = f"{subject} is now {kinds[not now.weak_type]}, and was {kinds[now.weak_type]},"
        return _at(text, use, "dtype")
    if old_sharding != new_sharding:
        return _at(f"{subject} moved to {new_sharding} from {old_sharding},", use, "sharding")
    return _at(f"{subject} was committed to its device, or is no longer,", use, "sharding")


def _operations(before: Outline, now: Outline) -> Iterator[Reason]:
    if before.names == now.names:
        if before.wiring != now.wiring:
            first = now.operations[common_ends(before.wiring, now.wiring)[0]]
            yield _at(f"{first.name} has different operands than last time", first, "inputs")
        return
    start, end = common_ends(before.names, now.names)
    removed = before.operations[start : len(before.names) - end]
    added = now.operations[start : len(now.names) - end]
    if added and not removed:
        yield _at(f"{_operations_text(added)} more than last time", added[0], "longer")
    elif removed and not added:
        yield _at(f"{_operations_text(removed)} fewer than last time", removed[0], "shorter")
    else:
        was = _at(f"{removed[0].name}", removed[0], "branch").text
        yield _at(f"another branch: {was} became {added[0].name}", added[0], "branch")


def _operations_text(operations: tuple[OutlinedOperation, ...]) -> str:
    names = dict.fromkeys(operation.name for operation in operations)
    return f"{counted(len(operations), 'operation')} ({first_names(names, 3)})"


def _constants(before: Outline, now: Outline) -> Iterator[Reason]:
    for index, (old, new) in enumerate(zip(before.literals, now.literals, strict=True)):
        is_argument = index in before.promoted
        if old.aval != new.aval or (old.key != new.key and not is_argument):
            use = now.first_use(index, LITERAL)
            by = "" if use is None else f" of {use.name}"
            text = f"a constant{by} changed: {value_text(old.value)}, then {value_text(new.value)},"
            yield _at(text, use, "constant")


def value_text(value: Any) -> str:
    """Return a host scalar as the user wrote it."""
    array = np.asarray(value)
    # JAX's own scalars as Python's, with no dtype beside.
    return repr(array.item()) if array.size == 1 else _short(value)


def _outputs(before: Outline, now: Outline) -> Iterator[Reason]:
    for outline, other, words in (
        (now, before, "one more array is alive at the graph break"),
        (before, now, "one array less is alive at the graph break"),
    ):
        for position, _ in sorted(set(outline.outputs) - set(other.outputs)):
            operation = outline.operations[position]
            yield _at(f"{words}: the result of {operation.name}", operation, "outputs")


def _parameters(before: Outline, now: Outline) -> Iterator[Reason]:
    for old, new in zip(before.operations, now.operations, strict=True):
        if old.signature == new.signature:
            continue
        change = _parameter_change(old.params, new.params)
        if change is None and not _same(old.params.get("callback"), new.params.get("callback")):
            text = f"{new.name} calls a new function, or an equal one that was made anew"
            yield _at(text, new, "callback")
        elif change is None:
            yield _at(f"JAX's settings changed before {new.name}", new, "settings")
        else:
            name, text = change
            yield _at(f"{new.name} has {text}", new, _KINDS_OF_PARAMETERS.get(name, "parameter"))
        return  # what follows from it is not worth a line


_KINDS_OF_PARAMETERS: Final[Mapping[str, str]] = {
    "dimension": "shape",
    "new_sizes": "shape",
    "precision": "settings",
    "shape": "shape",
}
_LONGEST_VALUE: Final = 60


def _parameter_change(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the name of a parameter of a primitive that differs, and how, in words.

    Functions are left out: those that say how to differentiate are new objects each time.
    """
    for name, value in new.items():
        was = old.get(name)
        if _is_jaxpr(was) and _is_jaxpr(value):
            inside = _jaxpr_change(was, value)
            if inside is not None:
                return inside
        elif not callable(value) and not _same(was, value):
            return name, f"a different {name}: {_short(was)}, then {_short(value)},"
    return None


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, (jaxapi.Jaxpr, jaxapi.ClosedJaxpr))


def _same(value: Any, other: Any) -> bool:
    try:
        return bool(value == other)
    except Exception:  # an array among them
        return value is other


def _short(value: Any) -> str:
    return cut(" ".join(repr(value).split()), _LONGEST_VALUE)


def _jaxpr_change(old: Any, new: Any) -> tuple[str, str] | None:
    """Return the name of a parameter that differs in two traced functions, and how, in words."""
    before, now = (getattr(jaxpr, "jaxpr", jaxpr).eqns for jaxpr in (old, new))
    names = [[equation.primitive.name for equation in equations] for equations in (before, now)]
    if names[0] != names[1]:
        start, _ = common_ends(*names)
        was, became = (
            sequence[start] if start < len(sequence) else "its end" for sequence in names
        )
        return "", f"a different function inside: {became} instead of {was},"
    for equation, other in zip(before, now, strict=True):
        for a, b in zip(equation.invars, other.invars, strict=False):
            are_constants = all(isinstance(atom, jaxapi.JaxprLiteral) for atom in (a, b))
            if are_constants and not _same(a.val, b.val):
                values = f"{value_text(a.val)}, then {value_text(b.val)}, of {other.primitive.name}"
                return "", f"a constant inside that changed: {values},"
        inside = _parameter_change(equation.params, other.params)
        if inside is not None:
            name, text = inside
            return name, f"inside, for {other.primitive.name}, {text}"
    consts = zip(getattr(old, "consts", ()), getattr(new, "consts", ()), strict=False)
    if any(a is not b for a, b in consts):
        return "", "a different function inside: it closes over other arrays,"
    return None


def _surroundings(before: Outline, now: Outline, name_input: NameInput) -> Iterator[Reason]:
    if before.is_watched != now.is_watched:
        words = "began" if now.is_watched else "ceased"
        yield Reason("recorder", f"the recorder {words} to check for NaN", None)
    if before.placement is not now.placement:
        yield Reason(
            "devices", "it runs on different devices, or with different 64-bit types", None
        )
    if before.donated != now.donated:
        changed = sorted(set(before.donated) ^ set(now.donated))
        # Names take long to find: none beyond what is shown.
        names = [f"`{name_input(index) or f'input {index}'}`" for index in changed[:4]]
        text = f"results may reuse the memory of different inputs: {first_names(names, 3)}"
        yield _at(text, now.first_use(changed[0]), "donation")


def _same_program(before: Outline, now: Outline) -> Reason:
    for old, new in zip(before.operations, now.operations, strict=True):
        if old.place != new.place:
            text = (
                "the same operations are at different lines, and lines are now part of the "
                f"program: {new.name}"
            )
            return _at(text, new, "lines")
    text = (
        "the program is the same: this process no longer had it in memory, or snaprt's "
        "settings changed"
    )
    return Reason("forgotten", text, None)


@dataclass(frozen=True)
class Guard:
    """One thing that must stay as it is for a graph to run again without a compilation.

    Attributes:
        kind: ``shape`` (with dtype and weak type), ``sharding``, ``constant``, ``operations``,
            ``outputs``, ``donation`` or ``devices``.
        text: What it is now.
        place: The user's line that uses it; ``None`` where there is no such line.
    """

    kind: str
    text: str
    place: jaxapi.Frame | None

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
        arguments = inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # a function without a signature, or a call that will fail
        return {}
    return {
        id(leaf): f"{name}{jax.tree_util.keystr(path)}"
        for name, value in arguments.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(value)
    }


def guards_of(run: Execution, names_by_id: Mapping[int, str]) -> tuple[Guard, ...]:
    """Return the guards of a graph that is about to run, the most telling ones first.

    Args:
        run: The graph, with its inputs.
        names_by_id: Names of arrays by id; for others, the user's variables are looked through.
    """
    outline = outline_of(run.program, run.promoted, is_watched=run.executable.is_watched)
    names = [
        names_by_id.get(id(array)) or name_of(array) or f"input {number}"
        for number, array in enumerate(run.program.inputs)
    ]
    return (
        *_input_guards(outline, names),
        *_constant_guards(outline),
        *_operation_guards(outline),
        *_donation_guards(outline, names),
        *_device_guards(run),
    )


def _input_guards(outline: Outline, names: list[str]) -> Iterator[Guard]:
    for number, (name, (aval, sharding, is_committed)) in enumerate(
        zip(names, outline.inputs, strict=True)
    ):
        use = outline.first_use(number)
        place = None if use is None else use.place
        weak = ", weakly typed, like a Python scalar" if aval.weak_type else ""
        yield Guard("shape", f"`{name}` is {aval.str_short(True)}{weak}", place)
        if is_committed:
            yield Guard("sharding", f"`{name}` lies as {sharding}", place)


def _constant_guards(outline: Outline) -> Iterator[Guard]:
    for number, literal in enumerate(outline.literals):
        if number in outline.promoted:
            continue
        use = outline.first_use(number, LITERAL)
        if use is not None:
            text = f"a constant of {use.name} is {value_text(literal.value)}"
            yield Guard("constant", text, use.place)


def _operation_guards(outline: Outline) -> Iterator[Guard]:
    names = dict.fromkeys(outline.names)
    count = counted(len(outline.names), "operation")
    text = f"{count} ({first_names(names, 5)}), with the same parameters and in the same order"
    yield Guard("operations", text, outline.operations[0].place if names else None)
    for position in sorted({position for position, _ in outline.outputs}):
        operation = outline.operations[position]
        text = f"the result of {operation.name} is alive at the graph break"
        yield Guard("outputs", text, operation.place)


def _donation_guards(outline: Outline, names: list[str]) -> Iterator[Guard]:
    if outline.donated:
        reused = ", ".join(f"`{names[index]}`" for index in outline.donated)
        yield Guard("donation", f"results reuse the memory of {reused}", None)


def _device_guards(run: Execution) -> Iterator[Guard]:
    placement: Any = run.program.placement
    devices = ", ".join(map(str, run.executable.devices))
    types = "enabled" if placement.x64 else "disabled"
    mesh = (
        "" if placement.mesh is None or placement.mesh.empty else f", mesh {placement.mesh.shape}"
    )
    yield Guard("devices", f"it runs on {devices}, with 64-bit types {types}{mesh}", None)
