"""Functions of PyTorch over lists of tensors: `torch._foreach_*`, and those of a gradient scaler.

They are written with functions of one tensor, which become one program where they are traced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from snaprt.torch import tensors

_C: Any = torch._C
_FUNCTIONS: Any = _C._VariableFunctions
_PREFIX: Final = "_foreach_"


def _for_each(base: str) -> Callable[..., Any]:
    """Return a function of lists that calls the method ``base`` with the items of each place."""
    name = base.removesuffix("_")
    method: Any = torch.linalg.vector_norm if name == "norm" else getattr(torch.Tensor, name, None)
    factor = {"addcmul": "value", "addcdiv": "value"}.get(name)

    def results(given: Sequence[Any], args: Any, kwargs: Any) -> Iterator[Any]:
        for index, tensor in enumerate(given):
            row = [a[index] if isinstance(a, list | tuple) else a for a in args]
            named = {factor: row.pop()} if factor and len(row) == 3 else {}  # PyTorch takes it so
            yield method(tensor, *row, **named, **kwargs)

    def call(given: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
        return [*results(given, args, kwargs)]

    def write(given: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        # One after the other: a tensor may be there twice.
        for tensor, result in zip(given, results(given, args, kwargs), strict=True):
            tensor.copy_(result)

    return write if base.endswith("_") else call


def _copy(given: Sequence[Any], sources: Sequence[Any], non_blocking: bool = False) -> None:
    for tensor, source in zip(given, sources, strict=True):
        tensor.copy_(source)


def _zero(given: Sequence[Any]) -> None:
    for tensor in given:
        tensor.zero_()


def _unscale(gradients: Sequence[Any], found_inf: Any, inverse_scale: Any) -> None:
    """Multiply gradients, and set ``found_inf`` to 1 if one is not finite."""
    for gradient in gradients:
        is_bad = torch.logical_not(torch.isfinite(gradient)).any()
        found_inf.copy_(torch.maximum(found_inf, is_bad.to(found_inf.dtype)))
        gradient.copy_(gradient * inverse_scale.to(gradient.dtype))


def _update_scale(
    scale: Any,
    growth_tracker: Any,
    found_inf: Any,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> Any:
    """Make a scale smaller after an infinite gradient, and larger after many that were finite."""
    is_bad = found_inf > 0
    steps = growth_tracker + 1
    is_due = steps >= growth_interval
    grown = scale * growth_factor
    larger = torch.where(torch.logical_and(is_due, torch.isfinite(grown)), grown, scale)
    starts_anew = torch.logical_or(is_bad, is_due)
    growth_tracker.copy_(torch.where(starts_anew, torch.zeros_like(steps), steps))
    return scale.copy_(torch.where(is_bad, scale * backoff_factor, larger))


OF_LISTS: Final[dict[Any, Callable[..., Any]]] = {
    **{
        getattr(_FUNCTIONS, name): _for_each(name.removeprefix(_PREFIX))
        for name in dir(_FUNCTIONS)
        if name.startswith(_PREFIX)
    },
    _FUNCTIONS._foreach_copy_: _copy,
    _FUNCTIONS._foreach_zero_: _zero,
    _FUNCTIONS._amp_foreach_non_finite_check_and_unscale_: _unscale,
    _FUNCTIONS._amp_update_scale_: _update_scale,
}
"""How each is called on tensors of torchax, which does not know them."""


@functools.cache
def group_by_device() -> None:
    """Let PyTorch group tensors of ours under their own device, not that of C++, from here on."""
    group = _C._group_tensors_by_device_and_dtype

    @functools.wraps(group)
    def group_tensors(*args: Any, **kwargs: Any) -> Any:
        return {
            (tensors.DEVICE if _is_ours(lists) else device, dtype): (lists, indices)
            for (device, dtype), (lists, indices) in group(*args, **kwargs).items()
        }

    _C._group_tensors_by_device_and_dtype = group_tensors


def _is_ours(lists: Sequence[Sequence[Any]]) -> bool:
    return any(isinstance(tensor, tensors.Tensor) for given in lists for tensor in given[:1])
