"""Errors of PyTorch's own: it runs each call that is traced on shapes and dtypes alone.

JAX accepts what PyTorch refuses, such as an index that is larger than its tensor, or refuses it by
other errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import torch
from torch.utils import _python_dispatch

from snaprt.torch.structure import flatten, unflatten

#: What JAX and torchax raise for shapes and dtypes that do not fit, ...
REFUSALS: Final = (AssertionError, IndexError, TypeError, ValueError)

#: ... but for these, which say that Python needs values that are not known yet.
_OF_TRACING: Final = (jax.errors.JAXIndexError, jax.errors.JAXTypeError)

_T: Final = torch.Tensor
#: What depends on the device, or on how a tensor was computed, ...
_WITHOUT_SHAPES: Final = frozenset(
    {
        *(_T.register_hook, _T.register_post_accumulate_grad_hook, _T.requires_grad_),
        *(_T.retain_grad, _T.cpu, _T.cuda, _T.pin_memory, _T.to, _T.type, _T.xpu),
    }
)
#: ... and the names of functions that read and write attributes.
SLOTS: Final = frozenset({"__get__", "__set__", "__delete__"})

#: How to run a call that is refused only if each refuses it. On ``meta``, PyTorch computes nothing,
#: but accepts less than on the CPU, at times; and zeros may be no values that the CPU accepts.
_WAYS: Final = (("meta", True), ("cpu", False), ("meta", False), ("cpu", True))


def error_of_pytorch(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Exception | None:
    """Return the error that PyTorch raises for a call; ``None`` if it raises none.

    Args:
        func: A function or method of PyTorch.
        args: What it is given; the values of tensors do not matter.
        kwargs: The same.
    """
    if func in _WITHOUT_SHAPES or getattr(func, "__name__", "") in SLOTS:
        return None
    error = None
    for device, widens in _WAYS:
        error = _error_on(device, func, args, kwargs, widens=widens)
        if error is None or isinstance(error, NotImplementedError) or "meta" in str(error).lower():
            return None
    return error


def raise_as_pytorch(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], refusal: Exception
) -> None:
    """Raise the error that PyTorch raises for a call that JAX or torchax refuses, if it does.

    Args:
        func: A function or method of PyTorch.
        args: What it was given; the values of tensors do not matter.
        kwargs: The same.
        refusal: One of `REFUSALS`.
    """
    if not isinstance(refusal, _OF_TRACING):
        error = _error_on("cpu", func, args, kwargs, widens=True)
        if error is not None:
            raise error from refusal


def _error_on(
    device: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, widens: bool
) -> Exception | None:
    """Return the error of a call with zeros in the place of tensors; ``None`` if there is none.

    The device holds in 32 bits what is int64 in PyTorch, which it demands of most indices, and what
    is int32, which it demands of pivots. If it ``widens``, both are int64.
    """
    tensors: list[torch.Tensor] = []
    structure = flatten((tuple(args), dict(kwargs)), tensors)
    with (
        torch._C.DisableTorchFunction(),
        _python_dispatch._disable_current_modes(),
        torch.random.fork_rng(devices=[], enabled=device == "cpu"),
    ):
        dtypes = [torch.int64 if widens and t.dtype == torch.int32 else t.dtype for t in tensors]
        zeros = [
            torch.zeros(t.shape, dtype=dtype, device=device)
            for t, dtype in zip(tensors, dtypes, strict=True)
        ]
        args, kwargs = unflatten(structure, iter(zeros))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": device}
        try:
            func(*args, **kwargs)
        except Exception as error:
            return error
    return None
