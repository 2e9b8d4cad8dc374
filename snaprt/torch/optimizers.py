"""Steps of PyTorch's optimizers, each as one compiled operation.

The optimizer's own code is traced, in its variant that keeps every value on the device. Optimizers
that are not PyTorch's run as they are written, one operation at a time.
"""

from __future__ import annotations

import collections
import functools
import logging
import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax
import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from snaprt import metrics
from snaprt.errors import UsageError
from snaprt.torch import operations, packs, traced
from snaprt.torch.options import KNOWN, Operands, Options, on_device_variant, rates_of
from snaprt.torch.structure import are_the_same, values_of
from snaprt.torch.tensors import (
    Tensor,
    array_of,
    forget_gradients,
    gradients_due,
    gradients_of,
    plainly,
    put_in_pack,
    rows_of,
    to_device,
    write,
    write_all,
)
from snaprt.trace.fast_path import follow_function

_log = logging.getLogger("snaprt.torch")

#: How many traces of an optimizer are kept, and made before it runs operation by operation.
_MAX_TRACES: Final = 12

_optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Steps] = weakref.WeakKeyDictionary()
_groups: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()


@functools.cache
def watch_steps() -> None:
    """Run optimizers whose parameters are on the device as compiled steps, from here on."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)
    zero_grad = torch.optim.Optimizer.zero_grad
    torch.optim.Optimizer.zero_grad = _zero_grad(zero_grad)  # type: ignore[method-assign]
    of_module = _zero_grad_of_module(torch.nn.Module.zero_grad)
    torch.nn.Module.zero_grad = of_module  # type: ignore[method-assign]
    clip: Any = clip_grad
    clip._get_total_norm = _total_norm(clip._get_total_norm)
    clip._clip_grads_with_norm_ = _clip(clip._clip_grads_with_norm_)


def _zero_grad_of_module(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Module.zero_grad`, which makes no gradients to forget them."""

    @functools.wraps(original)
    def zero_grad(self: torch.nn.Module, set_to_none: bool = True) -> None:
        if set_to_none:
            params: list[Any] = [*self.parameters()]
            forget_gradients([p for p in params if type(p) is Tensor])
        with plainly():
            original(self, set_to_none)

    return zero_grad


