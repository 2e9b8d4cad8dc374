"""Tensors that show part of another one: what is written to one of them is written to both.

torchax makes copies, from which writes would not come back, or slices that some writes leave
alone. Where a view lies in the memory of its base is found out by PyTorch, on tensors without
memory. A detached tensor is a base of its own for its views, as it is for autograd.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from snaprt.errors import UsageError
from snaprt.torch.lowering import versions
from snaprt.torch.lowering.numbers import with_bounds
from snaprt.torch.lowering.slopes import straight_through
from snaprt.torch.tensors import DTYPES, Part, Tensor, View, constant_of
from snaprt.trace.array import send

_T = torch.Tensor

_NAMES: Final = (
    *("chunk", "diagonal", "expand", "expand_as", "flatten", "movedim", "moveaxis", "narrow"),
    *("permute", "ravel", "reshape", "reshape_as", "select", "split", "squeeze", "swapaxes"),
    *("swapdims", "t", "tensor_split", "transpose", "unbind", "unflatten", "unfold", "unsqueeze"),
    *("view", "view_as", "split_with_sizes", "hsplit", "vsplit", "dsplit", "adjoint"),
)
VIEWS: Final = frozenset(
    getattr(place, name) for name in _NAMES for place in (torch, _T) if hasattr(place, name)
)
"""The functions whose results show the memory of their first argument, if they can."""

_DETACH: Final = frozenset({torch.detach, _T.detach})
_ATTRIBUTES: Final = frozenset({"T", "mT", "H", "mH"})
_LISTS: Final = (list, tuple, range, np.ndarray)  # in an index, of numbers or flags


class _View:
    """Where a tensor of torchax lies in its base.

    Args:
        base: A tensor that is no view itself, or a detached one.
        place: A tensor without memory, of the shape of the view, at its place in the base.
        is_detached: Whether gradients do not flow from one to the other.
    """

    __slots__ = ("base", "is_detached", "place", "seen")

    def __init__(self, base: Any, place: torch.Tensor, *, is_detached: bool) -> None:
        self.base = base
        self.place = place
        self.is_detached = is_detached
        self.seen = base._elem  # what the view was last computed of

    def read(self) -> Any:
        """Return the values of the view as the base has them now."""
        self.seen = self.base._elem
        return Part.of(self.place).read(self.seen)

    def write(self, values: Any) -> None:
        """Write values of the shape of the view to the base."""
        before = self.base._elem
        after = Part.of(self.place).write(before, values)
        self.base._elem = unseen_by_autograd(before, after) if self.is_detached else after
        self.seen = self.base._elem


def unseen_by_autograd(old: Any, new: Any) -> Any:
    """Return the new values with the gradient of the old: a write that autograd does not see."""
    is_same_kind = old.shape == new.shape and old.dtype == new.dtype
    if not is_same_kind or not jnp.issubdtype(old.dtype, jnp.inexact):
        return jax.lax.stop_gradient(new)
    return straight_through(old, jax.lax.stop_gradient(new))


def _read(tensor: Any) -> Any:
    values = vars(tensor)
    view = values.get("_snaprt_view")
    if view is not None and view.base._elem is not view.seen:
        new = view.read()
        is_detached = view.is_detached
        values["_elem"] = unseen_by_autograd(values["_elem"], new) if is_detached else new
    return values["_elem"]


def _write(tensor: Any, array: Any) -> None:
    values = vars(tensor)
    values["_elem"] = array
    view = values.get("_snaprt_view")
    if view is None:
        return
    if tuple(array.shape) == tuple(view.place.shape) and array.dtype == view.seen.dtype:
        view.write(array)
    else:
        raise UsageError(
            "an in-place operation changes the shape or dtype of a view",
            hint="use the function that returns a new tensor, such as x.unsqueeze(0) for "
            "x.unsqueeze_(0)",
        )


@functools.cache
def watch_views() -> None:
    """Let tensors of torchax be views, from here on."""
    kind: Any = versions.torchax().tensor.Tensor
    kind._elem = property(_read, _write)
    kind.data = property(lambda tensor: tensor.detach(), _set_data)
    set_item = kind.__setitem__

    def set_part(tensor: Any, index: Any, value: Any) -> None:
        set_item(tensor, _of_trace(as_index(index, tensor.shape)), _of_trace(value))

    kind.__setitem__ = set_part
    kind.__deepcopy__ = lambda tensor, _: tensor.clone()
    kind.__format__ = lambda tensor, _: str(tensor)  # there is no value to format
    for name in ("flatten", "detach"):  # methods that no mode of PyTorch is asked about
        setattr(kind, name, _noted(getattr(kind, name), getattr(_T, name)))


def _of_trace(value: Any) -> Any:
    """Return an index or a value with constants in the place of tensors of the CPU."""
    if type(value) is tuple:
        return tuple([_of_trace(item) for item in value])
    is_other = isinstance(value, torch.Tensor) and not hasattr(value, "jax")
    return constant_of(value) if is_other else value


def _set_data(tensor: Any, other: Any) -> None:
    tensor._elem = unseen_by_autograd(tensor._elem, other.jax())


def _noted(method: Callable[..., Any], func: Any) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(tensor, *args, **kwargs)
        note_views(func, (tensor, *args), kwargs, result)
        return result

    return call


def note_views(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
    """Note whether results of a function, on tensors of torchax, show the memory of its first."""
    is_detached = func in _DETACH
    if not (is_detached or func in VIEWS or func is _T.__getitem__ or _is_attribute(func)):
        return
    base, place, was_detached = _place_of(args[0])
    if place is None or (func is _T.__getitem__ and takes_copy(args[1])):
        return
    places = places_of(func, place, args[1:], kwargs)
    results = result if isinstance(result, tuple | list) else (result,)
    for tensor, at in zip(results, places, strict=True) if places else ():
        if tensor is args[0] or at is None:
            continue
        view = _View(base, at, is_detached=is_detached or was_detached)
        vars(tensor)["_snaprt_view"] = view


def places_of(
    func: Any, place: torch.Tensor, rest: Sequence[Any], kwargs: dict[str, Any]
) -> list[torch.Tensor | None] | None:
    """Return where the results of a function lie in the memory of its first argument.

    Args:
        func: A function of PyTorch.
        place: A tensor without memory in the place of its first argument.
        rest: Its other arguments.
        kwargs: Its keyword arguments.

    Returns:
        A tensor without memory for each result, None for one that is a copy; None where the
        elements are others, such as their real parts, or PyTorch cannot tell.
    """
    try:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            shown = func(place, *map(_without_memory, rest), **kwargs)
    except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError):
        return None
    results = shown if isinstance(shown, tuple | list) else (shown,)
    if any(at.dtype != place.dtype or at.is_conj() for at in results):
        return None
    return [at if _is_in(at, place) else None for at in results]


def mark_views(
    func: Any, base: Tensor, kind: Any, rest: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> None:
    """Note, outside of what is traced, that results of a function are views of its first argument.

    Args:
        func: A function of PyTorch.
        base: Its first argument.
        kind: What has its shape and dtype.
        rest: The other arguments.
        kwargs: The keyword arguments.
        result: What it returned.
    """
    shown = base.view_of
    if shown is not None and _is_copy(shown):
        shown = base.view_of = None
    root = base if shown is None else shown.base
    before = functools.partial(_meta, kind) if shown is None else shown.locate
    rest = [*map(_without_memory, rest)]  # a view must not keep the history of others

    @functools.cache
    def places() -> list[torch.Tensor | None]:
        place = before()
        located = None if place is None else places_of(func, place, rest, kwargs)
        if located is None:
            raise UsageError(
                "a view and its tensor do not share memory on this device, and one of them was "
                "changed in place: so it is with the real and imaginary parts of complex numbers",
                hint="take the view again after the change, or copy it: x.real.clone()",
            )
        return located

    results = result if isinstance(result, tuple | list) else (result,)
    is_detached = not torch.is_grad_enabled()
    for index, tensor in enumerate(results):
        if tensor is not base:
            view = View(root, functools.partial(_at, places, index))
            tensor.view_of = view.detached() if is_detached else view


def _is_copy(view: View) -> bool:
    try:
        return view.locate() is None
    except UsageError:
        return False


def _at(places: Callable[[], list[torch.Tensor | None]], index: int) -> torch.Tensor | None:
    return places()[index]


def as_index(index: Any, shape: Sequence[int]) -> Any:
    """Return an index with lists of numbers in a tuple, and with numbers as bounds of slices.

    Raises:
        IndexError: A number is out of bounds, for which JAX takes the nearest that is not.
    """
    parts = index if type(index) is tuple else (index,)
    if type(index) is list and any(_is_part(item) for item in index):
        index = parts = tuple(index)
    elif any(isinstance(part, (*_LISTS, slice)) for part in parts):
        index = parts = tuple([with_bounds(_as_list(part)) for part in parts])
    widths = [*map(_axes_of, parts)]
    axis = 0
    for part, width in zip(parts, widths, strict=True):
        if part is ...:
            axis += len(shape) - sum(widths)
            continue
        for number in _numbers_in(part) if axis < len(shape) else ():
            if not -shape[axis] <= number < shape[axis]:
                raise IndexError(
                    f"index {number} is out of bounds for dimension {axis} with size {shape[axis]}"
                )
        axis += width
    return index


def _axes_of(part: Any) -> int:
    """Return how many axes of a tensor a part of an index stands for."""
    if part is None or part is ... or isinstance(part, bool):
        return 0
    flags = isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8)
    return part.ndim if flags else 1


def _numbers_in(part: Any) -> list[int]:
    if isinstance(part, int | np.integer) and not isinstance(part, bool):
        return [int(part)]
    if type(part) is list:
        return [number for each in part for number in _numbers_in(each)]
    return []


def _as_list(part: Any) -> Any:
    if isinstance(part, np.ndarray):
        return part.tolist()
    return [*part] if isinstance(part, tuple | range) else part


def slice_of(tensor: Any, index: Any) -> Any:
    """Return a part of a tensor of torchax by an index that takes a view."""
    result = versions.torchax().tensor.Tensor(tensor.jax()[index], tensor._env)
    note_views(_T.__getitem__, (tensor, index), {}, result)
    return result


_MAX_FIXED: Final = 8
_fixed: dict[Any, set[tuple[int, ...]]] = {}  # the starts that have been part of a program


def moving_part(tensor: torch.Tensor, index: Any) -> tuple[Any, ...] | None:
    """Return the arguments of `part_at` for an index that moves, as one of batches does in a loop.

    A program of its own for each start is faster, while there are few.

    Returns:
        The arguments; None for any other index.
    """
    parts = index if type(index) is tuple else (index,)
    shape = tensor.box.array.shape if isinstance(tensor, Tensor) else ()
    if len(parts) > len(shape):
        return None
    starts, sizes, kept = [0] * len(shape), [*shape], [True] * len(shape)
    for axis, part in enumerate(parts):
        if type(part) is int and -shape[axis] <= part < shape[axis]:
            starts[axis], sizes[axis], kept[axis] = part % shape[axis], 1, False
        elif type(part) is slice and {*map(type, (part.start, part.stop))} <= {int, NoneType}:
            first, end, step = part.indices(shape[axis]) if part.step in (None, 1) else (0, 0, 0)
            if step != 1 or end <= first:
                return None
            starts[axis], sizes[axis] = first, end - first
        else:
            return None
    if len(_fixed) > _MAX_FIXED * 128:
        _fixed.clear()
    fixed = _fixed.setdefault((shape, *sizes, *kept), set())
    if len(fixed) < _MAX_FIXED:
        fixed.add((*starts,))
    if (*starts,) in fixed:
        return None
    return tensor, (*sizes,), (*kept,), Tensor(send(np.array(starts, np.int32)))


def part_at(tensor: Any, sizes: Sequence[int], kept: Sequence[bool], starts: Any) -> Any:
    """Return a part of a tensor of torchax that begins where a tensor says.

    Args:
        tensor: The tensor.
        sizes: Of the part, along each axis.
        kept: Which axes the result has; others have the size 1.
        starts: An int32 vector, one for each axis.
    """
    part = jax.lax.dynamic_slice(tensor.jax(), [*starts.jax()], sizes)
    shape = [size for size, is_kept in zip(sizes, kept, strict=True) if is_kept]
    return versions.torchax().tensor.Tensor(part.reshape(shape), tensor._env)


def takes_copy(index: Any) -> bool:
    """Return whether an index takes a copy, as one with lists or tensors does, and not a view."""
    parts = index if type(index) is tuple else (index,)
    return any(isinstance(part, (*_LISTS, bool, torch.Tensor)) for part in parts)


def _is_part(item: Any) -> bool:
    return item is None or item is ... or isinstance(item, torch.Tensor | slice)


def contiguous(tensor: Any, **_: Any) -> Any:
    """Return a tensor, or a copy of a view that PyTorch would copy."""
    place = _place_of(tensor)[1]
    return tensor if place is None or place.is_contiguous() else tensor.clone()


def _is_attribute(func: Any) -> bool:
    is_getter = getattr(func, "__name__", "") == "__get__"
    return is_getter and getattr(func.__self__, "__name__", "") in _ATTRIBUTES


def _place_of(tensor: Any) -> tuple[Any, torch.Tensor | None, bool]:
    """Return the base of a tensor, its place in it, and whether gradients do not flow there."""
    if not hasattr(tensor, "jax"):
        return None, None, False
    view = vars(tensor).get("_snaprt_view")
    if view is None or (view.is_detached and view.place.is_contiguous()):
        return tensor, _without_memory(tensor), False
    return view.base, view.place, view.is_detached


def _without_memory(value: Any) -> Any:
    if not hasattr(value, "jax") and not isinstance(value, Tensor):
        return value
    return _meta(value.box.array if isinstance(value, Tensor) else value.jax())


def _meta(kind: Any) -> torch.Tensor:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return torch.empty(tuple(kind.shape), dtype=DTYPES[kind.dtype], device="meta")


def _is_in(view: torch.Tensor, base: torch.Tensor) -> bool:
    return view.untyped_storage()._cdata == base.untyped_storage()._cdata
