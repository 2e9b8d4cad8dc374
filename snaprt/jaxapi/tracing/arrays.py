"""Arrays and their abstract values, and an array that is a tracer to JAX alone."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from types import FrameType, FunctionType
from typing import Any

import jax
import jax.numpy  # gives tracers their operators
import numpy as np
from jax._src import core as _core
from jax._src import dtypes as _dtypes
from jax._src import layout as _layout
from jax._src.interpreters import pxla as _pxla
from jax._src.random import prng as _prng
from jax._src.random.prng import PRNGKeyArray
from jaxlib import _jax as _jaxlib  # pyright: ignore[reportAttributeAccessIssue]

from snaprt.jaxapi.installation import Device
from snaprt.jaxapi.settings import default_device
from snaprt.jaxapi.tracing.shardings import single_device_sharding
from snaprt.jaxapi.tracing.traces import evaluating

ShapedArray = _core.ShapedArray


def is_array_aval(aval: Any) -> bool:
    """Return whether ``aval`` describes an ordinary array (no reference, no token)."""
    return isinstance(aval, ShapedArray)


def is_abstract(value: Any) -> bool:
    """Return whether ``value`` only describes an array, as `jax.ShapeDtypeStruct` does."""
    return isinstance(value, jax.ShapeDtypeStruct | _core.AbstractValue)


def has_no_values(aval: Any) -> bool:
    """Return whether ``aval`` is of the derivatives of integers, kept by JAX as numpy arrays."""
    return bool(aval.dtype == jax.dtypes.float0)


def is_placed_aval(aval: Any) -> bool:
    """Return whether the type of an array names the axes of a mesh."""
    mesh = getattr(aval.sharding, "mesh", None)
    kind = getattr(aval, "manual_axis_type", None)
    varies = getattr(aval, "vma", None) or getattr(kind, "varying", None)
    return bool(varies) or (mesh is not None and not mesh.empty)


def is_in_default_memory(aval: Any) -> bool:
    """Return whether an array is not in the memory of the host, beside its device's."""
    return bool(aval.memory_space == jax.memory.Space.Device)


def layout_of_type(aval: Any) -> Any:
    """Return the layout that the type of an array names, ``None`` for any; from JAX 0.12 on."""
    layout = getattr(aval, "layout", None)
    return None if layout is _layout.AutoLayout else layout


def is_extended_dtype(value: Any) -> bool:
    """Return whether ``value`` is a dtype of JAX's own, as that of PRNG keys."""
    return isinstance(value, _prng.KeyTy)


def key_type_text(dtype: Any) -> str:
    """Return what tells a type of PRNG keys from others, those of the user's own included.

    Two implementations may have one tag, which is all that JAX prints.
    """
    return str([(name, _part_text(part)) for name, part in dtype._impl._asdict().items()])


def _part_text(part: Any) -> str:
    return f"{part.__module__}.{part.__qualname__}" if callable(part) else repr(part)


def own_key_type(value: Any) -> str | None:
    """Return the name of a type of PRNG keys, or of what implements one, of JAX's; else None.

    It stands for the functions that the implementation is a tuple of; a user's might stand for
    others.
    """
    implementation = getattr(value, "_impl", value)
    functions = [part for part in implementation if callable(part)]
    is_own = all(function.__module__.partition(".")[0] == "jax" for function in functions)
    return implementation.name if is_own else None


def is_scalar_type(value: Any) -> bool:
    """Return whether ``value`` is one of JAX's own scalar types, such as ``jax.numpy.float32``."""
    return isinstance(value, type(jax.numpy.float32))


def dtype_of_name(name: str) -> Any:
    """Return the dtype, of JAX's own too, that ``str`` calls ``name``.

    Raises:
        ValueError: There is none.
    """
    for implementation in _prng.prngs.values():
        kind = _prng.KeyTy(implementation)
        if str(kind) == name:
            return kind
    try:
        return jax.numpy.dtype(name)
    except TypeError as error:
        raise ValueError(f"unknown dtype {name}") from error


