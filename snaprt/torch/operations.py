"""Functions and methods of PyTorch that are called with tensors on the device ``jax``.

Each runs as a traced function of its own, with its gradient. Outside of PyTorch's autograd, what
its C++ calls comes here, too.
"""

from __future__ import annotations

import inspect
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
import torch
from torch.nn import functional, init

from snaprt.errors import UsageError
from snaprt.torch.lowering.device_names import means_ours
from snaprt.torch.lowering.errors import REFUSALS, SLOTS, raise_as_pytorch
from snaprt.torch.lowering.operators import CONSTANTS
from snaprt.torch.lowering.views import VIEWS, mark_views, moving_part, part_at, takes_copy
from snaprt.torch.structure import by_position
from snaprt.torch.tensors import (
    DTYPES,
    Tensor,
    array_of,
    available,
    host_values,
    in_transit,
    jax_type,
    plainly,
    refuse_constants,
    scalar,
    to_cpu,
    write,
)
from snaprt.torch.traced import (
    NO_STATE,
    Traced,
    arguments_of,
    autocast_type,
    drawing_by,
    is_tracing,
    on_device,
)

_MAX_TRACES: Final = 4096
_traces: dict[Any, Traced] = {}

_T = torch.Tensor
_C: Any = torch._C

# Functions that only ask or set what is known of a tensor, or that call others that come here.
_PLAIN_NAMES: Final = (
    *("__hash__", "__len__", "__dir__", "__reduce__", "__setstate__", "__get__", "__set__"),
    *("backward", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_"),
    *("retain_grad", "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size"),
    *("is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_inference", "is_pinned"),
    *("storage_offset", "get_device", "is_set_to", "is_same_size", "data_ptr", "sym_numel"),
    *("is_conj", "is_neg", "dim_order", "_is_view", "unsafe_chunk", "has_names", "is_shared"),
)
_ASKING: Final[tuple[Any, ...]] = (
    *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor),
    *(torch.is_same_size, torch.result_type, torch.is_conj, torch.is_neg, torch.is_inference),
    *(torch.autograd.backward, torch.autograd.grad),
)
# They write to parameters under `torch.no_grad`, which a function that is traced cannot.
_INITS: Final = [
    value for name, value in vars(init).items() if name.endswith("_") and callable(value)
]
# They give the tensors to a process group.
_COLLECTIVES: Final = [
    value for value in vars(torch.distributed).values() if type(value) is types.FunctionType
]
_PLAIN: Final = frozenset(
    [
        *_ASKING,
        *_INITS,
        *_COLLECTIVES,
        *[getattr(_T, name) for name in _PLAIN_NAMES if hasattr(_T, name)],
    ]
)

# Numbers in these calls may change from step to step without a new program.
_ARITHMETIC: Final = frozenset(
    getattr(place, name)
    for place in (torch, _T)
    for base in ("add", "sub", "mul", "div", "true_divide", "lerp", "addcmul", "addcdiv")
    for name in (base, f"{base}_", f"__{base}__", f"__r{base}__", f"__i{base}__")
    if hasattr(place, name)
) | {_T.__truediv__, _T.__rtruediv__, _T.__itruediv__}

