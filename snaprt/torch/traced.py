"""Functions of PyTorch as JAX functions: traced with torchax once for each kind of call.

The Python code of a function runs while it is traced, with tensors of torchax in the place of its
tensors. What it writes to its arguments and its module's state is a result of the JAX function.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from snaprt import jaxapi
from snaprt.errors import UsageError
from snaprt.torch import gradients
from snaprt.torch.gradients import Arrays, Differentiable
from snaprt.torch.lowering import numbers, versions
from snaprt.torch.lowering.corrections import ARGUMENTS, CORRECTIONS, NARROWED, WIDENED
from snaprt.torch.lowering.device_names import renamed
from snaprt.torch.lowering.errors import REFUSALS, error_of_pytorch, raise_as_pytorch
from snaprt.torch.lowering.operators import corrected_environment
from snaprt.torch.lowering.views import (
    as_index,
    note_views,
    slice_of,
    takes_copy,
    unseen_by_autograd,
    watch_views,
)
from snaprt.torch.structure import Structure, argument_names, by_position, flatten, unflatten
from snaprt.torch.tensors import (
    ConstantError,
    Tensor,
    array_of,
    constant_of,
    has_tracer,
    host_values,
    plainly,
    read_again,
    refuse_transform,
    to_cpu,
    to_device,
    write,
    write_back,
)
from snaprt.trace.array import send

Place = tuple[dict[str, Any], str, int]
"""Where a module holds a tensor: a dictionary, a key, and the position among the tensors."""


@functools.cache
def no_key() -> Any:
    """Return the data of a key that nothing is drawn from."""
    with jaxapi.evaluating():
        return jnp.zeros(2, np.uint32)


lock: Final = threading.RLock()
"""Held while a thread traces: modules hold tracers, and PyTorch's generator is watched."""


