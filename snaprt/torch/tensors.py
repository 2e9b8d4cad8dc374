"""The tensor of snaprt: what PyTorch holds in place of a JAX array.

It is a subclass of `torch.Tensor` without memory of its own. Functions and methods of PyTorch that
are given one are run by `snaprt.torch.operations`, wherever they are called: no mode of PyTorch is
switched on, and other tensors are not affected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

from snaprt import jaxapi, metrics
from snaprt.errors import UsageError
from snaprt.torch.packs import Gradients, Pack
from snaprt.torch.structure import flatten
from snaprt.trace.array import counted_transfer

DTYPES: Final[dict[Any, torch.dtype]] = {
    np.dtype(name): dtype
    for name, dtype in {
        "bool": torch.bool,
        "int8": torch.int8,
        "int16": torch.int16,
        "int32": torch.int32,
        "int64": torch.int64,
        "uint8": torch.uint8,
        "uint16": torch.uint16,
        "uint32": torch.uint32,
        "uint64": torch.uint64,
        "float16": torch.float16,
        "float32": torch.float32,
        "float64": torch.float64,
        "complex64": torch.complex64,
        "complex128": torch.complex128,
        ml_dtypes.bfloat16: torch.bfloat16,
        ml_dtypes.float8_e4m3fn: torch.float8_e4m3fn,
        ml_dtypes.float8_e5m2: torch.float8_e5m2,
    }.items()
}
"""The dtypes of arrays that PyTorch has, too."""

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_NARROW: Final = {
    torch.int64: torch.int32,
    torch.uint64: torch.uint32,
    torch.float64: torch.float32,
    torch.complex128: torch.complex64,
}


def available(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that JAX has for ``dtype``: by default, it has none of 64 bits."""
    return dtype if jaxapi.x64_enabled() else _NARROW.get(dtype, dtype)


def jax_type(dtype: torch.dtype | None) -> Any:
    """Return the dtype of arrays for one of PyTorch's, and for its default one if it is None.

    Raises:
        UsageError: JAX has no such dtype, as of quantized numbers.
    """
    name = _NAMES.get(available(dtype or torch.get_default_dtype()))
    if name is None:
        raise UsageError(
            f"tensors of {dtype} are not available on this device",
            hint="use another dtype, or keep them on the CPU",
        )
    return name


# What NumPy has no type for travels as integers of the same size.
_AS_INTEGERS: Final = {
    torch.bfloat16: (torch.int16, np.dtype(ml_dtypes.bfloat16)),
    torch.float8_e4m3fn: (torch.int8, np.dtype(ml_dtypes.float8_e4m3fn)),
    torch.float8_e5m2: (torch.int8, np.dtype(ml_dtypes.float8_e5m2)),
}

_C: Any = torch._C
_NO_MEMORY: Final = torch.device("meta")

plainly = torch._C.DisableTorchFunction
"""The context in which attributes of tensors are read and set without asking `operations`.

Modes of PyTorch are not asked either: each would cost a call of Python for every attribute.
"""


class Box:
    """The array of a tensor, shared with those that PyTorch says share its memory.

    Attributes:
        array: The array: a `jax.Array`, a lazy array, or a tracer while a function is traced.
        writes: Counts the writes to this box.
        place: The pack that it is in, and the number of the part, for a `PackedBox`.
    """

    __slots__ = ("array", "place", "writes")

    array: Any
    place: tuple[Pack, int]
    writes: int

    def __init__(self, array: Any) -> None:
        self.array = array
        self.writes = 0
        if _familiar:
            boxes = _familiar.get(get_ident())
            if boxes is not None:
                boxes.add(id(self))

    @property
    def version(self) -> int:
        """Counts all writes."""
        return self.writes

    def write(self, array: Any) -> None:
        """Put another array of the same shape and dtype in the place of the present one."""
        self.array = array
        self.writes += 1


# The ids of the boxes that a thread may use while it traces a function of many tensors.
_familiar: dict[int, set[int]] = {}


