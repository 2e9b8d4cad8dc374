"""`jit`: a whole training step of PyTorch as one compiled function.

The function runs once with tracers in its tensors. The state of the modules and optimizers that it
uses goes in as arguments and comes back as results, as in a JAX program that is written by hand.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import jax
import numpy as np
import torch

from snaprt import jaxapi
from snaprt.errors import UsageError
from snaprt.torch import gradients as gradients_module
from snaprt.torch import modules, optimizers, traced
from snaprt.torch.operations import kind_of
from snaprt.torch.setup import set_up
from snaprt.torch.structure import Structure, argument_names, flatten, unflatten
from snaprt.torch.tensors import Tensor, array_of, plainly, write

_F = TypeVar("_F", bound=Callable[..., Any])


def jit(function: _F) -> _F:
    """Compile a function of PyTorch code, such as a training step, as one operation.

    The function may call modules, ``loss.backward()``, and steps of optimizers. It finds the
    modules and optimizers in the variables that it uses; their parameters, buffers, gradients and
    state are arguments and results of the compiled function. Learning rates may change from call
    to call. Everything else that it reads is fixed when it is traced: once for each kind of
    arguments, and again when a module or optimizer has changed. Call ``optimizer.zero_grad()`` at
    the end of a step: gradients that are still there are results, which cost memory.

    Args:
        function: A function of tensors that returns tensors.

    Raises:
        UsageError: It is no function, or it uses an optimizer whose steps cannot be compiled.
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
        self._steps: dict[Any, _Step] = {}
        self._seen: set[Any] = set()

    def call(self, args: Any, kwargs: Any) -> Any:
        """Call the function: as it is written the first time, which makes optimizers' state."""
        if traced.is_tracing():
            return self._function(*args, **kwargs)
        owners = list(_used_by(self._function))
        for owner in owners:
            if isinstance(owner, torch.nn.Module):
                modules.wrap(owner)
        given: list[torch.Tensor] = []
        structure = flatten((tuple(args), kwargs), given)
        tensors = traced.on_device(given)
        kinds = tuple([kind_of(tensor.box.array) for tensor in tensors])
        mode = (structure, kinds, torch.is_grad_enabled(), traced.autocast_type())
        if mode not in self._seen:
            self._seen.add(mode)
            return self._function(*args, **kwargs)
        state = _State(owners)
        key = (*mode, state.key())
        step = self._steps.get(key) or _Step(self._function, structure)
        result = step.run(state, tensors)
        self._steps[key] = step
        return result


def _used_by(function: Callable[..., Any]) -> Iterator[Any]:
    """Yield the modules, optimizers and tensors among the variables of a function, each once."""
    seen: set[int] = set()
    pending: list[Any] = [inspect.unwrap(function)]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.nn.Module | torch.optim.Optimizer | Tensor):
            yield value
        elif isinstance(value, functools.partial):
            pending += [value.func, *value.args, *value.keywords.values()]
        elif inspect.ismethod(value):
            pending += [value.__func__, value.__self__, *vars(value.__self__).values()]
        elif inspect.isfunction(value):
            names = inspect.getclosurevars(value)
            defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            pending += [*names.nonlocals.values(), *names.globals.values(), *defaults]
        elif isinstance(value, list | tuple):
            pending += value
        elif isinstance(value, dict) and len(value) < 1000:
            pending += value.values()


class _State:
    """The tensors that a function may use besides its arguments, as they are now."""

    def __init__(self, owners: Iterable[Any]) -> None:
        self.modules = [o for o in owners if isinstance(o, torch.nn.Module)]
        self.optimizers = [o for o in owners if isinstance(o, torch.optim.Optimizer)]
        free = [o for o in owners if isinstance(o, Tensor)]
        self.tensors: dict[str, Tensor] = {}
        self.params: list[tuple[str, Tensor]] = []
        known: set[int] = set()
        with plainly():
            for number, module in enumerate(self.modules):
                prefix = f"{number}." if number else ""
                for name, parameter in module.named_parameters():
                    self._add(f"{prefix}{name}", parameter, known)
                    self.params.append((f"{prefix}{name}", parameter))  # type: ignore[arg-type]
                for name, buffer in module.named_buffers():
                    self._add(f"{prefix}{name}", buffer, known)
            for number, variable in enumerate(free):
                self._add(f"variable{number}", variable, known)
            for name, param in self.params:
                if param.grad is not None:
                    self._add(f"{name}.grad", param.grad, known)
            names = {id(param): name for name, param in self.params}
            for number, optimizer in enumerate(self.optimizers):
                for owned, values in optimizer.state.items():
                    for key, value in values.items():
                        if torch.is_tensor(value):
                            if type(value) is not Tensor:
                                value = values[key] = traced.on_device([value])[0]
                            owner = names.get(id(owned), f"{number}.{id(owned)}")
                            self._add(f"{owner}.{key}.{number}", value, known)

    def _add(self, name: str, tensor: Any, known: set[int]) -> None:
        if id(tensor) not in known:
            known.add(id(tensor))
            self.tensors[name] = tensor

    def key(self) -> Any:
        """Return what a trace depends on, apart from the values."""
        with plainly():
            flags = tuple([tensor.requires_grad for tensor in self.tensors.values()])
        settings = tuple(map(optimizers.settings_of, self.optimizers))
        training = tuple([m.training for module in self.modules for m in module.modules()])
        identities = tuple(map(id, self.tensors.values()))
        return (tuple(self.tensors), identities, flags, settings, training)

    def rates(self) -> np.ndarray:
        """Return the learning rates of all groups.

        Raises:
            UsageError: One is a tensor, or an optimizer's steps cannot be compiled.
        """
        for optimizer in self.optimizers:
            if not optimizers.can_be_compiled(optimizer):
                raise UsageError(
                    f"snaprt.torch.jit cannot compile steps of {type(optimizer).__name__}",
                    hint="compile the part before optimizer.step(), and call it outside",
                )
        return np.asarray(
            [group["lr"] for o in self.optimizers for group in o.param_groups], np.float64
        )