ArrayImpl: Any = _jaxlib.ArrayImpl

#: The types of arrays that hold their values: ordinary ones, and those of PRNG keys.
CONCRETE_ARRAYS = frozenset({ArrayImpl, _prng.PRNGKeyArray})
typeof = jax.typeof


def host_literal(value: Any) -> bool:
    """Return whether ``value`` is a scalar that lives on the host (Python or numpy)."""
    return not isinstance(value, jax.Array) and np.ndim(value) == 0


def literal_bytes(value: Any) -> bytes:
    """Return the bits of a host scalar: equal for equal NaNs, different for 0.0 and -0.0."""
    return np.asarray(value).tobytes()


def describe_input(array: jax.Array) -> tuple[Any, ...]:
    """Return what a compiled program depends on in an input beside its values."""
    return typeof(array), array.sharding, array.committed


def shape_of_aval(aval: Any) -> jax.ShapeDtypeStruct:
    """Return what is traced as an array of that abstract value is."""
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=aval.sharding
    )


def shapes_of(arrays: Sequence[jax.Array]) -> list[jax.ShapeDtypeStruct]:
    """Return what lowering needs of ``arrays``, without the arrays."""
    return [
        jax.ShapeDtypeStruct(
            array.shape,
            array.dtype,
            sharding=array.sharding if array.committed else None,
            weak_type=getattr(typeof(array), "weak_type", False),
        )
        for array in arrays
    ]


def to_device(value: Any) -> jax.Array:
    """Copy a host value to the default device, keeping its dtype and weak type.

    The copy is committed to no mesh, for the program may want it to lie otherwise. It keeps 64 bits
    where these are off by now: the program was recorded while they were on.
    """
    aval = typeof(value)
    kind = ShapedArray(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))
    sharding = single_device_sharding(default_device())
    return _put(kind, sharding, np.asarray(value).astype(aval.dtype), is_committed=False)


