"""`jit`: a whole training step of PyTorch as one compiled function.

The function runs once with tracers in its tensors. The state of the modules and optimizers that it
uses goes in as arguments and comes back as results, as in a JAX program that is written by hand.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import jax
import torch
from torch.overrides import TorchFunctionMode

from snaprt import jaxapi
from snaprt.errors import UsageError
from snaprt.torch import gradients as gradients_module
from snaprt.torch import modules, optimizers, traced
from snaprt.torch.options import Operands, rates_of
from snaprt.torch.packs import Pack
from snaprt.torch.setup import set_up
from snaprt.torch.structure import (
    Structure,
    are_the_same,
    argument_names,
    first_that,
    flatten,
    unflatten,
    values_of,
)
from snaprt.torch.tensors import (
    PackedBox,
    Tensor,
    array_of,
    gradients_of,
    plainly,
    put_in_pack,
    refusing_others,
    whole_packs,
    write_all,
)
from snaprt.torch.variables import Place, Traces, Variables, VariablesOf, keep_last

_F = TypeVar("_F", bound=Callable[..., Any])


def jit(function: _F) -> _F:
    """Compile a function of PyTorch code, such as a training step, as one operation.

    The function may call modules, ``loss.backward()``, and steps of optimizers. They are found
    among its arguments and variables, and in the attributes of objects there; their parameters,
    buffers, gradients and state are arguments and results of the compiled function. Learning rates,
    and other numbers in the options of optimizers, may change from call to call. The function is
    traced once for each kind of arguments and values of its other variables, and again when a
    module or optimizer has changed. Call ``optimizer.zero_grad()``
    at the end of a step: gradients that are still there are results, which cost memory.

    Args:
        function: A function of tensors that returns tensors.

    Raises:
        UsageError: It is no function. Later, from a call: it uses an optimizer whose steps cannot
            be compiled, or a tensor or an optimizer that is not found.

    Examples:
        >>> import torch
        >>> import snaprt.torch
        >>> model = snaprt.torch.wrap(torch.nn.Linear(4, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> @snaprt.torch.jit
        ... def train_step(x):
        ...     loss = model(x).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     return loss
        >>> train_step(torch.ones(3, 4).to(snaprt.torch.device())).shape
        torch.Size([])
    """
    set_up()
    if isinstance(function, torch.nn.Module) or not callable(function):
        raise UsageError(
            f"snaprt.torch.jit needs a function, not {type(function).__name__}",
            hint="use snaprt.torch.wrap for a module",
        )
    compiled = _Compiled(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled.call(args, kwargs)

    return call  # type: ignore[return-value]


class _Compiled:
    """A function, with what it was compiled for."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._variables = VariablesOf(function)
        self._states: list[_State] = []
        self._seen: set[Any] = set()
        name = getattr(function, "__qualname__", "a function")
        self._traces = Traces(f"snaprt.torch.jit has traced {name}")

    def call(self, args: Any, kwargs: Any) -> Any:
        """Call the function: as it is written the first time, which makes optimizers' state."""
        if traced.is_tracing():
            return self._function(*args, **kwargs)
        grad_mode = torch.is_grad_enabled()
        tensors, structure, kinds, *_ = traced.arguments_of(args, kwargs, with_gradient=grad_mode)
        with plainly():
            flags = tuple([(tensor.requires_grad, tensor.is_leaf) for tensor in tensors])
        mode = (structure, kinds, flags, grad_mode, traced.autocast_type())
        variables = self._variables.find(structure)
        state = self._state(variables)
        if state is None or mode not in self._seen:
            self._seen.add(mode)
            for module in variables.modules:
                modules.wrap(module)
            result = self._function(*args, **kwargs)
            if state is None:
                self._traces.count(mode, variables.constants)
                self._states.insert(0, _State(variables.modules, variables.optimizers))
                del self._states[_MAX_STATES:]
            return result
        leaves = {
            f"argument{index}": tensor
            for index, (tensor, flag) in enumerate(zip(tensors, flags, strict=True))
            if flag == _OF_LEAF
        }
        present = state.present({**variables.tensors, **leaves})
        options = tuple([optimizers.options_of(o).key(o) for o in state.optimizers])
        key = (*mode, options, present.key())
        step = state.steps.get((key, variables.constants))
        if step is not None:
            return step.run(state, variables, present, tensors)
        self._traces.count(mode, variables.constants)
        step = _Step(self._function, structure, flags)
        with traced.lock:
            result = step.run(state, variables, present, tensors)
        state.take_attributes(step.attributes)
        # A step is good for what its code itself has changed: a count of its calls, for example.
        keep_last(state.steps, (key, self._variables.find(structure).constants), step)
        return result

    def _state(self, variables: Variables) -> _State | None:
        """Return the state of the modules and optimizers; None if it is not known yet."""
        return first_that(
            self._states,
            lambda state: (
                are_the_same(variables.modules, state.modules)
                and are_the_same(variables.optimizers, state.optimizers)
                and state.holds()
            ),
        )


_MAX_STATES: Final = 16

#: What requires gradients, and is a leaf of autograd.
_OF_LEAF: Final = (True, True)


class _State:
    """What the modules and optimizers of a function consist of.

    Attributes:
        modules: The modules.
        optimizers: The optimizers.
        steps: What was compiled for them.
        tensors: The parameters, buffers and state of optimizers, by name.
        params: The parameters, by name.
    """

    def __init__(
        self, of_modules: list[torch.nn.Module], of_optimizers: list[torch.optim.Optimizer]
    ) -> None:
        self.modules = of_modules
        self.optimizers = of_optimizers
        self.steps: dict[Any, _Step] = {}
        named: dict[str, Tensor] = {}
        self.params: dict[str, Tensor] = {}
        known: set[int] = set()

        def add(name: str, tensor: Any, *, is_param: bool = False) -> None:
            if id(tensor) in known:
                return
            known.add(id(tensor))
            while name in named:  # "1.weight": of the second module, or of a part of the first one
                name += "'"
            named[name] = tensor
            if is_param:
                self.params[name] = tensor

        with plainly():
            for number, module in enumerate(self.modules):
                prefix = f"{number}." if number else ""
                for name, parameter in module.named_parameters():
                    add(f"{prefix}{name}", parameter, is_param=True)
                for name, buffer in module.named_buffers():
                    add(f"{prefix}{name}", buffer)
            for number, optimizer in enumerate(self.optimizers):
                given = [p for group in optimizer.param_groups for p in group["params"]]
                for index, parameter in enumerate(given):
                    if type(parameter) is Tensor:
                        add(f"{number}.param{index}", parameter, is_param=True)
            names = {id(param): name for name, param in self.params.items()}
            for number, optimizer in enumerate(self.optimizers):
                for owned, values in optimizer.state.items():
                    for key, value in values.items():
                        if torch.is_tensor(value):
                            if type(value) is not Tensor:
                                value = values[key] = traced.on_device([value])[0]
                            add(f"{names[id(owned)]}.{key}.{number}", value)
        self.tensors = dict(sorted(named.items()))
        self._known = known
        self._boxes: list[Any] = []
        self._types: list[type] = []
        self._alone: dict[str, Tensor] = self.tensors
        self._packed: list[_Packed] = []
        self._snapshots = [modules.Snapshot([module]) for module in self.modules]
        self._groups = [[list(g["params"]) for g in o.param_groups] for o in self.optimizers]
        self._values = [*self._state_of_optimizers()]
        self._operands = Operands()

    def _state_of_optimizers(self) -> Iterator[Any]:
        for optimizer in self.optimizers:
            yield from values_of(optimizer.state.values())

    def holds(self) -> bool:
        """Return whether the modules and optimizers still consist of these tensors."""
        for optimizer, groups in zip(self.optimizers, self._groups, strict=True):
            now = [group["params"] for group in optimizer.param_groups]
            if len(now) != len(groups) or not all(map(are_the_same, now, groups)):
                return False
        return are_the_same([*self._state_of_optimizers()], self._values) and all(
            snapshot.holds() for snapshot in self._snapshots
        )

    def present(self, variables: dict[str, Tensor]) -> _Present:
        """Return the arrays and gradients of now.

        Args:
            variables: Other tensors that the function may use.
        """
        self._find_packs()
        tensors, params = self._alone, self.params
        flags: list[tuple[bool, bool]] = []
        if variables:
            first_names = {id(tensor): name for name, tensor in reversed(variables.items())}
            others = {
                name: tensor
                for name, tensor in variables.items()
                if id(tensor) not in self._known and first_names[id(tensor)] == name
            }
            tensors = {**tensors, **others}
            with plainly():
                flags = [(tensor.requires_grad, tensor.is_leaf) for tensor in others.values()]
            leaves = [flag == _OF_LEAF for flag in flags]
            params = {**params, **dict(itertools.compress(others.items(), leaves))}
        gradients = gradients_of([*params.values()])
        if any(map(_is_there, gradients)):
            named = zip(params, gradients, strict=True)
            tensors = {**tensors, **{f"{n}.grad": g for n, g in named if g is not None}}
        arrays = [*map(array_of, tensors.values())]
        numbers = [*map(id, arrays)]
        first = dict(zip(reversed(numbers), reversed(tensors), strict=True))
        names = tuple(map(first.__getitem__, numbers))
        present = dict(zip(names, arrays, strict=True))
        return _Present(tensors, params, gradients, names, present, self._packed, flags)

    def _find_packs(self) -> None:
        """Find the packs that consist of these tensors, if that has changed."""
        boxes = [tensor.box for tensor in self.tensors.values()]
        types = [*map(type, boxes)]
        is_broken = any(packed.pack.is_broken for packed in self._packed)
        if not is_broken and are_the_same(boxes, self._boxes) and types == self._types:
            return
        self._boxes, self._types = boxes, types
        names = {id(tensor): name for name, tensor in self.tensors.items()}
        packs = whole_packs([*self.tensors.values()])
        self._packed = [
            _Packed(pack, f"{number}." if number else "", {names[id(t)]: t for t in tensors})
            for number, (pack, tensors) in enumerate(packs.items())
        ]
        inside = {name for packed in self._packed for name in packed.tensors}
        self._alone = {name: t for name, t in self.tensors.items() if name not in inside}

    def take_attributes(self, kept: Sequence[traced.Attribute]) -> None:
        """Take note of attributes of modules that a trace may have changed.

        Args:
            kept: Those that each call sets to tensors.
        """
        for snapshot in self._snapshots:
            snapshot.take_attributes(kept)

    def operands(self) -> Any:
        """Return the numbers in the options of all optimizers that are operands.

        Raises:
            UsageError: A learning rate is a tensor, or an optimizer's steps cannot be compiled.
        """
        return self._operands.on_device([n for each in self._numbers() for n in each])

    def _numbers(self) -> Iterator[list[float]]:
        for optimizer in self.optimizers:
            rates = rates_of(optimizer) if optimizers.can_be_compiled(optimizer) else None
            if rates is None:
                raise UsageError(
                    f"snaprt.torch.jit cannot compile steps of {type(optimizer).__name__}",
                    hint="compile the part before optimizer.step(), and call it outside",
                )
            yield optimizers.options_of(optimizer).numbers(rates)

    def operands_of_each(self, operands: Any) -> list[tuple[torch.optim.Optimizer, Any]]:
        """Return the optimizers, each with its part of the operands."""
        ends = [*itertools.accumulate(map(len, self._numbers()), initial=0)]
        parts = [operands[start:end] for start, end in itertools.pairwise(ends)]
        return [*zip(self.optimizers, parts, strict=True)]


class _Packed:
    """A pack that consists of tensors of the state.

    Attributes:
        pack: The pack.
        tensors: The tensors in it, by name.
        names: The names of the packed arrays.
        places: For each tensor, its box and the number of the part.
    """

    def __init__(self, pack: Pack, prefix: str, tensors: dict[str, Tensor]) -> None:
        self.pack = pack
        self.tensors = tensors
        self.names = [f"{prefix}{name}" for name in pack.layout.names]
        self.places = [(tensor.box, tensor.box.place[1]) for tensor in tensors.values()]

    @contextmanager
    def holding(self, arrays: dict[str, Any]) -> Iterator[None]:
        """Let the pack have these arrays, and at the end what it had before."""
        with self.pack.holding([arrays[name] for name in self.names]):
            try:
                yield
            finally:
                for box, index in self.places:
                    if not self._has(box, index):
                        put_in_pack(box, self.pack, index)

    def arrays_of_tensors(self) -> dict[str, Any]:
        """Return the array of each tensor, where a function is traced that has broken the pack."""
        parts = self.pack.layout.split(self.pack.packed)
        return {
            name: parts[index] if self._has(box, index) else box.array
            for name, (box, index) in zip(self.tensors, self.places, strict=True)
        }

    def _has(self, box: Any, index: int) -> bool:
        return type(box) is PackedBox and box.place == (self.pack, index)


@dataclass(frozen=True)
class _Present:
    """What a state has at one time.

    Attributes:
        tensors: The tensors of the state that are in no pack, variables and gradients, by name.
        params: The parameters, and the variables that gradients are computed for, by name.
        gradients: The gradient of each of these, or None.
        names: For each tensor the name of the first one that has the same array.
        arrays: Each array, under the name of the first tensor that has it.
        packed: The packs of the state.
        flags: Which of the variables require gradients, and are leaves of autograd.
    """

    tensors: dict[str, Tensor]
    params: dict[str, Tensor]
    gradients: list[Any]
    names: tuple[str, ...]
    arrays: dict[str, Any]
    packed: list[_Packed]
    flags: list[tuple[bool, bool]]

    def key(self) -> Any:
        """Return what a trace depends on, apart from the values."""
        layouts = [packed.pack.layout for packed in self.packed]
        return (self.names, tuple(map(_is_there, self.gradients)), *self.flags, *layouts)

    def packed_arrays(self) -> dict[str, Any]:
        """Return the packed arrays of all packs, by name."""
        return {
            name: array
            for packed in self.packed
            for name, array in zip(packed.names, packed.pack.packed, strict=True)
        }


def _is_there(gradient: Tensor | None) -> bool:
    return gradient is not None


class _Step:
    """A function compiled for one kind of arguments and state.

    Attributes:
        attributes: The attributes of modules that forward passes set to tensors.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        structure: Structure,
        flags: Sequence[tuple[bool, bool]],
    ) -> None:
        self._function = function
        self._flags = flags  # of the arguments: whether they require gradients, and are leaves
        self._structure = structure
        self._names = argument_names(function, structure)

        def step(_state: Any, _packed: Any, _args: Any, options: Any, key: Any) -> Any:
            return self._trace(_state, _packed, _args, options, key)

        name = getattr(function, "__name__", "step").strip("_<>")
        step.__name__ = step.__qualname__ = f"torch_{name}"
        self._compiled = jax.jit(step)
        # While it is called, for `_trace`:
        self._now: tuple[_State, Variables, _Present, Sequence[Tensor]] | None = None
        self._draws: bool | None = None  # whether it draws random numbers, once that is known
        self._result: Structure = None
        self._written: list[tuple[str, str]] = []  # tensors that it changes, and their results
        self._kept: list[str] = []  # what becomes of each gradient
        self.attributes: list[traced.Attribute] = []
        self._values: Structure = None  # of these attributes
        self._assigned: list[Place] = []  # the variables that it assigns tensors to

    def run(
        self, state: _State, variables: Variables, present: _Present, tensors: Sequence[Tensor]
    ) -> Any:
        """Run the step, and write what it changed."""
        generator = torch.get_rng_state() if self._draws is None else None
        key = traced.no_key() if self._draws is False else traced.draw_key()
        operands = state.operands()
        args = dict(zip(self._names, map(array_of, tensors), strict=True))
        self._now = state, variables, present, tensors
        try:
            results, written, packed, gradients, assigned, kept = self._compiled(
                present.arrays, present.packed_arrays(), args, operands, key
            )
        except gradients_module.NEEDS_VALUES as error:
            place = (jaxapi.user_stack(error) or ("the function",))[-1]
            raise UsageError(
                f"{place} needs the values of a tensor, which snaprt.torch.jit cannot know",
                hint="use torch.where, or move that part out of the function",
            ) from error
        finally:
            self._now = None
        if generator is not None and not self._draws:
            torch.set_rng_state(generator)
        single = present.tensors
        write_all(
            [single[n] if n in single else state.tensors[n] for n, _ in self._written],
            [written[result] for _, result in self._written],
        )
        for each, arrays in zip(present.packed, packed, strict=True):
            if arrays:
                each.pack.write(arrays)
        self._set_gradients(present, gradients)
        for variable, array in zip(self._assigned, assigned, strict=True):
            variables.set(variable, Tensor(array))
        values = unflatten(self._values, map(Tensor, kept))
        for (module, attribute), value in zip(self.attributes, values, strict=True):
            vars(module)[attribute] = value
        return unflatten(self._result, iter([Tensor(result) for result in results]))

    def _set_gradients(self, present: _Present, arrays: Sequence[Any]) -> None:
        if not arrays and not any(map(_is_there, present.gradients)):
            return
        given = iter(arrays)
        with plainly():
            for parameter, what in zip(present.params.values(), self._kept, strict=True):
                if what is _NEW:
                    parameter.grad = Tensor(next(given))
                elif what is _NONE and parameter.grad is not None:
                    parameter.grad = None

    def _trace(self, arrays: Any, packed: Any, args: Any, operands: Any, key: Any) -> Any:
        assert self._now is not None
        state, variables, present, arguments = self._now
        with (
            _holding(state, present, arrays, packed),
            traced.drawing_from(key),
            optimizers.with_operands(state.operands_of_each(operands)),
        ):
            given = [args[name] for name in self._names]
            tensors = [
                argument if flag == _OF_LEAF else Tensor(array, requires_grad=flag[0])
                for argument, array, flag in zip(arguments, given, self._flags, strict=True)
            ]
            positional, named = unflatten(self._structure, iter(tensors))
            try:
                with _refusing_draws(variables), traced.keeping() as attributes:
                    result = self._function(*positional, **named)
            finally:
                new_values = variables.take_new()
            self._refuse_effects(tensors, given)
            outputs: list[Any] = []
            self._result = flatten(result, outputs)
            results = [array_of(tensor) for tensor in traced.on_device(outputs)]
            written: dict[str, Any] = {}
            results_of: dict[int, str] = {}
            self._written = []
            for (name, tensor), first in zip(present.tensors.items(), present.names, strict=True):
                array = array_of(tensor)
                if array is not arrays[first]:
                    result_name = results_of.setdefault(id(array), name)
                    written[result_name] = array
                    self._written.append((name, result_name))
            new_packed: list[list[Any]] = []
            for each in present.packed:
                if each.pack.is_broken:
                    new_packed.append([])
                    of_tensors = each.arrays_of_tensors()
                    written |= of_tensors
                    self._written += zip(of_tensors, of_tensors, strict=True)
                else:
                    given_packed = [packed[name] for name in each.names]
                    is_new = not are_the_same(each.pack.packed, given_packed)
                    new_packed.append([*each.pack.packed] if is_new else [])
            ends = gradients_of([*present.params.values()])
            self._kept = []
            gradients = []
            for end, begin in zip(ends, present.gradients, strict=True):
                self._kept.append(_NONE if end is None else _SAME if end is begin else _NEW)
                if end is not None and end is not begin:
                    gradients.append(array_of(end))
            self._draws = traced.keys_drawn() > 0
            self._assigned = [place for place, _ in new_values]
            assigned = [array_of(tensor) for _, tensor in new_values]
            self.attributes = [*attributes]
            inside: list[Any] = []
            self._values = flatten([*attributes.values()], inside)
            kept = [array_of(tensor) for tensor in traced.on_device(inside)]
        return results, written, new_packed, gradients, assigned, kept

    def _refuse_effects(self, tensors: Sequence[Tensor], given: Sequence[Any]) -> None:
        """Raise an error where an argument has got other values, or one with history a gradient."""
        others = [flag != _OF_LEAF for flag in self._flags]
        pairs = itertools.compress(zip(tensors, given, strict=True), others)
        if any(tensor.box.array is not array for tensor, array in pairs):
            raise UsageError(
                "a function compiled by snaprt.torch.jit changes an argument in place",
                hint="return the new tensor",
            )
        if any(
            gradient is not None
            for gradient in gradients_of([*itertools.compress(tensors, others)])
        ):
            raise UsageError(
                "a function compiled by snaprt.torch.jit computes gradients for an argument that "
                "is a result of other operations",
                hint="compute it inside of the function, or detach it; move a leaf to the device "
                "before the call",
            )


_NONE, _SAME, _NEW = "none", "same", "new"


class _WithoutGenerators(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        traced.refuse_generator(func, kwargs or {})
        return func(*args, **(kwargs or {}))


@contextmanager
def _refusing_draws(variables: Variables) -> Iterator[None]:
    """Raise an error if random numbers are drawn that are not those of the step's key.

    Args:
        variables: Where generators of Python and NumPy may be.

    Raises:
        UsageError: They are, for a tensor of the CPU or by a generator.
    """
    before = torch.get_rng_state()
    states = variables.states_of_generators()
    with _WithoutGenerators():
        yield
    by_torch = not torch.equal(before, torch.get_rng_state())
    if by_torch:
        torch.set_rng_state(before)
    if by_torch or states != variables.states_of_generators():
        raise UsageError(
            "a function compiled by snaprt.torch.jit draws random numbers on the CPU; each call "
            "would get the same numbers",
            hint="draw them on the device: torch.randn(..., device=snaprt.torch.device())",
        )


@contextmanager
def _holding(
    state: _State, present: _Present, arrays: dict[str, Any], packed: dict[str, Any]
) -> Iterator[None]:
    """Let tensors and packs hold these arrays, and what they held before at the end.

    Meanwhile, views of tensors that the step does not know are none: the base must hold no tracer.
    """
    tensors = [*present.tensors.values()]
    arrays_before = [(tensor.box, tensor.box.array) for tensor in tensors]
    boxes = {id(tensor.box) for tensor in [*state.tensors.values(), *tensors]}
    views = [
        (tensor, view)
        for tensor in tensors
        if (view := tensor.view_of) is not None and id(view.base.box) not in boxes
    ]
    try:
        for (box, _), name in zip(arrays_before, present.names, strict=True):
            box.array = arrays[name]
        for tensor, _ in views:
            tensor.view_of = None
        with ExitStack() as stack:
            for each in present.packed:
                stack.enter_context(each.holding(packed))
            stack.enter_context(refusing_others([*state.tensors.values(), *tensors]))
            yield
    finally:
        for box, array in arrays_before:
            box.array = array
        for tensor, view in views:
            tensor.view_of = view
        with plainly():
            for parameter, gradient in zip(present.params.values(), present.gradients, strict=True):
                parameter.grad = gradient