_CONSTANT_NAMES: Final = (
    *("new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "full_like"),
    *("empty_like", "rand_like", "randn_like", "randint_like", "multinomial"),
)
_CONSTANT: Final = frozenset(
    getattr(place, name)
    for name in _CONSTANT_NAMES
    for place in (torch, _T)
    if hasattr(place, name)
)


def run_function(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a function or method of PyTorch that was given a tensor of ours."""
    if func in _PLAIN:
        with plainly():
            return func(*args, **kwargs)
    args, kwargs = by_position(func, args, kwargs)
    try:
        return _run_on_device(func, args, kwargs)
    except REFUSALS as refusal:
        raise_as_pytorch(func, args, kwargs, refusal)
        raise


def _run_on_device(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    own = _OWN.get(func)
    if own is not None:
        return own(*args, **kwargs)
    if func.__name__ in SLOTS:
        attribute = getattr(func.__self__, "__name__", "")
        own = _ATTRIBUTES.get((attribute, func.__name__))
        if own is not None:
            return own(*args)
        with plainly():
            return func(*args, **kwargs)
    return _run(func, args, kwargs)


def run_dispatched(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an overload that PyTorch's C++ calls, below autograd."""
    own = _DISPATCHED.get(func)
    if own is not None:
        return own(*args, **kwargs)
    return _run(func, args, kwargs, below_autograd=True)


def _run(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], *, below_autograd: bool = False
) -> Any:
    out = kwargs.get("out")
    if isinstance(out, torch.Tensor):
        rest = {name: value for name, value in kwargs.items() if name != "out"}
        return _copy(out, _run(func, args, rest, below_autograd=below_autograd))
    generator = kwargs.get("generator")
    if generator is not None:
        rest = {name: value for name, value in kwargs.items() if name != "generator"}
        with drawing_by(generator):
            return _run(func, args, rest, below_autograd=below_autograd)
    if func in _ARITHMETIC:
        args = [scalar(a) if type(a) is float else a for a in args]
        kwargs = {name: scalar(a) if type(a) is float else a for name, a in kwargs.items()}
    grad_mode = torch.is_grad_enabled() and not below_autograd and func not in _CONSTANT
    run, given = func, args
    if func is _T.__getitem__ and not is_tracing():
        moving = moving_part(*args)
        if moving is not None:
            run, given = part_at, moving
    arguments = arguments_of(given, kwargs, with_gradient=grad_mode)
    tensors, structure, kinds, needed, first = arguments
    if is_tracing():  # where they would be constants from then on
        refuse_constants(tensors)
    autocast = None if below_autograd else autocast_type()
    key = (run, structure, kinds, needed, autocast, first)
    trace = _traces.get(key)
    if trace is None:
        if len(_traces) >= _MAX_TRACES:
            _traces.clear()
        name = _name(func)
        function = _OPERATORS.get(run, run)
        with torch.set_grad_enabled(grad_mode):
            trace = Traced(function, structure, NO_STATE, needed, autocast, name, first)
    result = trace.call(tensors)
    _traces[key] = trace
    if func in _VIEWS or (func is _T.__getitem__ and not takes_copy(args[1])):
        mark_views(func, tensors[0], kinds[0], args[1:], kwargs, result)
    return result


def _name(func: Any) -> str:
    name = getattr(func, "__name__", None) or str(func)
    return f"torch_{name.strip('_').replace('.', '_')}"


def _detach(tensor: Tensor) -> Tensor:
    """Return a tensor without history, with the same memory."""
    detached = Tensor(array_of(tensor), box=tensor.box)
    detached.view_of = None if tensor.view_of is None else tensor.view_of.detached()
    detached.label = tensor.label
    return detached


def _contiguous(tensor: Tensor, **_: Any) -> torch.Tensor:
    """Return a tensor, or a copy of a view that PyTorch would copy."""
    try:
        place = None if tensor.view_of is None else tensor.view_of.locate()
    except UsageError:  # the real part of complex numbers
        return tensor.clone()
    return tensor if place is None or place.is_contiguous() else tensor.clone()


def _set_data(tensor: Tensor, value: torch.Tensor) -> None:
    (moved,) = on_device([value])
    array = array_of(moved)
    with plainly():
        if tuple(tensor.shape) != tuple(array.shape) or tensor.dtype != DTYPES.get(array.dtype):
            raise UsageError(
                "tensor.data was set to a tensor of another shape or dtype",
                hint="make a new tensor or parameter instead",
            )
    tensor.view_of = None  # it has other memory from now on
    write(tensor, array)


class _ToCpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> torch.Tensor:
        return to_cpu(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return on_device([gradient])[0]


def _cpu(tensor: Tensor, *_: Any, **__: Any) -> torch.Tensor:
    with plainly():
        needed = tensor.requires_grad and torch.is_grad_enabled()
    return _ToCpu.apply(tensor) if needed else to_cpu(tensor)


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    flags = [arg for arg in args if isinstance(arg, bool)]  # `non_blocking` and `copy`
    args = tuple([arg for arg in args if not isinstance(arg, bool)])
    copy = kwargs.pop("copy", flags[1:] == [True])
    other = kwargs.pop("other", None)
    if args and isinstance(args[0], torch.Tensor):
        other, args = args[0], args[1:]
    if other is not None:
        device: torch.device | None = other.device
        dtype: torch.dtype | None = other.dtype
    else:
        device, dtype, *_ = _C._nn._parse_to(*args, **kwargs)
    if not isinstance(tensor, Tensor):  # the other one is ours
        return on_device([tensor])[0].to(dtype)
    if device is not None and not means_ours(device):
        if device.type == "meta":
            return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=device)
        plain = _cpu(tensor)
        return plain.to(device, dtype) if device.type != "cpu" or dtype else plain
    if dtype is not None and available(dtype) != tensor.dtype:
        return _run(_T.to, (tensor, dtype), {})
    return tensor.clone() if copy else tensor


def _copied_to(
    tensor: torch.Tensor,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    **_: Any,
) -> torch.Tensor:
    if device is not None and device.type == "meta":  # as which C++ sees our tensors
        device = None  # `torch.tensor(x)`, where x is
    return _to(tensor, device, dtype, copy=True)


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
    """Write the values of a tensor to another one, on whichever device each is."""
    if not isinstance(target, Tensor):
        assert isinstance(source, Tensor)
        return target.copy_(to_cpu(source))
    (on_jax,) = on_device([source])
    with plainly():
        needed = torch.is_grad_enabled() and (target.requires_grad or on_jax.requires_grad)
        dtype, shape = target.box.array.dtype, tuple(target.shape)
    if needed:
        return _run(_T.copy_, (target, on_jax), {})
    array = array_of(on_jax)
    if array.dtype != dtype:
        array = array.astype(dtype)
    if tuple(array.shape) != shape:
        array = jnp.broadcast_to(array, shape)
    write(target, array)
    return target


_OF_ONE: Final = frozenset({"__bool__", "__float__", "__int__", "__index__", "__complex__"})


def _read(name: str) -> Callable[..., Any]:
    def read(tensor: Tensor, *args: Any) -> Any:
        value = array_of(tensor)
        if name in _OF_ONE and type(value) is not float and value.ndim and value.size == 1:
            value = value.reshape(())
        return getattr(value, name)(*args)

    return read


def _item(tensor: Tensor) -> Any:
    value = array_of(tensor)
    return value if type(value) is float else value.item()


def _numpy(tensor: Tensor, *, force: bool = False) -> np.ndarray:
    with plainly():
        if tensor.requires_grad and not force:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() "
                "instead."
            )
    return tensor.read()


