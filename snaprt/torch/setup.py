"""What PyTorch is taught, once a process.

The device ``jax``, how its tensors are run, and what `torch.Generator` and Python code that
autograd calls do there.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils import checkpoint

import snaprt
from snaprt import jaxapi
from snaprt.errors import UsageError
from snaprt.torch import accelerator, functions, operations, optimizers, tensors, traced
from snaprt.torch.lowering import lists, versions
from snaprt.torch.lowering.device_names import means_ours

_C: Any = torch._C
_T: Any = torch.Tensor
_Distribution: Any = torch.distributions.Distribution
_BACKWARD_CLASS: Final = "_snaprt_backward_cls"
_libraries: list[torch.library.Library] = []  # what they register is gone with them


@functools.cache
def set_up() -> None:
    """Let PyTorch make tensors on the device ``jax``; no mode of PyTorch is switched on.

    Raises:
        UsageError: torch or torchax is missing, or they do not fit.
    """
    torchax = versions.torchax()
    for file in (torch.__file__, torchax.__file__, snaprt.__file__):
        jaxapi.hide_frames_below(Path(file).parent)
        jaxapi.hide_traceback_below(Path(file).parent)
    _register_device()
    accelerator.answer()
    tensors.set_device("jax")
    tensors.handle_with(operations.run_function, operations.run_dispatched)
    optimizers.watch_steps()
    _watch_functions()
    _provide_generators()
    transformer: Any = torch.nn.modules.transformer
    transformer._detect_is_causal_mask = _outside_of_traces(transformer._detect_is_causal_mask)
    checks = _OutsideOfTraces(_Distribution._validate_args)
    _Distribution._validate_args = checks
    _Distribution.set_default_validate_args = staticmethod(checks.set_default)
    lists.group_by_device()
    _T.pin_memory = lambda tensor, device=None: tensor  # XLA copies from memory of any kind
    _T.is_pinned = lambda tensor, device=None: False


def _register_device() -> None:
    """Register what C++ asks of a device: a guard, hooks, and how its tensors are allocated.

    Checked with torch 2.12.1, 2.13.0 and 2.14.1.
    """

    class Guard(_C._acc.DeviceGuard):
        def type_(self) -> Any:
            return _C._autograd.DeviceType.PrivateUse1

    class Hooks(_C._acc.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return False  # as an accelerator of C++, for barriers and modules of devices

        def is_built(self) -> bool:
            return False

        def has_primary_context(self, index: int) -> bool:
            return False

    _C._acc.register_python_privateuseone_device_guard(Guard())
    _C._acc.register_python_privateuseone_hook(Hooks())
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in operations.FACTORIES.items():
        library.impl(name, kernel, "PrivateUse1")
    _libraries.append(library)


def _watch_functions() -> None:
    """Let functions that define their gradient do so while they are traced, too.

    Checked with torch 2.12.1, 2.13.0 and 2.14.1.
    """
    owner: Any = torch.autograd.Function
    if isinstance(owner.apply, types.MethodType):
        owner = owner.__base__  # below `Function.apply`, to which users keep references from before
    else:  # what they keep is the function of C++ itself
        _refuse_references_from_before()

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if not traced.is_tracing():
            return super(owner, cls).apply(*args, **kwargs)
        if cls is checkpoint.CheckpointFunction:
            run, _, *inputs = args
            return run(*inputs)  # XLA decides what it keeps in memory
        return functions.apply(cls, args, kwargs)

    owner.apply = classmethod(apply)
    library: Any = torch.autograd
    library._engine_run_backward = _with_functions(library._engine_run_backward)


def _refuse_references_from_before() -> None:
    """Let `Function.apply` of C++ say that it has no gradient where it is called in a trace.

    It first asks the class for the class of its context.
    """

    def get(cls: Any) -> Any:
        if traced.is_tracing():
            raise UsageError(
                f"a reference to {cls.__qualname__}.apply from before the first use of "
                "snaprt.torch has no gradient in wrapped modules and functions",
                hint=f"call {cls.__qualname__}.apply where it is used, or call "
                "snaprt.torch.device() before the line that keeps it",
            )
        return vars(cls).get(_BACKWARD_CLASS) or vars(cls)["_backward_cls"]

    def set_(cls: Any, value: Any) -> None:
        setattr(cls, _BACKWARD_CLASS, value)

    of_functions: Any = type(torch.autograd.Function)
    of_functions._backward_cls = property(get, set_)


def _with_functions(run: Any) -> Any:
    """Return a function that runs ``backward`` with functions of PyTorch going to `operations`.

    It is reached with that switched off. What a checkpoint computes again, and hooks, must be
    recorded by autograd as they were the first time.
    """

    @functools.wraps(run)
    def run_with_functions(*args: Any, **kwargs: Any) -> Any:
        with torch._C._EnableTorchFunction():
            return run(*args, **kwargs)

    return run_with_functions


_PLAIN: Final[Any] = torch.Generator
_Meta: Any = type(_PLAIN)


class _OfAnyDevice(_Meta):
    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, _PLAIN)


class Generator(_PLAIN, metaclass=_OfAnyDevice):
    """What `torch.Generator` makes: one for this device, or a plain one for any other."""

    def __new__(cls, device: Any = "cpu") -> Any:
        """Make a generator for ``device``."""
        return super().__new__(cls) if means_ours(device) else _PLAIN(device)

    def __init__(self, device: Any = "cpu") -> None:
        """Leave everything to ``__new__``."""

    @property
    def device(self) -> torch.device:
        """The device of the tensors that it is for."""
        return tensors.DEVICE


def _outside_of_traces(detect: Callable[..., bool]) -> Callable[..., bool]:
    """Return what tells whether a mask is causal, so that it reads no values in a trace.

    It is a hint there, by which C++ chooses a faster kernel.
    """

    @functools.wraps(detect)
    def call(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        if traced.is_tracing():
            return is_causal is True
        return detect(mask, is_causal, size)

    return call


class _OutsideOfTraces:
    """Whether distributions check the values of their arguments: there are none in a trace."""

    def __init__(self, default: bool) -> None:
        self._default = default

    def __get__(self, distribution: Any, owner: Any) -> bool:
        return self._default and not traced.is_tracing()

    def set_default(self, value: bool) -> None:
        """Set whether values are checked by default.

        Raises:
            ValueError: The value is neither True nor False.
        """
        if value not in (True, False):
            raise ValueError(f"{value!r} is neither True nor False")
        self._default = value


def _provide_generators() -> None:
    """Let ``torch.Generator(device)`` make generators for the device."""
    library: Any = torch
    library.Generator = Generator