class State:
    """The tensors of a module that a traced function may use and change.

    Args:
        tensors: Each once, however often it is used.
        names: Their names.
        places: Where they are.
        attributes: Those places that are attributes, and may be set to another tensor.
        modules: The modules that hold them, by name.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        names: Sequence[str],
        places: Sequence[Place],
        attributes: Sequence[Place],
        modules: dict[str, torch.nn.Module],
    ) -> None:
        self.tensors = list(tensors)
        self.names = list(names)
        self.places = list(places)
        self.attributes = list(attributes)
        self.modules = modules


NO_STATE: Final = State((), (), (), (), {})


class Traced:
    """A function of PyTorch, traced for one kind of call.

    Args:
        function: The function.
        structure: The structure of ``(args, kwargs)``.
        state: The state of its module.
        needs_gradient: Which tensors, of the state and the arguments, gradients are computed for.
        autocast: The type that `torch.autocast` asks for.
        name: What it is called in modules and profiles.
        first: What `first_of_each` returned for the arguments.
        accumulators: The keywords whose tensors get no history when the function writes to them.

    Attributes:
        kept: The attributes of modules that a call sets to tensors.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        structure: Structure,
        state: State,
        needs_gradient: Sequence[bool],
        autocast: torch.dtype | None,
        name: str,
        first: Sequence[int] | None = None,
        accumulators: Collection[str] = (),
    ) -> None:
        self._function = function
        self._first = first
        self._accumulators = accumulators
        self._name = name
        self._structure = structure
        self._state = state
        self._autocast = autocast
        signature_of: Any = function
        if not hasattr(function, "__wrapped__"):  # it is no function of the user's
            signature_of = getattr(state.modules.get(""), "forward", function)
        self._names = [*state.names, *argument_names(signature_of, structure, state.names)]
        self._grad_mode = torch.is_grad_enabled()
        self._is_traced = False
        self._draws = True
        # What the results are, known once it is traced.
        self._result: Structure = None
        self._leaves: list[tuple[str, int]] = []
        self._written: dict[int, int] = {}
        self._writes: list[int] = []
        self._replaced: list[Any] = []
        self.kept: list[Attribute] = []
        self._vary([i for i, needed in enumerate(needs_gradient) if needed])

    def call(self, arguments: Sequence[Tensor]) -> Any:
        """Call the function with these tensors in the place of its arguments' and its state's."""
        tensors = [*self._state.tensors, *arguments]
        if self._is_traced:
            return self._run(tensors, draw_key() if self._draws else no_key())
        with lock:
            generator, drawn = torch.get_rng_state(), _source.drawn

            def forget_draw() -> None:
                torch.set_rng_state(generator)
                _source.drawn = drawn

            key = draw_key()
            try:
                result = self._run(tensors, key)
            except _WritesToConstantError:  # which then depends on the variables
                self._vary([*self._variables, *self._written.values()])
                result = self._run(tensors, key)
            except ConstantError:  # nothing was computed: the caller may trace it in another way
                forget_draw()
                raise
            self._is_traced = True
            if not self._draws:
                forget_draw()
        return result

    def _vary(self, variables: Sequence[int]) -> None:
        """Let gradients be computed for the tensors at these positions."""
        self._variables = sorted({*variables})
        self._others = sorted({*range(len(self._names))} - {*variables})
        is_quiet = not self._state.modules  # an operation, or a function without state
        self._jax = Differentiable(self._evaluate, self._name, is_quiet=is_quiet)

    def _run(self, tensors: list[Tensor], key: Any) -> Any:
        names = self._names
        inputs = {names[i]: array_of(tensors[i]) for i in self._others}
        results: Sequence[Tensor] = ()
        if self._variables:
            variables = {names[i]: tensors[i] for i in self._variables}

            def written() -> dict[int, Tensor]:
                if not {*self._written.values()} <= {*self._variables}:
                    raise _WritesToConstantError
                return {index: tensors[i] for index, i in self._written.items()}

            results, others = gradients.apply(self._jax, variables, inputs, key, written)
        else:
            _, others = self._jax.evaluate(inputs, key)
        plain, writes, replaced = others
        for position in self._written.values():
            write_back(tensors[position])
        for position, array in zip(self._writes, writes, strict=True):
            write(tensors[position], array)
        for (holder, name), array in zip(self._replaced, replaced, strict=True):
            holder[name] = Tensor(array)
        given, rest = iter(results), iter(plain)
        leaves: list[Tensor] = []
        for kind, position in self._leaves:
            if kind is _SAME:
                leaves.append(tensors[position])
            else:
                leaves.append(next(given) if kind is _RESULT else Tensor(next(rest)))
        result, kept = unflatten(self._result, iter(leaves))
        for (module, attribute), value in zip(self.kept, kept, strict=True):
            _note_kept(module, attribute, value)
            vars(module)[attribute] = value
        return result

    def _evaluate(self, params: Arrays, inputs: Arrays, key: Any) -> tuple[list[Any], Any]:
        """Run the Python code of the function, on tracers, as a JAX function."""
        tx = versions.torchax().tensor
        watch_views()
        environment = environment_of_thread()
        named = {**params, **inputs}
        arrays = [named[name] for name in self._names]
        tensors = [tx.Tensor(array, environment) for array in arrays]
        randomness = _Randomness(environment.param, key, self._autocast)
        with (
            self._state_of(tensors) as attributes,
            tracing(randomness, self._grad_mode, self._autocast),
        ):
            count = len(self._state.tensors)
            given = tensors[count:]
            if self._first is not None:
                given = [given[position] for position in self._first]
            args, kwargs = unflatten(self._structure, iter(given))
            result = self._function(*args, **kwargs)
            replaced = self._changes_of_state(tensors)
            kept = self._attributes_kept(attributes, tensors)
            outputs: list[torch.Tensor] = []
            self._result = flatten((result, [*kept.values()]), outputs)
            values = [value_of(output) for output in outputs]
        self.kept = [*kept]
        self._draws = randomness.is_used
        changed = {i for i, array in enumerate(arrays) if tensors[i]._elem is not array}
        for position in changed:
            self._check_write(position, arrays[position], tensors[position]._elem)
        return self._sort(tensors, outputs, values, changed, replaced)

    def _sort(
        self,
        tensors: list[Any],
        outputs: list[Any],
        values: list[Any],
        changed: set[int],
        replaced: dict[int, Any],
    ) -> tuple[list[Any], Any]:
        """Return the results with and without gradient, and note what each is."""
        position_of = {id(tensor): position for position, tensor in enumerate(tensors)}
        variables = {*self._variables}
        results: list[Any] = []
        plain: list[Any] = []
        self._leaves = []
        for output, value in zip(outputs, values, strict=True):
            position = position_of.get(id(output))
            if position is not None and (position in changed or position not in variables):
                self._leaves.append((_SAME, position))
            elif variables and is_differentiable(value):
                self._leaves.append((_RESULT, len(results)))
                results.append(value)
            else:
                self._leaves.append((_PLAIN, len(plain)))
                plain.append(value)
        self._written, self._writes = {}, []
        writes = []
        for position in sorted(changed):
            value = tensors[position]._elem
            is_state = position < len(self._state.tensors)
            has_history = not is_state and self._names[position] not in self._accumulators
            if variables and has_history and self._grad_mode and is_differentiable(value):
                self._written[len(results)] = position
                results.append(value)
            else:
                self._writes.append(position)
                writes.append(jax.lax.stop_gradient(value))
        places = self._state.places
        self._replaced = [places[index][:2] for index in replaced]
        return results, (plain, writes, list(replaced.values()))

    @contextmanager
    def _state_of(self, tensors: list[Any]) -> Iterator[dict[str, dict[str, Any]]]:
        """Let the module hold these tensors, and what it held before at the end.

        Yields:
            The attributes of the modules, by their names.
        """
        places = [*self._state.places, *self._state.attributes]
        tensors_before = [holder[name] for holder, name, _ in places]
        attributes = {name: dict(vars(m)) for name, m in self._state.modules.items()}
        try:
            for holder, name, position in places:
                if isinstance(self._state.tensors[position], torch.nn.Parameter):
                    tensors[position]._is_param = True
                holder[name] = tensors[position]
            yield attributes
        finally:
            count = len(self._state.places)
            for index, (holder, name, position) in enumerate(places):
                if index < count or holder.get(name) is tensors[position]:
                    holder[name] = tensors_before[index]
            for name, module in self._state.modules.items():
                before = attributes[name]
                for attribute, _ in _changed_in(module, before):
                    if attribute in before and before[attribute] is not vars(module)[attribute]:
                        vars(module)[attribute] = before[attribute]
                    else:
                        del vars(module)[attribute]

    def _attributes_kept(
        self, before: dict[str, dict[str, Any]], tensors: list[Any]
    ) -> dict[Attribute, Any]:
        """Return what the forward pass has set attributes to.

        Lists of a module's own parameters, as recurrent modules keep them, are none of that.

        Raises:
            UsageError: It has added a tensor to what was there before.
        """
        own = {id(tensors[position]) for _, _, position in self._state.places}
        held = {(id(d), name): tensors[position] for d, name, position in self._state.attributes}
        kept: dict[Attribute, Any] = {}
        for name, module in self._state.modules.items():
            for attribute, inside in _changed_in(module, before[name]):
                value = vars(module)[attribute]
                if value is held.get((id(vars(module)), attribute)):
                    continue
                if all(id(tensor) in own for tensor in inside):
                    continue
                is_added_to = value is before[name].get(attribute)
                if is_added_to or any(isinstance(tensor, Tensor) for tensor in inside):
                    raise _keeps_a_tensor(name, attribute)
                kept[module, attribute] = value
        return kept

    def _changes_of_state(self, tensors: list[Any]) -> dict[int, Any]:
        """Return the arrays of the state that were replaced by others, by the number of place."""
        replaced = {}
        for index, (holder, name, position) in enumerate(self._state.places):
            present = holder.get(name)
            if present is tensors[position]:
                continue
            if not isinstance(present, torch.Tensor):
                raise UsageError(
                    f"the forward pass of a module replaced its {name!r} by {present!r}",
                    hint="a wrapped module may only replace a buffer by another tensor",
                )
            array = value_of(present)
            old = tensors[position]._elem
            if array.shape == old.shape and array.dtype == old.dtype:
                tensors[position]._elem = array
            else:
                replaced[index] = jax.lax.stop_gradient(array)
        return replaced

    def _check_write(self, position: int, old: Any, new: Any) -> None:
        if old.shape != new.shape or old.dtype != new.dtype:
            raise UsageError(
                f"{self._name} changes the shape or dtype of a tensor in place, from "
                f"{old.dtype}{list(old.shape)} to {new.dtype}{list(new.shape)}",
                hint="use the function that returns a new tensor, such as x.t() for x.t_()",
            )


