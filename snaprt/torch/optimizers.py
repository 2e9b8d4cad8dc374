"""Steps of PyTorch's optimizers, each as one compiled operation.

The optimizer's own code is traced, in its variant that keeps every value on the device. What it
reads of its parameter groups, apart from the learning rate, is part of what a trace is made for.
Optimizers that are not PyTorch's run as they are written, one operation at a time.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from snaprt import jaxapi, metrics
from snaprt.torch import operations
from snaprt.torch.structure import are_the_same, values_of
from snaprt.torch.tensors import (
    Tensor,
    array_of,
    arrays_of_gradients,
    forget_gradients,
    gradients_of,
    plainly,
    to_device,
)
from snaprt.trace.fast_path import follow_function

_log = logging.getLogger("snaprt.torch")
_adagrad: Any = importlib.import_module("torch.optim.adagrad")

# Their steps read nothing but their groups, their state and gradients.
_KNOWN: Final[tuple[type[torch.optim.Optimizer], ...]] = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam),
    *(torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adadelta),
    *(torch.optim.ASGD, torch.optim.Adagrad),
)
_CAPTURABLE: Final[tuple[type[torch.optim.Optimizer], ...]] = tuple(
    kind for kind in _KNOWN if kind not in (torch.optim.SGD, torch.optim.Adagrad)
)

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


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Run the step, where it can be compiled, and leave PyTorch nothing to do."""
    if len(args) > 1 or kwargs or type(optimizer) not in _KNOWN:
        return
    if optimizer._optimizer_step_pre_hooks:
        return
    steps = _optimizers.get(optimizer)
    if steps is None:
        steps = _optimizers[optimizer] = _Steps()
    if steps.run(optimizer):
        _groups[optimizer] = optimizer.param_groups
        optimizer.param_groups = []


def _after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    groups = _groups.pop(optimizer, None)
    if groups is not None:
        optimizer.param_groups = groups


_rates: dict[int, Any] = {}  # of optimizers in functions that are being traced


@contextmanager
def with_rates(optimizer: torch.optim.Optimizer, rates: Any) -> Iterator[None]:
    """Let steps of an optimizer take their learning rates from an array."""
    _rates[id(optimizer)] = rates
    try:
        yield
    finally:
        del _rates[id(optimizer)]


class Rates:
    """Learning rates as an array, made anew where one has changed."""

    def __init__(self) -> None:
        self._rates: list[float] = []
        self._array: Any = None

    def on_device(self, rates: list[float]) -> Any:
        """Return the rates, in double precision where JAX has that."""
        if rates != self._rates or self._array is None:
            with jaxapi.evaluating():
                self._array = jnp.asarray(np.asarray(rates, np.float64))
            self._rates = rates
        return self._array