def _array(tensor: Tensor, dtype: Any = None) -> np.ndarray:
    values = _numpy(tensor)
    return values if dtype is None else values.astype(dtype)


def _contains(tensor: Tensor, element: Any) -> bool:
    return bool((tensor == element).any())


def _new_tensor(
    tensor: Tensor, data: Any, *, dtype: Any = None, device: Any = None, **options: Any
) -> torch.Tensor:
    return torch.tensor(data, dtype=dtype or tensor.dtype, device=device or "jax", **options)


def _renormalizing(func: Any) -> Callable[..., Any]:
    """Return an embedding that first writes to its weight what ``max_norm`` asks for."""

    def call(*args: Any, **kwargs: Any) -> Any:
        named = inspect.signature(func).bind(*args, **kwargs).arguments
        largest = named.pop("max_norm", None)
        if largest is not None:
            with torch.no_grad():
                weight, order = named["weight"].detach(), named.get("norm_type", 2.0)
                torch.embedding_renorm_(weight, named["input"], largest, order)
        return _run(func, (), named)

    return call


def _pointless(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return the tensor: what was asked for has no meaning on this device."""
    return tensor


_OWN: Final[dict[Any, Callable[..., Any]]] = {
    _T.detach: _detach,
    torch.detach: _detach,
    _T.detach_: lambda tensor: tensor.requires_grad_(False),
    _T.contiguous: _contiguous,
    _T.to: _to,
    _T.cpu: _cpu,
    _T.copy_: _copy,
    _T.item: _item,
    _T.tolist: _read("tolist"),
    _T.numpy: _numpy,
    _T.__array__: _array,
    _T.__bool__: _read("__bool__"),
    _T.__float__: _read("__float__"),
    _T.__int__: _read("__int__"),
    _T.__index__: _read("__index__"),
    _T.__complex__: _read("__complex__"),
    _T.__contains__: _contains,
    _T.__iter__: lambda tensor: iter(torch.unbind(tensor, 0)),
    _T.__deepcopy__: lambda tensor, memo: Tensor.__deepcopy__(tensor, memo),
    _T.__reduce_ex__: lambda tensor, protocol: Tensor.__reduce_ex__(tensor, protocol),
    _T.__repr__: lambda tensor, **_: repr(tensor),
    _T.__format__: lambda tensor, spec: format(tensor, spec),
    _T.type_as: lambda tensor, other: _to(tensor, other.dtype),
    _T.new_tensor: _new_tensor,
    functional.embedding: _renormalizing(functional.embedding),
    functional.embedding_bag: _renormalizing(functional.embedding_bag),
    _T.pin_memory: _pointless,
    _T.share_memory_: _pointless,
    _T.record_stream: _pointless,
    torch.equal: lambda a, b: a.shape == b.shape and bool((a == b).all()),
    _T.equal: lambda a, b: a.shape == b.shape and bool((a == b).all()),
    torch.allclose: lambda *args, **kwargs: bool(torch.isclose(*args, **kwargs).all()),
    _T.allclose: lambda *args, **kwargs: bool(torch.isclose(*args, **kwargs).all()),
}


_ATTRIBUTES: Final[dict[tuple[str, str], Callable[..., Any]]] = {
    ("data", "__get__"): lambda tensor, *_: _detach(tensor),
    ("data", "__set__"): _set_data,
    **{
        (name, "__get__"): lambda tensor, *_, name=name: _run(_ATTRIBUTE_VIEWS[name], (tensor,), {})
        for name in ("T", "mT", "H", "mH", "real", "imag")
    },
}
_ATTRIBUTE_VIEWS: Final[dict[str, Any]] = {
    name: operator.attrgetter(name) for name in ("T", "mT", "H", "mH", "real", "imag")
}
for _getter_name, _getter in _ATTRIBUTE_VIEWS.items():

    def _named(tensor: Any, getter: Any = _getter) -> Any:
        return getter(tensor)

    _named.__name__ = _getter_name
    _ATTRIBUTE_VIEWS[_getter_name] = _named
_VIEWS: Final = VIEWS | {*_ATTRIBUTE_VIEWS.values()}


def _with_factor(base: str, keyword: str) -> dict[Any, Callable[..., Any]]:
    """Return functions whose keyword may be a tensor, for PyTorch's, which then read its value."""

    def call(tensor: Any, first: Any, second: Any = None, **factor: Any) -> Any:
        if base == "addcmul":
            first = first * second
        elif base == "addcdiv":
            first = first / second
        term = first * factor[keyword] if keyword in factor else first
        return tensor - term if base == "sub" else tensor + term

    def write(tensor: Any, *args: Any, **factor: Any) -> Any:
        return tensor.copy_(call(tensor, *args, **factor))

    call.__name__, write.__name__ = base, f"{base}_"
    return {
        getattr(torch, base): call,
        getattr(_T, base): call,
        getattr(_T, f"{base}_"): write,
    }


def _full_like(tensor: Any, fill_value: Any, **options: Any) -> Any:
    if isinstance(fill_value, torch.Tensor):  # as an optimizer's learning rate is
        return torch.zeros_like(tensor, **options) + fill_value
    return torch.full_like(tensor, fill_value, **options)


# How a function is called on tensors of torchax, where PyTorch's own is not the right way.
_OPERATORS: Final[dict[Any, Any]] = {
    **_with_factor("add", "alpha"),
    **_with_factor("sub", "alpha"),
    **_with_factor("addcmul", "value"),
    **_with_factor("addcdiv", "value"),
    torch.full_like: _full_like,
    _T.__setitem__: operator.setitem,
    _T.__getitem__: operator.getitem,
}

_aten = torch.ops.aten
_DISPATCHED: Final[dict[Any, Callable[..., Any]]] = {
    _aten.detach.default: _detach,
    _aten.alias.default: _detach,
    _aten.lift_fresh.default: _detach,
    _aten.copy_.default: _copy,
    _aten._to_copy.default: _copied_to,
    _aten._local_scalar_dense.default: _item,
    _aten._is_any_true.default: lambda tensor: tensor.any(),
    torch.ops.prim.device.default: lambda tensor: tensor.device,
}


def _filled(fill: Any) -> Callable[..., Tensor]:
    def make(size: Sequence[int], *args: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return Tensor(jnp.full(tuple(size), fill, jax_type(dtype)))

    return make


def _empty_strided(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    array = jnp.zeros(tuple(size), jax_type(dtype))
    if torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python):
        # `torch.tensor` hides our class from what it calls, until `lift_fresh`.
        return in_transit(array, torch.device("jax", 0))
    return Tensor(array)


def _copy_from(source: torch.Tensor, target: torch.Tensor, _: bool = False) -> torch.Tensor:
    """Copy between the CPU and a tensor in transit."""
    if isinstance(target, Tensor):
        (moved,) = on_device([source])
        target.box.write(array_of(moved).astype(target.box.array.dtype))
    return target


def _full(size: Sequence[int], value: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    if dtype is None and not isinstance(value, float):
        dtype = torch.bool if isinstance(value, bool) else torch.int64
    return Tensor(jnp.full(tuple(size), value, jax_type(dtype)))


def _from_cpu(overload: Any) -> Callable[..., Tensor]:
    def make(*args: Any, **kwargs: Any) -> Tensor:
        values = overload(*args, **{**kwargs, "device": "cpu", "pin_memory": False})
        return Tensor(jnp.asarray(host_values(values)))

    return make


_CONSTANTS: Final = [
    (name, "" if overload == "default" else overload)
    for name in CONSTANTS
    for overload in getattr(_aten, name).overloads()
    if "out" not in overload
]

FACTORIES: Final[dict[str, Callable[..., Any]]] = {
    "empty.memory_format": _filled(0),
    "empty_strided": _empty_strided,
    "_copy_from": _copy_from,
    "zeros": _filled(0),
    "ones": _filled(1),
    "full": _full,
    **{
        f"{name}.{overload}" if overload else name: _from_cpu(
            getattr(getattr(_aten, name), overload or "default")
        )
        for name, overload in (
            *(("arange", ""), ("arange", "start"), ("arange", "start_step")),
            *(("linspace", ""), ("logspace", ""), ("eye", ""), ("eye", "m")),
            *(("randperm", ""), ("randperm", "generator")),
            *(("tril_indices", ""), ("triu_indices", "")),
            *_CONSTANTS,
        )
    },
}
"""What makes tensors on the device, by the names of PyTorch's overloads."""