class Arguments(NamedTuple):
    """The arguments of a call, and what else a trace of it depends on.

    Attributes:
        tensors: Their tensors, on the device.
        structure: What is around the tensors.
        kinds: What a program knows of each: shape, dtype and whether the dtype is weak.
        needs_gradient: Whether gradients are computed for each.
        first: What `first_of_each` returns for them.
    """

    tensors: list[Tensor]
    structure: Structure
    kinds: tuple[Any, ...]
    needs_gradient: tuple[bool, ...]
    first: tuple[int, ...] | None


def arguments_of(args: Sequence[Any], kwargs: dict[str, Any], *, with_gradient: bool) -> Arguments:
    """Return the arguments of a call; tensors of the CPU are moved to the device."""
    tensors: list[torch.Tensor] = []
    structure = flatten((tuple(args), kwargs), tensors)
    moved = on_device(tensors, with_gradient=with_gradient)
    with plainly():
        needed = tuple([with_gradient and tensor.requires_grad for tensor in moved])
    kinds = tuple([_kind_of(tensor.box.array) for tensor in moved])
    return Arguments(moved, structure, kinds, needed, first_of_each(moved, needed))


def _kind_of(array: Any) -> Any:
    return float if type(array) is float else array.aval


def first_of_each(tensors: Sequence[Tensor], needed: Sequence[bool]) -> tuple[int, ...] | None:
    """Return for each tensor the position of the first one with the same memory.

    A write to one of them is a write to all. Those that gradients are computed for are not looked
    at: autograd adds up what each place gets.

    Returns:
        The positions; None if no two tensors share memory.
    """
    boxes = [id(tensor.box) for tensor in tensors]
    if len({*boxes}) == len(boxes):
        return None
    first: dict[int, int] = {}
    pairs = enumerate(zip(boxes, needed, strict=True))
    return tuple([i if is_needed else first.setdefault(box, i) for i, (box, is_needed) in pairs])


