"""An array that is a tracer to JAX alone; must not know how its value is computed.

Libraries that hold an array ask what it is in ways that a tracer does not answer: they look at the
base classes of its type (`functools.singledispatch`, handlers of checkpoints), or take a tracer for
a sign that a function is being traced, where nothing can be read. But JAX binds the operations of
what it takes for a tracer, and computes with what it takes for an array.

Checked with jax 0.10.2 and 0.12.0.
"""

from __future__ import annotations

import sys
from operator import attrgetter
from types import FrameType, FunctionType
from typing import Any

import jax
import jax.numpy  # gives tracers their operators
from jax._src import core as _core
from jax._src import dtypes as _dtypes
from jax._src.interpreters import pxla as _pxla
from jax._src.random.prng import PRNGKeyArray

from snaprt.jaxapi.tracing.arrays import ArrayImpl

_Tracer: Any = _core.Tracer
_frame = sys._getframe


class _TracerToJax(_Tracer):
    __slots__ = ()


def _is_of_jax(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "")[:4] == "jax."


def _shard(arrays: Any, shardings: Any, layouts: Any, semantics: Any) -> Any:
    """Put arrays onto devices, as `jax.device_put` does where no function is being traced."""
    return _pxla.shard_args(shardings, layouts, semantics, [a.full_lower() for a in arrays])


class _ArrayOfTrace(jax.Array):
    """A `jax.Array` that JAX takes for a tracer; it does all that tracers do.

    Attributes:
        aval: The abstract value.
    """

    __slots__ = ("__weakref__", "_line_info", "_trace", "aval")

    aval: Any
    _trace: Any

    def __init_subclass__(cls) -> None:
        _pxla.shard_arg_handlers[cls] = _shard

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What `isinstance` goes by where the type itself does not answer."""
        if _frame(1).f_globals.get("__name__", "")[:4] == "jax.":  # `_is_of_jax`, written out
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

_NOT_OF_TRACERS = {"__class__", "__getattr__", "__init__", "__jax_array__"}
for _name, _attribute in vars(_Tracer).items():
    if isinstance(_attribute, FunctionType | property) and _name not in _NOT_OF_TRACERS:
        setattr(ArrayOfTrace, _name, _attribute)
ArrayOfTrace.__array_priority__ = ArrayImpl.__array_priority__
ArrayOfTrace.dimension_as_value = None  # JAX looks for it at every operation
_core.pytype_aval_mappings[ArrayOfTrace] = attrgetter("aval")
_dtypes.register_canonicalize_value_handler(ArrayOfTrace, None)