def put_on(device: Device, value: np.ndarray) -> jax.Array:
    """Return an array on a device of any client; it may share the memory of ``value``."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    return _put(ShapedArray(value.shape, value.dtype), sharding, value, is_committed=True)


def _put(aval: Any, sharding: Any, value: np.ndarray, *, is_committed: bool) -> jax.Array:
    # `jax.device_put` takes ten times as long to come here. It would narrow 64 bits.
    (device,) = sharding.device_set
    array: jax.Array = _pxla.batched_device_put(
        aval, sharding, [value], [device], is_committed, enable_x64=True
    )
    return array


def before_deleted(ask: Callable[[Any], None]) -> None:
    """Call ``ask`` with each array that is deleted, before that."""
    if ask in _asked_before_deleted:
        return
    _asked_before_deleted.append(ask)
    if len(_asked_before_deleted) > 1:
        return
    for kind in CONCRETE_ARRAYS:
        _ask_before(kind)


def _ask_before(kind: Any) -> None:
    delete_array = kind.delete

    def delete(array: Any) -> None:
        for callback in _asked_before_deleted:
            callback(array)
        delete_array(array)

    delete.__doc__ = delete_array.__doc__
    kind.delete = delete


_asked_before_deleted: list[Callable[[Any], None]] = []


def refuse_deleted(array: Any) -> None:
    """Raise the `RuntimeError` of eager JAX if ``array`` was deleted."""
    getattr(array, "_base_array", array)._check_if_deleted()


def copy_array(array: jax.Array) -> jax.Array:
    """Return a copy in memory of its own, where ``array`` lies; compiles nothing."""
    with evaluating():
        where = array.sharding if array.committed else None
        return jax.device_put(array, where, may_alias=False)


def data_of_keys(array: Any) -> Any:
    """Return the integers of an array of PRNG keys, and any other array as it is."""
    return array._base_array if type(array) is _prng.PRNGKeyArray else array


def keys_of_data(data: jax.Array, like: Any) -> jax.Array:
    """Return what `data_of_keys` took apart, whose array was of the type of ``like``."""
    if type(like) is not _prng.PRNGKeyArray:
        return data
    return jax.random.wrap_key_data(data, impl=like._impl.name)


def with_axes_of_type(array: Any, aval: Any) -> Any:
    """Return an array that `is_typed_within` is for as one of its type; copies nothing."""
    data = data_of_keys(array)
    mesh = getattr(data.sharding, "mesh", None)
    if mesh is None:
        return array
    mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, aval.sharding.mesh.axis_types)
    within = data.sharding.update(mesh=mesh)
    kind = _core.update_aval_with_sharding(data.aval, within)
    typed = ArrayImpl(kind, within, data._arrays, data.committed, _skip_checks=True)
    return keys_of_data(typed, array)


def with_default_layouts(arrays: Sequence[jax.Array]) -> list[jax.Array] | None:
    """Return the arrays, those laid out otherwise than the compiler lays out arguments as copies.

    Returns:
        None where no array is laid out otherwise.
    """
    others = [place for place, array in enumerate(arrays) if _is_laid_out_otherwise(array)]
    if not others:
        return None
    results = list(arrays)
    with evaluating():
        for place in others:
            results[place] = jax.device_put(results[place], _default_format(results[place]))
    return results


def _is_laid_out_otherwise(array: Any) -> bool:
    if type(array) is not ArrayImpl:
        return False
    return not _pxla.is_default_layout(array.format.layout, array.sharding, array.aval)


def _default_format(array: Any) -> Any:
    device = next(iter(array.sharding.device_set))
    layout = _default_layout(device, array.sharding.shard_shape(array.shape), array.dtype)
    return _layout.Format(layout, array.sharding)


def _default_layout(device: Any, shape: Sequence[int], dtype: Any) -> _layout.Layout:
    layout = device.client.get_default_layout(dtype, tuple(shape), device)
    return _layout.Layout.from_pjrt_layout(layout)


def layouts_of_parameters(
    executable: Any, parts: Sequence[tuple[Sequence[int], np.dtype]], device: Device
) -> list[Any]:
    """Return how a loaded executable wants each parameter laid out, ``None`` for as usual.

    It takes arrays in any layout, and reads them as if they had the right one.

    Args:
        executable: What is to take the arrays.
        parts: The shape and dtype of what each device holds of each parameter.
        device: One that it runs on.
    """
    try:
        wanted = executable.get_parameter_layouts()
    except jax.errors.JaxRuntimeError:  # a plugin that does not tell
        wanted = []
    if len(wanted) != len(parts):
        return [None] * len(parts)  # a token is a parameter, too
    layouts = map(_layout.Layout.from_pjrt_layout, wanted)
    return [
        None if layout == _default_layout(device, shape, dtype) else layout
        for layout, (shape, dtype) in zip(layouts, parts, strict=True)
    ]


def put_on_device(
    value: Any, device: Device, *, layout: Any, memory: str | None, may_alias: bool | None = None
) -> jax.Array:
    """Put an array on a device.

    Args:
        value: The array, on the host or on any device.
        device: Where to put it.
        layout: Its layout there, as `layouts_of_parameters` returns it.
        memory: The kind of its memory, as `parameter_memories` returns it.
        may_alias: As `jax.device_put` takes it.
    """
    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=memory)
    # Step by step: JAX refuses to move an array and to lay it out at once, and 0.10.2 reads an
    # array wrong that was laid out otherwise when it was moved.
    (value,) = with_default_layouts([value]) or (value,)
    array = jax.device_put(value, sharding, may_alias=may_alias)
    return array if layout is None else jax.device_put(array, _layout.Format(layout, sharding))


_Tracer: Any = _core.Tracer
_frame = sys._getframe


class _TracerToJax(_Tracer):
    __slots__ = ()


def _is_of_jax(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "")[:4] == "jax."


def _shard(arrays: Any, shardings: Any, layouts: Any, semantics: Any) -> Any:
    """Put arrays onto devices, as `jax.device_put` does where no function is being traced."""
    return _pxla.shard_args(shardings, layouts, semantics, [a.full_lower() for a in arrays])


class _TypeOfArray(type(jax.Array)):  # type: ignore[misc]
    """Take arrays with a value for instances, as their class does: ``isinstance(y, type(x))``."""

    def __instancecheck__(cls, instance: object) -> bool:
        kind = type(instance)
        return kind in CONCRETE_ARRAYS or issubclass(kind, cls)


class _ArrayOfTrace(jax.Array, metaclass=_TypeOfArray):
    """A `jax.Array` that JAX takes for a tracer; it does all that tracers do."""

    __slots__ = ("__weakref__", "_line_info", "_trace", "aval")

    aval: Any  # the abstract value
    _trace: Any

    def __init_subclass__(cls) -> None:
        _pxla.shard_arg_handlers[cls] = _shard

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What `isinstance` goes by where the type itself does not answer.

        What JAX prints of an object that holds arrays (a sparse matrix) is for the user.
        """
        frame = _frame(1)
        is_of_jax = frame.f_globals.get("__name__", "")[:4] == "jax."  # `_is_of_jax`, written out
        if is_of_jax and frame.f_code.co_name != "__repr__":
            return _TracerToJax
        return self._kind_of_value()

    def __getattr__(self, name: str) -> Any:
        """Find for JAX what its tracers have, and for everybody what the value has."""
        if _is_of_jax(_frame(1)) and hasattr(self.aval, name):
            return _Tracer.__getattr__(self, name)
        kind = self._kind_of_value()
        if name == "__cuda_array_interface__" and self.platform() == "cpu":
            raise AttributeError(f"{name} is only defined for NVidia GPU buffers.")
        if hasattr(kind, name) or name in kind.__annotations__:
            return getattr(self.full_lower(), name)
        raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")

    def _kind_of_value(self) -> Any:
        """Return the type of the array that the value is."""
        is_key = _dtypes.issubdtype(self.aval.dtype, jax.dtypes.prng_key)
        return PRNGKeyArray if is_key else ArrayImpl