_GRADIENTS: Final[tuple[Any, ...]] = (
    *(torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward),
)
_SAME, _RESULT, _PLAIN = "same", "result", "plain"


class _WritesToConstantError(Exception):
    """A function wrote what depends on its variables to a tensor that is none of them."""


def is_differentiable(array: Any) -> bool:
    """Return whether the dtype of an array is one that has gradients."""
    return jnp.issubdtype(array.dtype, jnp.inexact)


def value_of(tensor: torch.Tensor) -> Any:
    """Return the array of a tensor that a traced function returned."""
    if isinstance(tensor, Tensor):
        return array_of(tensor)
    jax_of = getattr(tensor, "jax", None)
    return jnp.asarray(host_values(tensor)) if jax_of is None else jax_of()


def _changed_in(
    module: torch.nn.Module, before: dict[str, Any]
) -> list[tuple[str, list[torch.Tensor]]]:
    """Return the attributes that tensors of a trace are in now, and all tensors in each."""
    changed = []
    for attribute, value in vars(module).items():
        if attribute in ("_parameters", "_buffers", "_modules"):
            continue
        if value is before.get(attribute) and not isinstance(value, list | dict):
            continue
        inside: list[torch.Tensor] = []
        try:
            flatten(value, inside)
        except UsageError:
            continue
        if any(hasattr(tensor, "jax") for tensor in inside):
            changed.append((attribute, inside))
    return changed