class _Step:
    """A function compiled for one kind of arguments and state."""

    def __init__(self, function: Callable[..., Any], structure: Structure) -> None:
        self._function = function
        self._structure = structure
        self._names = argument_names(function, structure)

        def step(_state: Any, _args: Any, rates: Any, key: Any) -> Any:
            return self._trace(_state, _args, rates, key)

        name = getattr(function, "__name__", "step").strip("_<>")
        step.__name__ = step.__qualname__ = f"torch_{name}"
        self._compiled = jax.jit(step)
        self._now: _State | None = None  # while it is called, for `_trace`
        self._result: Structure = None
        self._written: list[str] = []  # the names of tensors that it changes
        self._kept: list[bool] = []  # which gradients there are at the end

    def run(self, state: _State, tensors: Sequence[Tensor]) -> Any:
        """Run the step, and write what it changed."""
        arrays = {name: array_of(tensor) for name, tensor in state.tensors.items()}
        rates, key = state.rates(), traced.draw_key()
        self._now = state
        try:
            results, written, gradients = self._compiled(
                arrays, dict(zip(self._names, map(array_of, tensors), strict=True)), rates, key
            )
        except gradients_module.NEEDS_VALUES as error:
            place = (jaxapi.user_stack(error) or ("the function",))[-1]
            raise UsageError(
                f"{place} needs the values of a tensor, which snaprt.torch.jit cannot know",
                hint="use torch.where, or move that part out of the function",
            ) from error
        finally:
            self._now = None
        for name, array in zip(self._written, written, strict=True):
            write(state.tensors[name], array)
        given = iter(gradients)
        with plainly():
            for (_, parameter), is_kept in zip(state.params, self._kept, strict=True):
                if is_kept:
                    parameter.grad = Tensor(next(given))
                elif parameter.grad is not None:
                    parameter.grad = None
        return unflatten(self._result, iter([Tensor(result) for result in results]))

    def _trace(self, arrays: Any, args: Any, rates: Any, key: Any) -> Any:
        state = self._now
        assert state is not None
        with _holding(state, arrays), traced.drawing_from(key), ExitStack() as stack:
            count = 0
            for optimizer in state.optimizers:
                groups = len(optimizer.param_groups)
                own = rates[count : count + groups]
                stack.enter_context(optimizers.with_rates(optimizer, own))
                count += groups
            given = [args[name] for name in self._names]
            tensors = [Tensor(array) for array in given]
            positional, named = unflatten(self._structure, iter(tensors))
            result = self._function(*positional, **named)
            if any(t.box.array is not a for t, a in zip(tensors, given, strict=True)):
                raise UsageError(
                    "a function compiled by snaprt.torch.jit changes an argument in place",
                    hint="return the new tensor",
                )
            outputs: list[Any] = []
            self._result = flatten(result, outputs)
            results = [array_of(tensor) for tensor in traced.on_device(outputs)]
            self._written = [
                name for name, t in state.tensors.items() if t.box.array is not arrays[name]
            ]
            written = [state.tensors[name].box.array for name in self._written]
            with plainly():
                ends: list[Any] = [parameter.grad for _, parameter in state.params]
            self._kept = [end is not None for end in ends]
            gradients = [array_of(end) for end in ends if end is not None]
        return results, written, gradients


@contextmanager
def _holding(state: _State, arrays: dict[str, Any]) -> Iterator[None]:
    """Let tensors hold these arrays, and what they held before at the end."""
    held = [(tensor.box, tensor.box.array) for tensor in state.tensors.values()]
    with plainly():
        gradients = [parameter.grad for _, parameter in state.params]
    try:
        for name, tensor in state.tensors.items():
            tensor.box.array = arrays[name]
        yield
    finally:
        for box, array in held:
            box.array = array
        with plainly():
            for (_, parameter), gradient in zip(state.params, gradients, strict=True):
                parameter.grad = gradient
