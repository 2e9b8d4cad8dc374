"""Compiles ahead of calls, also for devices that are not there; must not load or run anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src.lax import lax as _lax
from jax._src.random import prng as _prng

from snaprt.jaxapi.compiler.options import compile_options
from snaprt.jaxapi.devices import device_list


def zeros_function(shapes: Sequence[Any]) -> Callable[..., Any]:
    """Return a function of any arguments whose results have these shapes, dtypes and weak types.

    It carries the name of the function that a recorded program becomes, which its executable keeps.
    """

    def lazy_graph(*_: Any) -> list[Any]:
        return [_zeros(shape) for shape in shapes]

    return lazy_graph


def _zeros(of: Any) -> Any:
    if isinstance(of.dtype, _prng.KeyTy):
        implementation = of.dtype._impl
        data = jax.numpy.zeros((*of.shape, *implementation.key_shape), np.uint32)
        return jax.random.wrap_key_data(data, impl=implementation.name)
    full = jax.lax.full(of.shape, 0, of.dtype)
    weak = bool(getattr(of, "weak_type", False))
    return _lax._convert_element_type(full, of.dtype, weak_type=weak)


def compile_for_topology(module: Any, devices: Sequence[Any]) -> bytes:
    """Compile an MLIR module for devices that are not there; return the serialized executable."""
    client = devices[0].client
    return client.compile(module, device_list(devices), compile_options(devices)).serialize()


def compile_unloaded(
    module: Any, devices: Sequence[Any], overrides: Mapping[str, Any] | None = None
) -> Any:
    """Compile an MLIR module for devices that are not there; return what XLA knows of it."""
    options = compile_options(devices, overrides)
    return devices[0].client.compile(module, device_list(devices), options)