def _zero_grad(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Optimizer.zero_grad`, in a third of its time where all is on the device."""

    @functools.wraps(original)
    def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        params: list[Any] = [p for group in self.param_groups for p in group["params"]]
        if set_to_none and {*map(type, params)} == {Tensor}:
            forget_gradients(params)
            return
        with plainly():
            original(self, set_to_none)

    return zero_grad


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """Run the step, where it can be compiled, and leave PyTorch nothing to do.

    Returns:
        The arguments of PyTorch's own step, where they have to change: a closure is called here.
    """
    given = (*args[1:], *kwargs.values())
    is_known = type(optimizer) in KNOWN and not optimizer._optimizer_step_pre_hooks
    if _operands.of is not None and id(optimizer) not in _operands.of:
        raise UsageError(
            f"a function compiled by snaprt.torch.jit steps an optimizer that is not found among "
            f"its variables: {type(optimizer).__name__}",
            hint="pass the optimizer as an argument, or use it by a variable or an attribute",
        )
    if len(given) > 1 or not is_known:
        return None
    changed: Any = None
    if given and given[0] is not None:
        with torch.enable_grad():
            loss = given[0]()
        changed = ((args[0], lambda: loss), {})
    if _steps_of(optimizer).run(optimizer):
        _groups[optimizer] = optimizer.param_groups
        optimizer.param_groups = []
    return changed


def _after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    groups = _groups.pop(optimizer, None)
    if groups is not None:
        optimizer.param_groups = groups


class _Operands(threading.local):
    """The operands of each optimizer of a function that this thread traces, by its id."""

    of: dict[int, Any] | None = None


_operands = _Operands()


@contextmanager
def with_operands(given: Sequence[tuple[torch.optim.Optimizer, Any]]) -> Iterator[None]:
    """Let steps of these optimizers, and no others, take the numbers in their options from arrays.

    While it lasts, a step of another one is a `UsageError`.
    """
    before = _operands.of
    _operands.of = {id(optimizer): operands for optimizer, operands in given}
    try:
        yield
    finally:
        _operands.of = before


def can_be_compiled(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether steps of an optimizer are compiled."""
    return type(optimizer) in KNOWN and not _steps_of(optimizer).is_given_up


def options_of(optimizer: torch.optim.Optimizer) -> Options:
    """Return the options of an optimizer."""
    return _steps_of(optimizer).options


def _steps_of(optimizer: torch.optim.Optimizer) -> _Steps:
    steps = _optimizers.get(optimizer)
    if steps is None:
        steps = _optimizers[optimizer] = _Steps()
    return steps


class _Steps:
    """The compiled steps of one optimizer."""

    def __init__(self) -> None:
        self.options = Options()
        self._traces: dict[Any, _Step] = {}
        self._made = 0
        self._held: _Held | None = None
        self.is_given_up = False
        self._operands = Operands()

    def run(self, optimizer: torch.optim.Optimizer) -> bool:
        """Run a step; return whether it could be compiled."""
        if self.is_given_up:
            return False
        rates = rates_of(optimizer)
        if rates is None:
            return False
        held = self._held
        gradients = None if held is None else held.gradients(optimizer)
        if held is None or gradients is None:
            with plainly():
                held = self._held = _Held.of(optimizer)
            gradients = None if held is None else held.gradients(optimizer)
        if held is None or gradients is None:
            return False
        try:
            key = (self.options.key(optimizer), held.kind)
            trace = self._traces.get(key)
        except (TypeError, RuntimeError, ValueError):  # an option is a tensor or an array
            return False
        if trace is None:
            if self._made >= _MAX_TRACES:
                self._give_up(optimizer, "its options change too often")
                return False
            self._made += 1
            trace = _Step(optimizer)
        if _operands.of is None:
            operands = self._operands.on_device(self.options.numbers(rates))
        else:
            operands = _operands.of[id(optimizer)]
        try:
            self._held = trace.run(optimizer, held, gradients, self.options, operands)
        except (RuntimeError, TypeError, ValueError, AssertionError, jax.errors.JAXTypeError) as e:
            if key in self._traces:
                raise
            self._give_up(optimizer, f"{type(e).__name__}: {e}")
            return False
        self._traces[key] = trace
        return True

    def _give_up(self, optimizer: torch.optim.Optimizer, reason: str) -> None:
        self.is_given_up = True
        metrics.counter_add("torch::untraced_optimizers")
        _log.warning(
            "%s runs operation by operation, which is slow: %s", type(optimizer).__name__, reason
        )


@dataclass(frozen=True)
class _Unit:
    """Parameters of one group that are stepped as one: a single one, or several small ones.

    Optimizers work on each element by itself, so that small parameters can be put in a row.

    Attributes:
        params: The numbers of the parameters among those with a gradient.
        group: The number of their group.
        state: The name of the packed array of each tensor of their state.
        numbers: The rest of their state, which is the same for each of them.
    """

    params: tuple[int, ...]
    group: int
    state: tuple[tuple[str, str], ...]
    numbers: tuple[tuple[str, Any], ...]


class _Held:
    """What an optimizer consists of, which is looked for anew when it has changed.

    Attributes:
        params: The parameters that have gradients, by name, in the order of the names.
        states: The state of each.
        units: What is stepped as one.
        pack: The tensors of the state.
        kind: What a trace depends on in all this: equal for equal ones.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        groups = optimizer.param_groups
        self._lists = [list(group["params"]) for group in groups]
        numbered = [(p, number) for number, params in enumerate(self._lists) for p in params]
        names = _unique_names([p for p, _ in numbered])
        ordered = sorted(zip(names, numbered, strict=True), key=lambda pair: pair[0])
        self._given = [p for _, (p, _) in ordered]
        self._which = [due is not None for due in gradients_due(self._given)]
        present = [pair for pair, there in zip(ordered, self._which, strict=True) if there]
        self.params: dict[str, Tensor] = {name: p for name, (p, _) in present}
        self._state = optimizer.state
        self.states = [self._state[p] for p in self.params.values()]
        self._all_states = [*self._state.values()]
        moved: dict[float, Any] = {}
        for state in self.states:
            _move_step(state, moved)
        self._values = [*values_of(self._all_states)]
        self._is_packing = packs.is_packing()
        self._types = [*map(_TYPE, self.params.values())]
        self.units: list[_Unit] = []
        self._pack_state([number for _, (_, number) in present])
        self._sources: dict[Any, _Sources] = {}
        self.kind = _interned(tuple(self._which), tuple(self.units))

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> _Held | None:
        """Return what an optimizer consists of; None where something is not on the device."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        return cls(optimizer) if {*map(type, params)} <= {Tensor} else None

    def _pack_state(self, groups: Sequence[int]) -> None:
        """Sort the parameters into units, and put the tensors of their state into one pack."""
        params = [*self.params.values()]
        kinds: list[Any] = [
            (group, *kind) if self._is_packing and (kind := _kind_in_row(p, state)) else None
            for p, group, state in zip(params, groups, self.states, strict=True)
        ]
        members: dict[Any, list[int]] = {}
        is_packed = packs.packable(kinds)
        for index, (kind, packed) in enumerate(zip(kinds, is_packed, strict=True)):
            members.setdefault(kind if packed else index, []).append(index)
        names = [*self.params]
        bound: list[tuple[Tensor, int]] = []
        parts: dict[Any, int] = {}  # the common ones of a group, once each
        arrays: list[Any] = []
        where: list[str] = []
        for indices in members.values():
            unit = [(names[i], self.states[i]) for i in indices]
            more = f"+{len(indices) - 1}" if len(indices) > 1 else ""
            in_state: dict[str, str] = {}
            for key, value in unit[0][1].items():
                if type(value) is not Tensor:
                    continue
                name = f"{unit[0][0]}.{key}{more}"
                for _, state in unit:
                    array = array_of(state[key])
                    common = (groups[indices[0]], key, id(array)) if key in _OF_A_GROUP else None
                    part = parts.setdefault(common or len(arrays), len(arrays))
                    if part == len(arrays):
                        arrays.append(array)
                        where.append(name)
                    in_state[key] = where[part]
                    bound.append((state[key], part))
            self.units.append(
                _Unit(
                    params=tuple(indices),
                    group=groups[indices[0]],
                    state=tuple(in_state.items()),
                    numbers=tuple([(k, v) for k, v in unit[0][1].items() if not _is_tensor(v)]),
                )
            )
        layout = packs.Layout([array.shape for array in arrays], where)
        self.pack = packs.Pack(layout, layout.pack(arrays))
        self._tensors = [tensor for tensor, _ in bound]
        self._boxes = [tensor.box for tensor in self._tensors]
        for tensor, part in bound:
            put_in_pack(tensor.box, self.pack, part)

    def gradients(self, optimizer: torch.optim.Optimizer) -> tuple[list[Any], _Sources] | None:
        """Return the arrays that have the gradients, and where; None where anything has changed."""
        groups = optimizer.param_groups
        if optimizer.state is not self._state or len(groups) != len(self._lists):
            return None
        for group, params in zip(groups, self._lists, strict=True):
            if not are_the_same(group["params"], params):
                return None
        states = [*self._state.values()]
        if not are_the_same(states, self._all_states):
            return None
        if not are_the_same([*values_of(states)], self._values):
            return None
        if self.pack.is_broken or self._is_packing != packs.is_packing():
            return None
        types = [*map(_TYPE, self.params.values())]
        if types != self._types or not are_the_same([t.box for t in self._tensors], self._boxes):
            return None
        self._types = types  # the same objects compare faster
        due = gradients_due(self._given)
        if [gradient is not None for gradient in due] != self._which:
            return None
        together: dict[packs.Gradients, int] = {}
        alone: list[Any] = []
        pattern: list[int] = []
        for gradient in due:
            if type(gradient) is packs.Gradients:
                pattern.append(together.setdefault(gradient, len(together)))
            elif gradient is not None:
                pattern.append(-1)
                alone.append(gradient)
        key = (*pattern, *[gradients.leaves for gradients in together])
        sources = self._sources.get(key)
        if sources is None:
            if len(self._sources) >= _MAX_TRACES:
                self._sources.clear()
            leaves = [gradients.leaves for gradients in together]
            sources = self._sources[key] = _Sources(self.params, pattern, leaves)
        return [*[array for each in together for array in each.packed], *alone], sources


class _Sources:
    """Where the gradients of parameters are, in a few packed arrays and others of their own.

    Args:
        params: The parameters, by name.
        pattern: For each, the number of the pack that it is in, or -1.
        packed: The leaves of each pack.

    Attributes:
        names: The names of the arrays.
        kind: What a trace depends on in all this.
    """

    def __init__(
        self, params: dict[str, Tensor], pattern: Sequence[int], packed: Sequence[packs.Leaves]
    ) -> None:
        self._layouts = [leaves.layout for leaves in packed]
        self.names = [f"{n}.{name}" for n, each in enumerate(self._layouts) for name in each.names]
        self._places: list[tuple[int, Any]] = []
        for (name, p), number in zip(params.items(), pattern, strict=True):
            self._places.append((number, name if number < 0 else packed[number].position(p)))
            if number < 0:
                self.names.append(name)
        self.kind = (*self._places, *[layout.kind for layout in self._layouts])

    def gradients(self, given: dict[str, Any]) -> list[Any]:
        """Return the gradient of each parameter, where a function is traced."""
        packed = [
            [given[f"{n}.{name}"] for name in layout.names]
            for n, layout in enumerate(self._layouts)
        ]
        return [
            given[at] if number < 0 else self._layouts[number].flat(packed[number], at)
            for number, at in self._places
        ]


# State that depends on the settings of the group and on itself alone.
_OF_A_GROUP: Final = frozenset({"step", "mu_product", "eta", "mu"})
_NUMBERS: Final = frozenset({bool, int, float, type(None)})


def _kind_in_row(p: Tensor, state: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return what parameters have in common that are put in a row; None for one that is not."""
    if not packs.is_small(array_of(p)):
        return None
    kind: list[Any] = [p.dtype]
    for key, value in state.items():
        if type(value) in _NUMBERS:
            kind.append((key, value))
        elif type(value) is not Tensor:
            return None
        elif key in _OF_A_GROUP:
            kind.append((key, id(array_of(value))))
        elif value.shape == p.shape and packs.is_small(array_of(value)):
            kind.append((key, value.dtype))
        else:
            return None
    return tuple(kind)


class _Kind:
    """Stands for what a trace depends on: comparing it takes no time."""


_known_kinds: dict[Any, _Kind] = {}


def _interned(*parts: Any) -> Any:
    try:
        return _known_kinds.setdefault(parts, _Kind())
    except TypeError:  # the state has a list: `_Steps.run` finds out
        return [*parts]


def _move_step(state: dict[str, Any], moved: dict[float, Any]) -> None:
    """Move the number of steps to the device, where the same number becomes the same array."""
    step = state.get("step")
    if torch.is_tensor(step) and type(step) is not Tensor:
        number = float(step)
        if number not in moved:
            moved[number] = to_device(step.float()).box.array
        state["step"] = Tensor(moved[number])


class _Step:
    """A compiled step for one set of settings, gradients and state.

    Attributes:
        made: The state that each parameter has got, if that had other tensors before.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._name = f"torch_{type(optimizer).__name__}_step"
        self._compiled: dict[Any, Any] = {}  # by where the gradients are
        self._traced: tuple[_Held, _Sources, Options] | None = (
            None  # while it is called, for `_trace`
        )
        self.made: list[dict[str, Any]] = []

    def run(
        self,
        optimizer: torch.optim.Optimizer,
        held: _Held,
        gradients: tuple[list[Any], _Sources],
        options: Options,
        operands: Any,
    ) -> _Held:
        """Run the step, write the new parameters and state, and return what there is now."""
        params = [*map(array_of, held.params.values())]
        arrays, sources = gradients
        state = held.pack

        def call() -> tuple[Any, list[Any]]:
            self._traced = held, sources, options
            try:
                given = [
                    dict(zip(held.params, params, strict=True)),
                    dict(zip(sources.names, arrays, strict=True)),
                    dict(zip(state.layout.names, state.packed, strict=True)),
                ]
                compiled = self._compiled.get(sources.kind)
                if compiled is None:
                    compiled = jax.jit(_named(self._trace, self._name))
                    self._compiled[sources.kind] = compiled
                new, changed, new_state = compiled(*given, operands)
            finally:
                self._traced = None
            if not self.made:
                new_state = [new_state[name] for name in state.layout.names]
            return ([new[name] for name in held.params], changed, new_state), []

        key = (weakref.ref(self), weakref.ref(held), weakref.ref(sources))
        given = [*params, *arrays, *state.packed, operands]
        (new, changed, new_state), _ = follow_function(key, given, call)
        write_all(held.params.values(), new)
        if changed:
            tensors = gradients_of([*held.params.values()])
            for index, array in changed.items():
                write(tensors[int(index)], array)  # type: ignore[arg-type]
        if not self.made:
            state.write(new_state)
            return held
        for values, made in zip(held.states, self.made, strict=True):
            for name, value in made.items():
                values[name] = Tensor(new_state[value.name]) if type(value) is _New else value
        with plainly():
            return _Held(optimizer)

    def _trace(self, params: Any, gradients: Any, state: Any, operands: Any) -> Any:
        """Run the optimizer's own code, on units in the place of its parameters."""
        optimizer = self._optimizer()
        assert optimizer is not None
        assert self._traced is not None
        held, sources, options = self._traced
        names, arrays = [*held.params], [params[name] for name in held.params]
        all_gradients = sources.gradients(gradients)
        units: list[Any] = []
        states: Any = collections.defaultdict(dict)
        given: list[Any] = []
        for unit in held.units:
            row = packs.joined([arrays[i] for i in unit.params])
            gradient = packs.joined([all_gradients[i] for i in unit.params]).reshape(row.shape)
            tensor = Tensor(row, requires_grad=True)
            with plainly():
                tensor.grad = Tensor(gradient)
            if unit.state or unit.numbers:
                tensors = {key: Tensor(state[name]) for key, name in unit.state}
                states[tensor] = {**dict(unit.numbers), **tensors}
            units.append(tensor)
            given.append(gradient)
        own_state = optimizer.state
        try:
            with (
                on_device_variant(optimizer, options, operands),
                traced.drawing_from(None),  # no key of a function around it gets into this one
                torch.no_grad(),
            ):
                optimizer.state = states
                for number, group in enumerate(optimizer.param_groups):
                    pairs = zip(units, held.units, strict=True)
                    group["params"] = [tensor for tensor, unit in pairs if unit.group == number]
                _plain_step(type(optimizer))(optimizer)
        finally:
            optimizer.state = own_state
        new: dict[str, Any] = {}
        changed: dict[str, Any] = {}
        for tensor, gradient, unit in zip(units, given, held.units, strict=True):
            layout = _row_of([arrays[index].shape for index in unit.params])
            for index, array in zip(unit.params, layout.split([array_of(tensor)]), strict=True):
                new[names[index]] = array
            after = array_of(gradients_of([tensor])[0])  # type: ignore[arg-type]
            if after is not gradient:
                for index, array in zip(unit.params, layout.split([after]), strict=True):
                    changed[str(index)] = array
        after_step = [states[tensor] for tensor in units]
        for unit, values in zip(held.units, after_step, strict=True):
            before = dict(unit.numbers)
            numbers = {key: value for key, value in values.items() if not _is_tensor(value)}
            if before != numbers and not (not before and {*numbers} <= {"step"}):
                raise ValueError("its state has numbers that change")
        return new, changed, self._new_state(held, after_step, arrays)

    def _new_state(
        self, held: _Held, states: Sequence[dict[str, Any]], params: Sequence[Any]
    ) -> dict[str, Any]:
        """Return the arrays of the state after a step, packed if they were there before it."""
        new: dict[str, Any] = {}
        pairs = [*zip(held.units, states, strict=True)]
        if all({k for k, v in s.items() if _is_tensor(v)} == {*dict(u.state)} for u, s in pairs):
            self.made = []
            for unit, values in pairs:
                new.update({name: array_of(values[key]) for key, name in unit.state})
            return new
        self.made = [{} for _ in params]
        for number, (unit, values) in enumerate(pairs):
            row = _row_of([params[index].shape for index in unit.params])
            for key, value in values.items():
                if not _is_tensor(value):
                    parts: list[Any] = [value] * len(unit.params)
                elif key in _OF_A_GROUP:
                    name = f"{key} {number}"
                    new[name] = array_of(value)
                    parts = [_New(name)] * len(unit.params)
                else:
                    parts = [_New(f"{key} of {index}") for index in unit.params]
                    arrays = row.split([array_of(value)])
                    new.update(zip([part.name for part in parts], arrays, strict=True))
                for index, part in zip(unit.params, parts, strict=True):
                    self.made[index][key] = part
        return new


def _row_of(shapes: Sequence[tuple[int, ...]]) -> packs.Layout:
    return packs.Layout(shapes, ["row"] * len(shapes))


class _New(NamedTuple):
    """Stands for a tensor of the state that a step has made, by the name of its array."""

    name: str


_TYPE: Final = operator.attrgetter("box.array.aval")


def _is_tensor(value: Any) -> bool:
    return type(value) is Tensor


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def step(_params: Any, gradients: Any, _state: Any, options: Any) -> Any:
        return function(_params, gradients, _state, options)

    step.__name__ = step.__qualname__ = name
    return step


def _unique_names(params: Sequence[Tensor]) -> list[str]:
    names = [p.label or f"param{index}" for index, p in enumerate(params)]
    if len(set(names)) < len(names):  # of several modules
        return [f"{index}.{name}" for index, name in enumerate(names)]
    return names


def _plain_step(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return the optimizer's own step, without the hooks around it."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _total_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `_get_total_norm` of PyTorch, which runs as one operation for our tensors."""

    @functools.wraps(original)
    def get_total_norm(
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        given: list[Any] = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if not given or not all(type(t) is Tensor for t in given):
            return original(given, norm_type, error_if_nonfinite, foreach)
        rows = rows_of(given)[0] if norm_type else given  # in a row, it would count elements
        with torch.no_grad():
            norm = operations.run_function(original, (rows, float(norm_type)), {})
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            return original(given, norm_type, error_if_nonfinite, False)  # raises
        return norm

    return get_total_norm


def _clip(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip_grads_with_norm_(
        parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None
    ) -> None:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        with plainly():
            gradients: list[Any] = [g for p in given if (g := p.grad) is not None]
        if not gradients or not all(type(g) is Tensor for g in gradients):
            original(given, max_norm, total_norm, foreach)
            return
        scaled, packed = rows_of(gradients)
        with torch.no_grad():
            operations.run_function(_scale, (scaled, float(max_norm), total_norm), {})
        for pack, rows in packed:
            pack.write([array_of(row) for row in rows])

    return clip_grads_with_norm_


def _scale(gradients: list[torch.Tensor], max_norm: float, total_norm: torch.Tensor) -> None:
    factor = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