def can_be_compiled(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether steps of an optimizer are compiled."""
    steps = _optimizers.get(optimizer)
    return type(optimizer) in _KNOWN and not (steps and steps.is_given_up)


def settings_of(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """Return what a compiled step depends on in the groups: all but parameters and rates."""
    return tuple(
        [
            tuple([(k, v) for k, v in group.items() if k not in ("params", "lr")])
            for group in optimizer.param_groups
        ]
    )


class _Steps:
    """The compiled steps of one optimizer."""

    def __init__(self) -> None:
        self._traces: dict[Any, _Step] = {}
        self._made = 0
        self._held: _Held | None = None
        self.is_given_up = False
        self._rates = Rates()

    def run(self, optimizer: torch.optim.Optimizer) -> bool:
        """Run a step; return whether it could be compiled."""
        if self.is_given_up:
            return False
        groups = optimizer.param_groups
        rates = [group["lr"] for group in groups]
        if not all(type(rate) is float or type(rate) is int for rate in rates):
            return False
        held = self._held
        gradients = None if held is None else held.gradients(optimizer)
        if held is None or gradients is None:
            with plainly():
                held = self._held = _Held.of(optimizer)
            gradients = None if held is None else held.gradients(optimizer)
        if held is None or gradients is None:
            return False
        key = (settings_of(optimizer), held.kind)
        try:
            trace = self._traces.get(key)
        except TypeError:  # a setting is a tensor or a list
            return False
        if trace is None:
            if self._made >= _MAX_TRACES:
                self._give_up(optimizer, "its settings change too often")
                return False
            self._made += 1
            trace = _Step(optimizer)
        try:
            self._held = trace.run(optimizer, held, gradients, self._rates_of(optimizer, rates))
        except (RuntimeError, TypeError, ValueError, AssertionError, jax.errors.JAXTypeError) as e:
            if key in self._traces:
                raise
            self._give_up(optimizer, f"{type(e).__name__}: {e}")
            return False
        if not trace.makes_state:  # which Python code does, when it is traced
            self._traces[key] = trace
        return True

    def _give_up(self, optimizer: torch.optim.Optimizer, reason: str) -> None:
        self.is_given_up = True
        metrics.counter_add("torch::untraced_optimizers")
        _log.warning(
            "%s runs operation by operation, which is slow: %s", type(optimizer).__name__, reason
        )

    def _rates_of(self, optimizer: torch.optim.Optimizer, rates: list[float]) -> Any:
        given = _rates.get(id(optimizer))
        return self._rates.on_device(rates) if given is None else given


class _Held:
    """What an optimizer consists of, which is looked for anew when it has changed.

    Attributes:
        params: The parameters that have gradients, by name, in the order of the names.
        states: The state of each.
        own: The tensors of the state, by name.
        common: Those that are the same for all parameters of a group, if nothing changed one.
        kind: What a trace depends on in all this: equal for equal ones.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        groups = optimizer.param_groups
        self._lists = [list(group["params"]) for group in groups]
        given = [(p, number) for number, params in enumerate(self._lists) for p in params]
        names = _unique_names([p for p, _ in given])
        found = sorted(zip(names, given, strict=True), key=lambda pair: pair[0])
        self._given = [p for _, (p, _) in found]
        self._which = [array is not None for array in arrays_of_gradients(self._given)]
        present = [pair for pair, there in zip(found, self._which, strict=True) if there]
        self.params: dict[str, Tensor] = {name: p for name, (p, _) in present}
        self._state = optimizer.state
        self.states = [self._state[p] for p in self.params.values()]
        self._all_states = [*self._state.values()]
        moved: dict[float, Any] = {}
        for state in self.states:
            _move_step(state, moved)
        self._values = [*values_of(self._all_states)]
        self.groups = [number for _, (_, number) in present]
        self.own: dict[str, Tensor] = {}
        self.common: dict[str, dict[str, Tensor]] = {}
        for name, group, state in zip(self.params, self.groups, self.states, strict=True):
            for key, value in state.items():
                if type(value) is not Tensor:
                    continue
                of_all = self.common.setdefault(_name_in_group(group, key), {})
                place = of_all if key in _OF_A_GROUP else self.own
                place[f"{name}.{key}"] = value
        self.common = {name: of_all for name, of_all in self.common.items() if of_all}
        kinds = tuple([_kind(state) for state in self.states])
        self.kind = _interned(tuple(self._which), kinds)

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> _Held | None:
        """Return what an optimizer consists of; None where something is not on the device."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        return cls(optimizer) if {*map(type, params)} <= {Tensor} else None

    def gradients(self, optimizer: torch.optim.Optimizer) -> list[Any] | None:
        """Return the arrays of gradients, as `params` are; None where something has changed."""
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
        gradients = arrays_of_gradients(self._given)
        if [gradient is not None for gradient in gradients] != self._which:
            return None
        return [gradient for gradient in gradients if gradient is not None]


# State that depends on the settings of the group and on itself alone.
_OF_A_GROUP: Final = frozenset({"step", "mu_product", "eta", "mu"})


def _name_in_group(group: int, key: str) -> str:
    return f"param_groups[{group}].{key}"


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


def _kind(state: dict[str, Any]) -> Any:
    """Return what a trace depends on in a parameter's state."""
    return tuple([(k, v.__class__) if torch.is_tensor(v) else (k, v) for k, v in state.items()])


class _Step:
    """A compiled step for one set of settings, gradients and state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._compiled = jax.jit(_named(self._trace, f"torch_{type(optimizer).__name__}_step"))
        self._held: _Held | None = None  # while it is called, for `_trace`
        self.makes_state = False

    def run(
        self,
        optimizer: torch.optim.Optimizer,
        held: _Held,
        gradients: list[Any],
        rates: Any,
    ) -> _Held | None:
        """Run the step, and write the new parameters and state.

        Returns:
            What the optimizer consists of now, if that is known.
        """
        params = [*map(_ARRAY, held.params.values())]
        names = [*held.own]
        arrays = [*map(_ARRAY, held.own.values())]
        ones: list[bool] = []
        for name, tensors in held.common.items():
            each = [*map(_ARRAY, tensors.values())]
            is_one = len({*map(id, each)}) == 1
            ones.append(is_one)
            names += [name] if is_one else tensors
            arrays += each[:1] if is_one else each

        def call() -> tuple[Any, list[Any]]:
            self._held = held
            try:
                given = [
                    dict(zip(held.params, params, strict=True)),
                    dict(zip(held.params, gradients, strict=True)),
                    dict(zip(names, arrays, strict=True)),
                ]
                new, *others = self._compiled(*given, rates)
            finally:
                self._held = None
            return [[new[name] for name in held.params], *others], []

        key = (weakref.ref(self), weakref.ref(held), *ones)
        operands = [*params, *gradients, *arrays, rates]
        (new, new_gradients, new_state), _ = follow_function(key, operands, call)
        _write_all(held.params.values(), new)
        if new_gradients:
            tensors_of_gradients = gradients_of([*held.params.values()])
            for index, array in new_gradients.items():
                tensors_of_gradients[int(index)].box.write(array)  # type: ignore[union-attr]
        if self.makes_state:
            with plainly():
                held = _Held(optimizer)
        _write_all(held.own.values(), map(new_state.__getitem__, held.own))
        for name, tensors in held.common.items():
            names = [each if each in new_state else name for each in tensors]
            _write_all(tensors.values(), map(new_state.__getitem__, names))
        return held

    def _trace(self, params: Any, gradients: Any, state: Any, rates: Any) -> Any:
        optimizer, held = self._optimizer(), self._held
        assert optimizer is not None
        assert held is not None
        named = dict(state)
        for name in held.common:
            if name in state:
                named.update(dict.fromkeys(held.common[name], state[name]))
        tensors = {**held.own, **{n: t for group in held.common.values() for n, t in group.items()}}
        boxes = [p.box for p in held.params.values()]
        gradient_tensors: list[Any] = gradients_of([*held.params.values()])
        gradient_boxes = [gradient.box for gradient in gradient_tensors]
        everything = [*boxes, *gradient_boxes, *[tensor.box for tensor in tensors.values()]]
        before = [(box, box.array) for box in everything]
        known = {id(tensor) for tensor in tensors.values()}
        numbers = [{k: v for k, v in s.items() if not _is_tensor(v)} for s in held.states]
        try:
            for name, box, gradient in zip(held.params, boxes, gradient_boxes, strict=True):
                box.array, gradient.array = params[name], gradients[name]
            for name, tensor in tensors.items():
                tensor.box.array = named[name]
            with _on_device_variant(optimizer, rates), torch.no_grad():
                _plain_step(type(optimizer))(optimizer)
            for then, values in zip(numbers, held.states, strict=True):
                now = {k: v for k, v in values.items() if not _is_tensor(v)}
                if then != now and not (not then and set(now) <= {"step"}):
                    raise ValueError("its state has numbers that change")
            new = {name: box.array for name, box in zip(held.params, boxes, strict=True)}
            changed = {
                str(index): box.array
                for index, (name, box) in enumerate(zip(held.params, gradient_boxes, strict=True))
                if box.array is not gradients[name]
            }
            new_state = {}
            for name, group, values in zip(held.params, held.groups, held.states, strict=True):
                for key, value in values.items():
                    whole = _name_in_group(group, key)
                    if not _is_tensor(value):
                        continue
                    each = f"{name}.{key}"
                    if whole in held.common:
                        is_common = whole in state and each in held.common[whole]
                    else:  # made now, for all of the group
                        is_common = key in _OF_A_GROUP
                    new_state[whole if is_common else each] = value.box.array
            self.makes_state = new_state.keys() != state.keys()
        except BaseException:
            for then, values in zip(numbers, held.states, strict=True):
                for key in [*values]:
                    if key not in then and id(values[key]) not in known:
                        del values[key]  # it holds tracers
            raise
        finally:
            for box, array in before:
                box.array = array
        return new, changed, new_state


_ARRAY: Final = operator.attrgetter("box.array")


def _write_all(tensors: Iterable[Tensor], arrays: Iterable[Any]) -> None:
    for tensor, array in zip(tensors, arrays, strict=True):
        box = tensor.box
        box.array = array
        box.version += 1


def _is_tensor(value: Any) -> bool:
    return type(value) is Tensor


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def step(_params: Any, gradients: Any, _state: Any, rates: Any) -> Any:
        return function(_params, gradients, _state, rates)

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


@contextmanager
def _on_device_variant(optimizer: torch.optim.Optimizer, rates: Any) -> Iterator[None]:
    """Let an optimizer read no values, and take its learning rates from an array."""
    groups = optimizer.param_groups
    held = [dict(group) for group in groups]
    get_value = _adagrad._get_value
    try:
        _adagrad._get_value = lambda value: value  # it has no variant that reads none
        for index, group in enumerate(groups):
            group["lr"] = Tensor(rates[index])
            group["foreach"] = group["fused"] = False
            if type(optimizer) in _CAPTURABLE:
                group["capturable"] = True
            if "betas" in group:
                betas = group["betas"]
                group["betas"] = tuple([_Decay(b) if isinstance(b, float) else b for b in betas])
        yield
    finally:
        _adagrad._get_value = get_value
        for group, before in zip(groups, held, strict=True):
            group.clear()
            group.update(before)


class _Decay(float):
    """A rate of decay, whose power with the number of steps keeps the digits that 1 takes away.

    PyTorch computes ``1 - beta**step`` in double precision on the host. On the device, where it is
    float32, a beta of 0.999 would leave three digits in the first steps.
    """

    def __pow__(self, exponent: Any) -> Any:  # type: ignore[override]
        return _Power(self, exponent) if _is_tensor(exponent) else float(self) ** exponent


class _Power:
    """A rate of decay to the power of the number of steps, as optimizers use it."""

    def __init__(self, base: float, steps: Tensor) -> None:
        exponent = array_of(steps).astype(jnp.result_type(float))
        self._logarithm = exponent * (math.log(base) if base else -math.inf)

    def __rsub__(self, one: float) -> Tensor:
        return Tensor(-jnp.expm1(self._logarithm) - (1 - one))

    def __sub__(self, one: float) -> Tensor:
        return Tensor(jnp.expm1(self._logarithm) - (one - 1))

    def __rmul__(self, factor: Tensor) -> torch.Tensor:
        return factor * Tensor(jnp.exp(self._logarithm))


def _total_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `_get_total_norm` of PyTorch, which runs as one operation for our tensors."""

    @functools.wraps(original)
    def get_total_norm(
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if not given or not all(type(t) is Tensor for t in given):
            return original(given, norm_type, error_if_nonfinite, foreach)
        with torch.no_grad():
            norm = operations.run_function(original, (given, float(norm_type)), {})
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
            gradients = [gradient for p in given if (gradient := p.grad) is not None]
        if not gradients or not all(type(g) is Tensor for g in gradients):
            original(given, max_norm, total_norm, foreach)
            return
        with torch.no_grad():
            operations.run_function(_scale, (gradients, float(max_norm), total_norm), {})

    return clip_grads_with_norm_


def _scale(gradients: list[torch.Tensor], max_norm: float, total_norm: torch.Tensor) -> None:
    factor = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
