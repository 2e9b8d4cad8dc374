"""Numbers that are known while a function is traced: `torch.tensor(5)`, and what comes of it.

Tensors of a trace have no values. Sizes and bounds of slices that a model computes with tensors of
one number are computed by PyTorch on the CPU besides, as long as nothing else goes into them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

_T = torch.Tensor
READERS: Final = frozenset(
    {_T.item, _T.__bool__, _T.__int__, _T.__float__, _T.__index__, _T.__complex__}
)
"""The methods that return the value of a tensor of one number."""


_CONSTRUCTORS: Final = frozenset({torch.tensor, torch.as_tensor, torch.scalar_tensor})
_NAMES: Final = (
    *("abs", "add", "ceil", "clamp", "clamp_max", "clamp_min", "clone", "detach", "div", "double"),
    *("eq", "exp", "float", "floor", "floordiv", "floor_divide", "ge", "gt", "int", "le", "log"),
    *("log2", "logical_and", "logical_not", "logical_or", "long", "lt", "max", "maximum", "min"),
    *("minimum", "mod", "mul", "multiply", "ne", "neg", "pow", "remainder", "round", "rsqrt"),
    *("sqrt", "square", "sub", "subtract", "to", "true_divide", "truediv", "trunc"),
)
_COMPUTED: Final = _CONSTRUCTORS | {
    getattr(place, name)
    for base in _NAMES
    for name in (base, f"{base}_", f"__{base}__", f"__r{base}__", f"__i{base}__")
    for place in (torch, _T)
    if hasattr(place, name)
}
"""What is computed of numbers: nothing random, and nothing that asks for memory."""

Call = tuple[Sequence[Any], dict[str, Any]]


def call_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
    """Return the arguments of a call on the CPU; None if they are not known numbers alone."""
    if func not in _COMPUTED:
        return None
    given = [*args, *kwargs.values()]
    if func in _CONSTRUCTORS:
        is_known = isinstance(next(iter(given), None), int | float)
    else:
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        is_known = bool(tensors) and all(known(tensor) is not None for tensor in tensors)
    if not is_known or any(isinstance(value, list | tuple) for value in given):
        return None
    options = {name: _copied(value) for name, value in kwargs.items() if name != "device"}
    return [*map(_copied, args)], options


def note(func: Any, call: Call, result: Any) -> None:
    """Note the value of what a function has returned for known numbers."""
    if not hasattr(result, "jax") or result.ndim:
        return
    try:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            value = func(*call[0], **call[1])
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        vars(result)["_snaprt_number"] = (result._elem, value)


def _copied(value: Any) -> Any:
    number = known(value)
    return value if number is None else number.clone()


def known(tensor: Any) -> torch.Tensor | None:
    """Return the value of a tensor of torchax on the CPU; None if it is not known."""
    array, value = getattr(tensor, "__dict__", {}).get("_snaprt_number", (None, None))
    return value if value is not None and tensor._elem is array else None


def with_bounds(part: Any) -> Any:
    """Return a slice with numbers in the place of tensors, and all else as it is."""
    if not isinstance(part, slice):
        return part
    bounds = (part.start, part.stop, part.step)
    if not any(isinstance(bound, torch.Tensor) for bound in bounds):
        return part
    return slice(*[None if bound is None else operator.index(_copied(bound)) for bound in bounds])