def _keeps_a_tensor(name: str, attribute: str) -> UsageError:
    where = f"{name}.{attribute}" if name else attribute
    return UsageError(
        f"the forward pass adds a tensor to the contents of attribute {where!r} of its module",
        hint="return the tensor, or register a buffer for it: "
        f"self.register_buffer({attribute!r}, ...)",
    )


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """Let attention take the path whose operations torchax knows."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


Attribute = tuple[torch.nn.Module, str]


class _Kept(threading.local):
    """What attributes were before they were set, while `keeping` notes it in this thread."""

    before: dict[Attribute, Any] | None = None


_kept = _Kept()
_ABSENT: Final = object()


def _note_kept(module: torch.nn.Module, attribute: str, value: Any) -> None:
    """Note that a call sets an attribute of a module.

    Raises:
        UsageError: A trace of JAX would leave a tracer there.
    """
    if _kept.before is not None:
        _kept.before.setdefault((module, attribute), vars(module).get(attribute, _ABSENT))
    elif has_tracer(value):
        raise UsageError(
            f"the forward pass of {type(module).__name__} sets its attribute {attribute!r} to a "
            "tensor while JAX traces it",
            hint="compile the step with snaprt.torch.jit, or return the tensor",
        )


@contextmanager
def keeping() -> Iterator[dict[Attribute, Any]]:
    """Give attributes that calls set to tensors their old values at the end.

    Yields:
        What they were set to, known at the end.
    """
    outer, _kept.before = _kept.before, {}
    after: dict[Attribute, Any] = {}
    try:
        yield after
    finally:
        before, _kept.before = _kept.before, outer
        for (module, attribute), value in before.items():
            after[module, attribute] = vars(module).pop(attribute, None)
            if value is not _ABSENT:
                vars(module)[attribute] = value


class _Depth(threading.local):
    """How many functions of PyTorch this thread is tracing."""

    value = 0


_depth = _Depth()


def is_tracing() -> bool:
    """Return whether this thread traces a function: its tensors are those of torchax."""
    return _depth.value > 0


@contextmanager
def _inside() -> Iterator[None]:
    _depth.value += 1
    try:
        yield
    finally:
        _depth.value -= 1


@contextmanager
def tracing(randomness: Any, grad_mode: bool, autocast: torch.dtype | None) -> Iterator[None]:
    """Run Python code of PyTorch on tensors of torchax.

    Args:
        randomness: Where torchax gets its keys from.
        grad_mode: Whether gradients are computed, but for what is under `torch.no_grad`.
        autocast: The type that `torch.autocast` asks for.
    """
    environment = environment_of_thread()
    with ExitStack() as stack:
        stack.enter_context(_inside())
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Explicitly requested dtype")
        stack.enter_context(_randomness(environment, randomness))
        stack.enter_context(torch.set_grad_enabled(grad_mode))
        stack.enter_context(_without_fast_path())
        stack.enter_context(_autocast_to(autocast))
        stack.enter_context(environment)
        stack.enter_context(_Mode(environment, grad_mode, autocast))
        yield


def environment_of_thread() -> Any:
    """Return torchax's environment, with what it keeps for this thread."""
    environment = corrected_environment()
    with jaxapi.evaluating():  # it makes a random key the first time
        environment.param  # noqa: B018
    return environment


