"""Steps of PyTorch's optimizers, each as one compiled operation.

The optimizer's own code is traced, in its variant that keeps every value on the device. What it
reads of its parameter groups, apart from the learning rate, is part of what a trace is made for.
Optimizers that are not PyTorch's run as they are written, one operation at a time.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
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
from snaprt.torch.tensors import Tensor, array_of, plainly, to_device

_log = logging.getLogger("snaprt.torch")

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
    for owner in (torch.optim.Optimizer, torch.nn.Module):
        owner.zero_grad = _plainly(owner.zero_grad)  # type: ignore[method-assign]
    clip: Any = clip_grad
    clip._get_total_norm = _total_norm(clip._get_total_norm)
    clip._clip_grads_with_norm_ = _clip(clip._clip_grads_with_norm_)


def _plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which only sets attributes, without a call of Python for each."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with plainly():
            return function(*args, **kwargs)

    return call


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Run the step, where it can be compiled, and leave PyTorch nothing to do."""
    if len(args) > 1 or kwargs or type(optimizer) not in _KNOWN:
        return
    if optimizer._optimizer_step_pre_hooks or not _is_ours(optimizer):
        return
    steps = _optimizers.get(optimizer)
    if steps is None:
        steps = _optimizers[optimizer] = _Steps(optimizer)
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


def _is_ours(optimizer: torch.optim.Optimizer) -> bool:
    return all(type(p) is Tensor for group in optimizer.param_groups for p in group["params"])


class _Steps:
    """The compiled steps of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._traces: dict[Any, _Step] = {}
        self._made = 0
        self.is_given_up = False
        self._rates: list[float] = []
        self._rates_on_device: Any = None

    def run(self, optimizer: torch.optim.Optimizer) -> bool:
        """Run a step; return whether it could be compiled."""
        if self.is_given_up:
            return False
        groups = optimizer.param_groups
        rates = [group["lr"] for group in groups]
        if not all(type(rate) is float or type(rate) is int for rate in rates):
            return False
        with plainly():
            settings = settings_of(optimizer)
            given = [(p, p.grad) for group in groups for p in group["params"]]
            present = [(p, gradient) for p, gradient in given if gradient is not None]
            if not all(type(gradient) is Tensor for _, gradient in present):
                return False
            states = [optimizer.state[p] for p, _ in present]
            kinds = tuple([_kind(state) for state in states])
            which = tuple([gradient is not None for _, gradient in given])
        key = (settings, which, kinds)
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
            trace.run(optimizer, present, states, self._rates_of(optimizer, rates))
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

    def _rates_of(self, optimizer: torch.optim.Optimizer, rates: list[float]) -> Any:
        given = _rates.get(id(optimizer))
        return self._on_device(rates) if given is None else given

    def _on_device(self, rates: list[float]) -> Any:
        if rates != self._rates or self._rates_on_device is None:
            self._rates = rates
            with jaxapi.evaluating():
                self._rates_on_device = jnp.asarray(np.asarray(rates, np.float64))
        return self._rates_on_device


def _kind(state: dict[str, Any]) -> Any:
    """Return what a trace depends on in a parameter's state."""
    if "step" in state and type(state["step"]) is not Tensor and torch.is_tensor(state["step"]):
        state["step"] = to_device(state["step"].float())
    return tuple([(k, v.__class__) if torch.is_tensor(v) else (k, v) for k, v in state.items()])


class _Step:
    """A compiled step for one set of settings, gradients and state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._compiled = jax.jit(_named(self._trace, f"torch_{type(optimizer).__name__}_step"))
        self._present: list[tuple[Tensor, Tensor]] = []
        self._states: list[dict[str, Any]] = []
        self._keys: list[list[str]] = []
        self._names: list[str] = []

    def run(
        self,
        optimizer: torch.optim.Optimizer,
        present: list[tuple[Tensor, Tensor]],
        states: list[dict[str, Any]],
        rates: Any,
    ) -> None:
        """Run the step, and write the new parameters and state."""
        self._present, self._states = present, states  # for `_trace`, if it is to be traced
        if not self._names:
            self._names = _unique_names([p for p, _ in present])
        names = self._names
        boxes = [p.box for p, _ in present]
        params = dict(zip(names, [box.array for box in boxes], strict=True))
        gradients = dict(zip(names, [array_of(g) for _, g in present], strict=True))
        before = {
            f"{name}.{key}": value.box.array
            for name, state in zip(names, states, strict=True)
            for key, value in state.items()
            if type(value) is Tensor
        }
        try:
            new, new_gradients, new_states = self._compiled(params, gradients, before, rates)
        finally:
            self._present, self._states = [], []
        for name, box in zip(names, boxes, strict=True):
            box.write(new[name])
        for index, array in new_gradients.items():
            present[int(index)][1].box.write(array)
        for name, state in zip(names, states, strict=True):
            for key, value in state.items():
                if type(value) is Tensor:
                    value.box.write(new_states[f"{name}.{key}"])

    def _trace(self, params: Any, gradients: Any, state: Any, rates: Any) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None
        boxes = [p.box for p, _ in self._present]
        gradient_boxes = [g.box for _, g in self._present]
        held = [(box, box.array) for box in (*boxes, *gradient_boxes)]
        known = {id(v) for s in self._states for v in s.values()}
        held += [(v.box, v.box.array) for s in self._states for v in s.values() if _is_tensor(v)]
        numbers = [{k: v for k, v in s.items() if not _is_tensor(v)} for s in self._states]
        try:
            for name, box, gradient in zip(self._names, boxes, gradient_boxes, strict=True):
                box.array, gradient.array = params[name], gradients[name]
            for name, values in zip(self._names, self._states, strict=True):
                for key, value in values.items():
                    if _is_tensor(value):
                        value.box.array = state[f"{name}.{key}"]
            with _on_device_variant(optimizer, rates), torch.no_grad():
                _plain_step(type(optimizer))(optimizer)
            for before, values in zip(numbers, self._states, strict=True):
                after = {k: v for k, v in values.items() if not _is_tensor(v)}
                if before != after and not (not before and set(after) <= {"step"}):
                    raise ValueError("its state has numbers that change")
            new = {n: box.array for n, box in zip(self._names, boxes, strict=True)}
            changed = {
                str(index): box.array
                for index, (name, box) in enumerate(zip(self._names, gradient_boxes, strict=True))
                if box.array is not gradients[name]
            }
            states = {
                f"{name}.{key}": value.box.array
                for name, values in zip(self._names, self._states, strict=True)
                for key, value in values.items()
                if _is_tensor(value)
            }
        except BaseException:
            for before, values in zip(numbers, self._states, strict=True):
                for key in [*values]:
                    if key not in before and id(values[key]) not in known:
                        del values[key]  # it holds tracers
            raise
        finally:
            for box, array in held:
                box.array = array
        return new, changed, states


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
    try:
        for index, group in enumerate(groups):
            group["lr"] = Tensor(rates[index])
            group["foreach"] = group["fused"] = False
            if type(optimizer) in _CAPTURABLE:
                group["capturable"] = True
        yield
    finally:
        for group, before in zip(groups, held, strict=True):
            group.clear()
            group.update(before)


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
            gradients = [p.grad for p in given if p.grad is not None]
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
