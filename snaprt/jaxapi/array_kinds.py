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
from types import FunctionType
from typing import Any

import jax
import jax.numpy  # gives tracers their operators
from jax._src import core as _core
from jax._src import dtypes as _dtypes
from jax._src.random import prng as _prng
from jaxlib import _jax as _jaxlib  # pyright: ignore[reportAttributeAccessIssue]

_Tracer: Any = _core.Tracer
_frame = sys._getframe


class _TracerToJax(_Tracer):
    __slots__ = ()


def asked_by_jax() -> bool:
    """Say whether a function of JAX's called the function that asks."""
    name = _frame(2).f_globals.get("__name__", "")
    return name.startswith("jax.") or name == "jax"


class ArrayOfTrace(jax.Array):
    """A `jax.Array` that JAX takes for a tracer; it does all that tracers do.

    Attributes:
        aval: The abstract value.
    """

    __slots__ = ("__weakref__", "_line_info", "_trace", "aval")

    aval: Any
    _trace: Any

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """What `isinstance` goes by where the type itself does not answer."""
        return _TracerToJax if asked_by_jax() else self.kind_of_value()

    def kind_of_value(self) -> Any:
        """Return the type of the array that the value is."""
        is_key = jax.dtypes.issubdtype(self.aval.dtype, jax.dtypes.prng_key)
        return _prng.PRNGKeyArray if is_key else _jaxlib.ArrayImpl


for _name, _attribute in vars(_Tracer).items():
    if _name != "__init__" and (
        isinstance(_attribute, FunctionType | property)
        or _name in ("__array_priority__", "dimension_as_value")
    ):
        setattr(ArrayOfTrace, _name, _attribute)
_core.pytype_aval_mappings[ArrayOfTrace] = attrgetter("aval")
_dtypes.register_canonicalize_value_handler(ArrayOfTrace, None)