@contextmanager
def refusing_others(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Raise a `UsageError` where a tensor is used that is not one of these or made meanwhile.

    What such a tensor has while a function is traced would be a constant of every later call.
    """
    thread = get_ident()
    before = _familiar.get(thread)
    _familiar[thread] = {id(tensor.box) for tensor in tensors}
    try:
        yield
    finally:
        if before is None:
            del _familiar[thread]
        else:
            _familiar[thread] = before


def _check_familiar(tensor: Tensor) -> None:
    boxes = _familiar.get(get_ident())
    if boxes is None or id(tensor.box) in boxes:
        return
    with plainly():
        name = tensor.label or f"{str(tensor.dtype)[6:]}{[*tensor.shape]}"
    raise UsageError(
        "a function compiled by snaprt.torch.jit uses a tensor that is not found among its "
        f"arguments and variables, nor in their modules and optimizers: {name}",
        hint="pass it, or its module, as an argument, or use it by a variable or an attribute",
    )


_ARRAY: Final[Any] = Box.__dict__["array"]


class PackedBox(Box):
    """A box whose array is a part of a pack, until another one is written to it."""

    __slots__ = ()

    @property
    def array(self) -> Any:
        """The part, which is an array of its own from here on."""
        pack, index = self.place
        return pack.parts()[index]

    @array.setter
    def array(self, array: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        pack, _ = self.place
        pack.is_broken = True
        self.writes += pack.writes
        self.__class__ = Box  # type: ignore[assignment]
        del self.place
        self.array = array

    @property
    def version(self) -> int:
        """Counts all writes: its own, and those to the pack."""
        return self.writes + self.place[0].writes


def rows_of(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[tuple[Pack, list[Tensor]]]]:
    """Return tensors with the packed arrays of a pack in the place of all its parts.

    Returns:
        The tensors, and each pack with those that hold its packed arrays.
    """
    found = whole_packs(tensors).items()
    whole = [pack for pack, parts in found if len(parts) == pack.layout.count]
    rows = [(pack, [Tensor(array) for array in pack.packed]) for pack in whole]
    rest = [t for t in tensors if type(t.box) is not PackedBox or t.box.place[0] not in whole]
    return [*[row for _, each in rows for row in each], *rest], rows


def put_in_pack(box: Box, pack: Pack, index: int) -> None:
    """Let a box have a part of a pack: that of this number. A pack that it leaves is broken."""
    if type(box) is PackedBox:
        box.place[0].is_broken = True
    box.writes = box.version
    box.__class__ = PackedBox
    _ARRAY.__set__(box, None)
    box.place = (pack, index)


def whole_packs(tensors: Sequence[Tensor]) -> dict[Pack, list[Tensor]]:
    """Return the packs all of whose parts are among the tensors, each with those that are."""
    members: dict[Pack, list[Tensor]] = {}
    for tensor in tensors:
        if type(tensor.box) is PackedBox and tensor.view_of is None:
            members.setdefault(tensor.box.place[0], []).append(tensor)
    return {
        pack: parts
        for pack, parts in members.items()
        if not pack.is_broken and len({p.box.place[1] for p in parts}) == pack.layout.count
    }


class Part(NamedTuple):
    """Which elements of a tensor a view of it shows, counted as PyTorch does in its memory."""

    offset: int
    strides: tuple[int, ...]
    shape: tuple[int, ...]
    is_contiguous: bool

    @classmethod
    def of(cls, place: torch.Tensor) -> Part:
        """Return which part a tensor without memory stands for."""
        return cls(
            int(place.storage_offset()),
            tuple(place.stride()),
            tuple(place.shape),
            place.is_contiguous(),
        )

    def read(self, array: Any) -> Any:
        """Return the part of an array."""
        if self._is_all_of(array):
            return array.reshape(self.shape)
        return array.reshape(-1)[self._indices()]

    def write(self, array: Any, values: Any) -> Any:
        """Return an array with other values in the part.

        Raises:
            UsageError: The part has an element more than once, as expanded tensors do.
        """
        if any(
            stride == 0 < size - 1 for stride, size in zip(self.strides, self.shape, strict=True)
        ):
            raise UsageError(
                "an in-place operation changes an expanded tensor, whose elements share memory",
                hint="clone it first: x.expand(2, 3).clone()",
            )
        if self._is_all_of(array):
            return values.reshape(array.shape)
        return array.reshape(-1).at[self._indices()].set(values).reshape(array.shape)

    def _is_all_of(self, array: Any) -> bool:
        return self.is_contiguous and math.prod(self.shape) == math.prod(array.shape)

    def _indices(self) -> Any:
        indices: Any = self.offset
        for axis, stride in enumerate(self.strides):
            indices = indices + stride * jax.lax.broadcasted_iota(jnp.int32, self.shape, axis)
        return indices


Locate = Callable[[], "torch.Tensor | None"]
"""Returns a tensor without memory at the place of a view in its base; None if it is a copy."""


class View:
    """What a view is a view of.

    Attributes:
        base: The tensor, which is no view itself.
        locate: Where the view lies in it, which is found out when it is needed: seldom.
        seen: The version of the base that the array of the view is of.
    """

    __slots__ = ("base", "locate", "seen")

    def __init__(self, base: Tensor, locate: Locate) -> None:
        self.base = base
        self.locate = locate
        self.seen = base.box.version

    def part(self) -> Part | None:
        """Return which part of the base the view shows; None if it is a copy."""
        place = self.locate()
        return None if place is None else Part.of(place)

    def detached(self) -> View:
        """Return the same view, whose writes autograd does not see and whose history it frees."""
        base = like(self.base, None)
        base.box = self.base.box
        view = View(base, self.locate)
        view.seen = self.seen
        return view


Handler = Callable[[Any, Any, Any], Any]
_handlers: list[Handler] = []


def handle_with(function: Handler, dispatch: Handler) -> None:
    """Run functions of PyTorch with ``function``, and what its C++ calls with ``dispatch``."""
    _handlers[:] = [function, dispatch]


_GRADIENT: Final[Any] = torch.Tensor.grad


class Tensor(torch.Tensor):
    """A `torch.Tensor` whose values are a JAX array, on the device ``jax``.

    Attributes:
        box: Where the array is.
        view_of: For a view, what it is a view of.
        label: The name of a parameter or buffer in its module.
        due: A gradient that backward has left for a leaf, until somebody asks for ``.grad``: an
            array, or several of several leaves.
    """

    box: Box
    view_of: View | None = None
    label: str | None = None
    due: Any = None

    @staticmethod
    def __new__(cls, array: Any, requires_grad: bool = False, box: Box | None = None) -> Tensor:
        """Make a tensor of an array, or of the box that it shares with another tensor."""
        dtype = DTYPES.get(array.dtype)
        if dtype is None:
            raise UsageError(
                f"PyTorch has no type for an array of {array.dtype}",
                hint="convert the array first: array.astype('float32')",
            )
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, array.shape, dtype=dtype, device=_NO_MEMORY, requires_grad=requires_grad
        )
        tensor.box = Box(array) if box is None else box
        return tensor

    def __init__(self, *_: Any, **__: Any) -> None:
        """Leave everything to ``__new__``."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Say that `nn.Module.to` has to swap parameters: their memory cannot be replaced."""
        raise UsageError(
            "torch.compile and torch.export do not support tensors on the device jax",
            hint="use snaprt.torch.wrap or snaprt.torch.jit; to find tensors that share memory, "
            "move them to the CPU first",
        )

    @staticmethod
    def __tensor_unflatten__(*_: Any) -> Tensor:
        """Never called, but looked for with `__tensor_flatten__`."""
        raise UsageError("tensors on the device jax cannot be rebuilt from their parts")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _handlers[0](func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _handlers[1](func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device ``jax``."""
        return DEVICE

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient, which becomes a tensor when it is asked for: most are only used up."""
        with plainly():
            present: Any = _GRADIENT.__get__(self)
            if self.due is not None:
                due, self.due = self.due, None
                if present is None:
                    present = _gradient_like(self, due)
                    _GRADIENT.__set__(self, present)
                else:  # PyTorch has put one there since
                    write(present, array_of(present) + _array_due(self, due))
            return present

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        self.due = None
        with plainly():
            _GRADIENT.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        forget_gradients([self])

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """False: the tensor has values."""
        return False

    def read(self) -> np.ndarray:
        """Return the values as a NumPy array of their own; this ends a lazy graph."""
        return np.array(array_of(self))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with plainly():
            text = repr(to_cpu(self))
            if self.grad_fn is not None:
                return f"{text[:-1]}, device='{DEVICE}', grad_fn=<{type(self.grad_fn).__name__}>)"
            flag = ", requires_grad=True" if self.requires_grad else ""
            return f"{text[:-1]}, device='{DEVICE}'{flag})"

    def __str__(self) -> str:
        return repr(self)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.ndim == 0 else object.__format__(self, spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a tensor of the CPU, which plain PyTorch can load."""
        return _plain_copy(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) in memo:
            return memo[id(self)]
        with plainly():
            if not self.is_leaf:
                raise RuntimeError(
                    "Only Tensors created explicitly by the user (graph leaves) support the "
                    "deepcopy protocol at the moment"
                )
            copy = Tensor(array_of(self), self.requires_grad)
            copy.label = self.label
            if isinstance(self, torch.nn.Parameter):
                copy._is_param = True
            if self.grad is not None:
                copy.grad = self.grad.__deepcopy__(memo)
        memo[id(self)] = copy
        return copy


def gradients_of(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Return ``.grad`` of each tensor."""
    for tensor in tensors:
        if tensor.due is not None:
            tensor.grad  # noqa: B018
    with plainly():
        return [*map(_GRADIENT.__get__, tensors)]


def forget_gradients(tensors: Sequence[Tensor]) -> None:
    """Set ``.grad`` of each tensor to None."""
    with plainly():
        for tensor in tensors:
            tensor.due = None
            if _GRADIENT.__get__(tensor) is not None:
                _GRADIENT.__set__(tensor, None)


def _gradient_like(leaf: Tensor, due: Any) -> Tensor:
    if type(due) is not Gradients:
        return like(leaf, due)
    gradient = like(leaf, None)
    put_in_pack(gradient.box, due, due.leaves.position(leaf))
    return gradient


def gradients_due(tensors: Sequence[Tensor]) -> list[Any]:
    """Return the array of each tensor's gradient, or the `Gradients` that it is in, or None."""
    with plainly():
        present: list[Any] = [*map(_GRADIENT.__get__, tensors)]
    if {*map(type, present)} <= {type(None)}:
        return [tensor.due for tensor in tensors]
    pairs = zip(tensors, gradients_of(tensors), strict=True)
    return [None if g is None else _due_in(tensor, g) for tensor, g in pairs]


def _due_in(leaf: Tensor, gradient: Tensor) -> Any:
    if type(gradient.box) is PackedBox and gradient.view_of is None:
        pack, index = gradient.box.place
        if type(pack) is Gradients and pack.leaves.find(leaf) == index:
            return pack
    return array_of(gradient)


def arrays_of_gradients(tensors: Sequence[Tensor]) -> list[Any]:
    """Return the array of each tensor's gradient, or None; no tensors are made."""
    return [*map(_array_due, tensors, gradients_due(tensors))]


def _array_due(leaf: Tensor, due: Any) -> Any:
    return due.of(leaf) if type(due) is Gradients else due


def has_tracer(value: Any) -> bool:
    """Return whether a value is or contains a tensor of a trace: those of torchax always are."""
    tensors: list[torch.Tensor] = []
    try:
        flatten(value, tensors)
    except UsageError:
        return False
    with plainly():
        return any(
            isinstance(t.box.array, jaxapi.Tracer) if type(t) is Tensor else hasattr(t, "_elem")
            for t in tensors
        )


def array_of(tensor: Tensor) -> Any:
    """Return the array of a tensor."""
    if _familiar:
        _check_familiar(tensor)
    if tensor.view_of is not None:
        read_again(tensor)
    return tensor.box.array


def read_again(tensor: Tensor) -> None:
    """Let a view show what its base has there now, with the gradient of that.

    Raises:
        UsageError: The base was written to, and it is not known what the view shows.
    """
    view = tensor.view_of
    if view is None or view.seen == view.base.box.version:
        return
    tensor.view_of, part = None, view.part()
    if part is None:
        return
    with plainly():
        has_gradient = tensor.grad_fn is not None or view.base.requires_grad
    if has_gradient:
        with torch.enable_grad():
            _handlers[0](_read_part, (tensor, view.base, tuple(part)), {})
    else:
        tensor.box.array = part.read(view.base.box.array)
    view.seen = view.base.box.version
    tensor.view_of = view


def _read_part(tensor: Any, base: Any, part: Any) -> None:
    tensor._elem = Part(*part).read(base.jax())


def write(tensor: Tensor, array: Any) -> None:
    """Put another array of the same shape and dtype in the place of a tensor's.

    Raises:
        UsageError: It is a view, of which is not known what it shows.
    """
    if _familiar:
        _check_familiar(tensor)
    tensor.box.write(array)
    write_back(tensor)


def write_all(tensors: Iterable[Tensor], arrays: Iterable[Any]) -> None:
    """Put other arrays in the place of those of many tensors; autograd does not see it."""
    for tensor, array in zip(tensors, arrays, strict=True):
        box = tensor.box
        box.array = array
        box.writes += 1
        if tensor.view_of is not None:
            with torch.no_grad():
                write_back(tensor)


def write_back(tensor: Tensor) -> None:
    """Write to the base of a view, if this is one, what was written to the view itself.

    Raises:
        RuntimeError: The base is a leaf that gradients are computed for.
        UsageError: It is not known what the view shows, or it shows an element more than once.
    """
    view = tensor.view_of
    if view is None:
        return
    part = view.part()
    if part is None:
        tensor.view_of = None
        return
    base = view.base
    with plainly():
        if base.requires_grad and base.is_leaf and torch.is_grad_enabled():
            raise RuntimeError(
                "a view of a leaf Variable that requires grad is being used in an in-place "
                "operation."
            )
    view.seen = base.box.version  # what was written is newer
    _handlers[0](_put_part, (base, tensor, tuple(part)), {})
    view.seen = base.box.version


def _put_part(base: Any, values: Any, part: Any) -> None:
    base._elem = Part(*part).write(base.jax(), values.jax())


def like(tensor: Tensor, array: Any) -> Tensor:
    """Return an array of the shape and dtype of a tensor as a tensor; attributes are not asked."""
    result = torch.Tensor._make_wrapper_subclass(
        Tensor, tensor.shape, dtype=tensor.dtype, device=_NO_MEMORY
    )
    result.box = Box(array)
    return result


def scalar(value: float) -> Tensor:
    """Return a number as a tensor that gives way to the dtypes of others, as numbers do."""
    tensor = torch.Tensor._make_wrapper_subclass(Tensor, (), dtype=torch.float32, device=_NO_MEMORY)
    tensor.box = Box(value)
    return tensor


def in_transit(array: Any, device: torch.device) -> Tensor:
    """Return a tensor that C++ takes for one with memory on the device, and copies to."""
    tensor = torch.Tensor._make_wrapper_subclass(
        Tensor, array.shape, dtype=DTYPES[array.dtype], device=device
    )
    tensor.box = Box(array)
    return tensor


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """Return the array of a tensor on the device ``jax``; nothing is copied.

    Inside `snaprt.torch.lazy`, it may be a lazy array. Gradients do not flow through.

    Raises:
        UsageError: The tensor is on another device.
    """
    if not isinstance(tensor, Tensor):
        raise UsageError(
            f"snaprt.torch.to_jax needs a tensor on {DEVICE}, not on {tensor.device}",
            hint="move it first: tensor.to(snaprt.torch.device())",
        )
    return array_of(tensor)


def to_torch(array: jax.Array) -> torch.Tensor:
    """Return an array as a tensor on the device ``jax``; nothing is copied.

    Raises:
        UsageError: It is not a JAX array, or PyTorch has no such dtype.
    """
    if not isinstance(array, jax.Array):
        raise UsageError(
            f"snaprt.torch.to_torch needs a jax.Array, not {type(array).__name__}",
            hint="use torch.as_tensor for NumPy arrays and numbers",
        )
    return Tensor(array)


def host_values(tensor: torch.Tensor) -> np.ndarray:
    """Return the values of a tensor of the CPU as a NumPy array of their own."""
    plain = tensor.detach()
    if plain.device.type != "cpu":
        plain = plain.cpu()
    if plain.is_sparse or plain.is_quantized:
        raise UsageError(
            "sparse and quantized tensors cannot be moved to the device jax",
            hint="call .to_dense() or .dequantize() first",
        )
    plain = plain.resolve_conj().resolve_neg().contiguous()
    if plain.dtype in _AS_INTEGERS:
        integers, dtype = _AS_INTEGERS[plain.dtype]
        return plain.view(integers).numpy().copy().view(dtype)
    return plain.numpy().copy()


def constant_of(tensor: torch.Tensor) -> jax.Array:
    """Return the values of a tensor of the CPU, where a function is traced that uses it.

    Raises:
        UsageError: It is a tensor of ours, whose values may change.
    """
    refuse_constants([tensor])
    with jaxapi.evaluating():  # masks may decide about shapes
        return jnp.asarray(host_values(tensor))


def refuse_constants(tensors: Iterable[torch.Tensor]) -> None:
    """Raise an error for tensors of ours that a traced function uses as constants."""
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            raise ConstantError(tensor)


class ConstantError(UsageError):
    """A traced function uses a tensor of ours that it knows nothing of."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(
            "a wrapped function uses a tensor that is not an argument, parameter or buffer of "
            f"its module: {tensor.dtype}{list(tensor.shape)}",
            hint="pass it as an argument, or register it: module.register_buffer(name, tensor)",
        )
        self.tensor = tensor


def refuse_transform(tensor: torch.Tensor) -> None:
    """Raise an error for a tensor that a transform of `torch.func` has made."""
    if _C._functorch.is_functorch_wrapped_tensor(tensor):
        raise UsageError(
            "transforms of torch.func (vmap, grad, jacrev) do not apply to tensors on the device",
            hint="use torch.autograd.grad and torch.autograd.functional, or write the function "
            "in JAX",
        )


def to_device(tensor: torch.Tensor) -> Tensor:
    """Return a copy of a tensor of the CPU on the device ``jax``; 64-bit types become 32-bit ones.

    The copy is counted as ``torch::moved_to_device``. Gradients do not flow through.
    """
    refuse_transform(tensor)
    metrics.counter_add("torch::moved_to_device")
    values = host_values(tensor)
    with jaxapi.evaluating():
        return Tensor(counted_transfer(lambda: [jaxapi.to_device(values)])[0])


def from_host(values: np.ndarray) -> torch.Tensor:
    """Return a tensor of the CPU with the values of a NumPy array, whose memory it takes."""
    for name, (_, dtype) in _AS_INTEGERS.items():
        if values.dtype == dtype:
            return torch.from_numpy(values.view(f"i{values.itemsize}")).view(name)
    return torch.from_numpy(values)


def to_cpu(tensor: Tensor) -> torch.Tensor:
    """Return a copy of a tensor on the CPU; this ends a lazy graph. Gradients do not flow."""
    return from_host(tensor.read())


def _plain_copy(tensor: Tensor) -> torch.Tensor:
    with plainly():
        plain = to_cpu(tensor)
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(plain, tensor.requires_grad)
        return plain.requires_grad_(tensor.requires_grad and tensor.is_leaf)


DEVICE: torch.device
"""The device of tensors whose values are JAX arrays."""


def set_device(name: str) -> None:
    """Name the device, once PyTorch knows it."""
    global DEVICE
    DEVICE = torch.device(name, 0)