# Any: a subclass answers where the base class is typed to raise.
ArrayOfTrace: Any = _ArrayOfTrace


def _refusing_keys(method: Any, refuse: Any) -> Any:
    """Return a method of tracers that does for a random key what ``refuse`` does: raise."""

    @functools.wraps(method)
    def chosen(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_key = type(self.aval.dtype) is _prng.KeyTy
        return (refuse if is_key else method)(self, *args, **kwargs)

    return chosen


_NOT_OF_TRACERS = {"__class__", "__getattr__", "__init__", "__jax_array__"}
for _name, _attribute in vars(_Tracer).items():
    if isinstance(_attribute, FunctionType | property) and _name not in _NOT_OF_TRACERS:
        _chosen: Any = _attribute
        _refusing: Any = vars(jax.Array).get(_name)
        if _refusing is not None and getattr(PRNGKeyArray, _name) is _refusing:
            if isinstance(_attribute, property):
                _chosen = property(_refusing_keys(_attribute.fget, _refusing.fget))
            else:
                _chosen = _refusing_keys(_attribute, _refusing)
        setattr(ArrayOfTrace, _name, _chosen)
ArrayOfTrace.__array_priority__ = ArrayImpl.__array_priority__
ArrayOfTrace.dimension_as_value = None  # JAX looks for it at every operation
_core.pytype_aval_mappings[ArrayOfTrace] = attrgetter("aval")
_dtypes.register_canonicalize_value_handler(ArrayOfTrace, None)