class _Randomness:
    """What torchax asks for while a function is traced: random keys, and the type of autocast."""

    def __init__(self, outer: Any, key: Any, autocast: torch.dtype | None) -> None:
        self.mesh = outer.mesh
        self._autocast = autocast
        self._data = key
        self._count = 0

    @property
    def is_used(self) -> bool:
        return self._count > 0

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return _autocast_inside(self._autocast)

    @property
    def prng(self) -> Any:
        return self.get_and_rotate_prng_key()

    def get_and_rotate_prng_key(self) -> Any:
        self._count += 1
        return _folded(self._data, self._count)


def _folded(data: Any, number: int) -> Any:
    """Return the key of this number, of those that come from the data of a key."""
    return jax.random.fold_in(jax.random.wrap_key_data(data, impl="threefry2x32"), number)


@contextmanager
def _randomness(environment: Any, randomness: _Randomness) -> Iterator[None]:
    outer = environment._property.content
    environment._property.content = randomness
    try:
        yield
    finally:
        environment._property.content = outer


class _Source(threading.local):
    """Where this thread draws keys from, while a function that draws some is traced."""

    key: Any = None
    drawn = 0
    generator: torch.Generator | None = None  # in place of PyTorch's default one


_source = _Source()


@contextmanager
def drawing_from(key: Any) -> Iterator[None]:
    """Draw the keys of this thread from ``key``."""
    outer = _source.key, _source.drawn
    _source.key, _source.drawn = key, 0
    try:
        yield
    finally:
        _source.key, _source.drawn = outer


@contextmanager
def drawing_by(generator: torch.Generator) -> Iterator[None]:
    """Draw the keys of this thread by ``generator``."""
    outer, _source.generator = _source.generator, generator
    try:
        yield
    finally:
        _source.generator = outer


def refuse_generator(func: Any, kwargs: dict[str, Any]) -> None:
    """Raise an error if a function that is being traced draws from a generator of its own.

    Raises:
        UsageError: It does.
    """
    if kwargs.get("generator") is not None:
        raise UsageError(
            f"traced code passes a torch.Generator to torch.{func.__name__}; the numbers would be "
            "drawn once, and each call would get the same",
            hint="leave the generator out and seed with torch.manual_seed, or draw outside and "
            "pass the numbers as an argument",
        )


def keys_drawn() -> int:
    """Return how many keys this thread has drawn from the key of `drawing_from`."""
    return _source.drawn


def draw_key() -> Any:
    """Return the data of a random key, drawn from PyTorch's generator of the CPU.

    So `torch.manual_seed`, `torch.set_rng_state` and `torch.random.fork_rng` have their meaning.
    """
    source = _source.key
    if source is not None:
        _source.drawn += 1
        return jax.random.key_data(_folded(source, _source.drawn))
    with lock:
        number = int(torch.empty((), dtype=torch.int64).random_(generator=_source.generator).item())
    return send(np.array([number >> 32, number & 0xFFFFFFFF], np.uint32))


class _Mode(TorchFunctionMode):
    """What a traced function sees besides tensors of torchax: tensors of the CPU, `no_grad`."""

    def __init__(self, environment: Any, grad_mode: bool, autocast: torch.dtype | None) -> None:
        self._environment = environment
        self._autocast = autocast
        self._grad_mode = grad_mode

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            return self._run(func, args, kwargs)
        except REFUSALS as refusal:
            raise_as_pytorch(func, args, kwargs, refusal)
            raise

    def _run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func in _GRADIENTS:
            raise UsageError(
                "a wrapped function or module computes gradients itself; autograd records nothing "
                "while it is traced",
                hint="wrap what is differentiated, and call torch.autograd.grad(..., "
                "create_graph=True) outside",
            )
        if func in numbers.READERS:
            number = numbers.known(args[0])
            if number is not None:
                return getattr(number, func.__name__)()
        args, kwargs = renamed(func, *by_position(func, args, dict(kwargs)))
        refuse_generator(func, kwargs)
        # Under autocast, PyTorch accepts operands of other types than those it computes in.
        error = None if _autocast_inside(self._autocast) else error_of_pytorch(func, args, kwargs)
        if error is not None:
            raise error
        if isinstance(kwargs.get("out"), torch.Tensor):
            out = kwargs.pop("out")
            with self:
                return out.copy_(func(*args, **kwargs))
        if func in versions.torchax().tensor.TENSOR_CONSTRUCTORS and kwargs.get("device") is None:
            if torch.get_default_device().type == "cpu":
                kwargs["device"] = "jax"
        elif _has_others((*args, *kwargs.values())):
            return self._with_constants(func, args, kwargs)
        if func in NARROWED or func in WIDENED:
            args, kwargs = self._cast(func, args, kwargs)
        adapt = ARGUMENTS.get(func)
        if adapt is not None:
            with self:
                args, kwargs = adapt(args, kwargs)
        correction = CORRECTIONS.get(func)
        if correction is not None:
            with self:
                return correction(*args, **kwargs)
        body = _body_of(func, self._environment)
        if body is not None:
            with self:
                return body(*args, **kwargs)
        if not self._grad_mode or torch.is_grad_enabled():
            return _call(func, args, kwargs)
        return self._without_gradient(func, args, kwargs)

    def _with_constants(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function with constants in the place of tensors that are not of the trace."""
        tensors: list[Any] = []
        structure = flatten((tuple(args), kwargs), tensors)
        if not any(hasattr(tensor, "jax") for tensor in tensors):
            return _call(func, args, kwargs)
        if self._grad_mode and torch.is_grad_enabled():
            for tensor in tensors:
                if tensor.device.type == "cpu" and tensor.requires_grad:
                    raise _gets_no_gradient(tensor)
        kind, environment = versions.torchax().tensor.Tensor, self._environment
        constants = [t if hasattr(t, "jax") else kind(constant_of(t), environment) for t in tensors]
        arrays_before = [
            (new, new._elem) for new, t in zip(constants, tensors, strict=True) if new is not t
        ]
        if func is torch.Tensor.__setitem__:
            raise _writes_to_constant()
        args, kwargs = unflatten(structure, iter(constants))
        with self:
            result = func(*args, **kwargs)
        if any(constant._elem is not array for constant, array in arrays_before):
            raise _writes_to_constant()
        return result

    def _cast(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return arguments in the type that `torch.autocast` computes a function in."""
        narrow = _autocast_inside(self._autocast)
        if narrow is None:
            return args, kwargs
        dtype = torch.float32 if func in WIDENED else narrow
        tensors: list[torch.Tensor] = []
        structure = flatten((tuple(args), kwargs), tensors)
        return unflatten(
            structure,
            iter([t.to(dtype) if t.dtype.is_floating_point else t for t in tensors]),
        )

    def _without_gradient(self, func: Any, args: Any, kwargs: Any) -> Any:
        target = args[0] if args and hasattr(args[0], "_elem") else None
        before = None if target is None else target._elem
        result = _call(func, args, kwargs)
        if target is not None and target._elem is not before:
            target._elem = unseen_by_autograd(before, target._elem)
            return result
        tensors: list[torch.Tensor] = []
        structure = flatten(result, tensors)
        if not tensors:
            return result
        stopped = [t.detach() if hasattr(t, "_elem") else t for t in tensors]
        return unflatten(structure, iter(stopped))


def _has_others(values: Sequence[Any]) -> bool:
    """Return whether tensors that are not of the trace are among values, or in lists of them."""
    return any(
        not hasattr(value, "jax")
        if isinstance(value, torch.Tensor)
        else type(value) in (list, tuple) and _has_others(value)
        for value in values
    )


def _gets_no_gradient(tensor: torch.Tensor) -> UsageError:
    return UsageError(
        "a wrapped function uses a CPU tensor that requires a gradient and is not one of its "
        f"arguments: {tensor.dtype}{list(tensor.shape)}",
        hint="pass it as an argument, let it be a parameter of a module that the function calls, "
        "or detach it",
    )


def _writes_to_constant() -> UsageError:
    return UsageError(
        "a wrapped function writes to a CPU tensor that is not one of its arguments",
        hint="pass it as an argument, or register it: module.register_buffer(name, tensor)",
    )


def _body_of(func: Any, environment: Any) -> Any:
    """Return what a Python function of PyTorch's does, so that a mode sees what it calls.

    With a mode on, the function itself would do nothing but ask that mode again. None if it is
    written in C++, or if torchax computes it as one.
    """
    names = functional.__dict__
    if not isinstance(func, FunctionType) or func.__globals__ is not names:
        return None
    try:
        environment._get_op_or_decomp(func)
    except versions.torchax().tensor.OperatorNotFound:
        asks = {name: _asks_nobody for name in names if name.startswith("has_torch_function")}
        body = FunctionType(func.__code__, {**names, **asks}, func.__name__, func.__defaults__)
        body.__kwdefaults__ = func.__kwdefaults__
        return body
    return None


def _asks_nobody(*_: Any) -> bool:
    return False


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    if func is torch.Tensor.__getitem__:
        args = (args[0], as_index(args[1], args[0].shape))
        if hasattr(args[0], "jax") and not takes_copy(args[1]):
            return slice_of(*args)
    of_numbers = numbers.call_of(func, args, kwargs)
    result = func(*args, **kwargs)
    note_views(func, args, kwargs, result)
    if of_numbers is not None:
        numbers.note(func, of_numbers, result)
    return result


class _ToDevice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> Tensor:
        return to_device(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return to_cpu(gradient)


def on_device(tensors: Sequence[torch.Tensor], *, with_gradient: bool = True) -> list[Tensor]:
    """Return tensors with copies on the device in the place of those of the CPU.

    Args:
        tensors: The tensors.
        with_gradient: Whether gradients of the copies flow back to the CPU.
    """
    moved = [t if type(t) is Tensor else _moved(t, with_gradient) for t in tensors]
    for tensor in moved:
        if tensor.view_of is not None:
            read_again(tensor)
    return moved


def _moved(tensor: torch.Tensor, with_gradient: bool) -> Tensor:
    if isinstance(tensor, Tensor):  # of a subclass
        return Tensor(array_of(tensor))
    if with_gradient and tensor.requires_grad and torch.is_grad_enabled():
        refuse_transform(tensor)
        return _ToDevice.apply(tensor)
    return to_device(tensor)


_AUTOCAST_DEVICES: Final = ("jax", "xla", "cpu")


def autocast_type() -> torch.dtype | None:
    """Return the type of `torch.autocast` for this device or the CPU, None outside of it."""
    return next((dtype for dtype in _autocast_types() if dtype is not None), None)


def _autocast_types() -> list[torch.dtype | None]:
    return [
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        for device in _AUTOCAST_DEVICES
    ]


@contextmanager
def _autocast_to(dtype: torch.dtype | None) -> Iterator[None]:
    """Show Python code the autocast of what is traced, for whichever device it asks."""
    before = _autocast_types()
    _set_autocast([dtype] * len(before))
    try:
        yield
    finally:
        _set_autocast(before)


def _set_autocast(dtypes: Sequence[torch.dtype | None]) -> None:
    for device, dtype in zip(_AUTOCAST_DEVICES, dtypes, strict=True):
        torch.set_autocast_enabled(device, dtype is not None)
        if dtype is not None:
            torch.set_autocast_dtype(device, dtype)


def _autocast_inside(outer: torch.dtype | None) -> torch.dtype | None:
    """Return the type that a `torch.autocast` inside of what is traced asks for, else ``outer``."""
    return next((dtype for dtype in _autocast_types() if dtype != outer), outer)
