"""XLA's compile options and flags; must not know the programs that they are for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax._src import compiler as _compiler
from jaxlib import _jax as _jaxlib  # pyright: ignore[reportAttributeAccessIssue]

from snaprt.jaxapi.devices import Device


def compile_options(devices: Sequence[Device], overrides: Mapping[str, Any] | None = None) -> Any:
    """Return XLA's compile options for one program over ``devices``.

    Args:
        devices: Where the program runs, in the order of its partitions.
        overrides: Values of ``xla_*`` options by name, without dashes.
    """
    return _compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=np.array([[device.id for device in devices]]),
        env_options_overrides=dict(overrides) if overrides else None,
        backend=devices[0].client,
    )


def compile_options_without_paths(serialized: bytes) -> bytes:
    """Return serialized compile options without the options that hold a path."""
    options = _jaxlib.CompileOptions.ParseFromString(serialized)
    build_options = options.executable_build_options  # each is a view into the one before it
    flags = build_options.debug_options
    for name in dir(flags):
        value = getattr(flags, name)
        if name.startswith("xla_") and isinstance(value, str) and ("/" in value or "\\" in value):
            setattr(flags, name, "")
    return options.SerializeAsString()


def dump_options_of_xla() -> dict[str, bool | str]:
    """Return the values of XLA's ``xla_dump_`` flags; makes XLA parse XLA_FLAGS if it has not.

    XLA ends the process if the variable has a flag that it does not know.
    """
    options = _jaxlib.CompileOptions()
    build_options = options.executable_build_options  # each is a view into the one before it
    flags = build_options.debug_options
    return {
        name: getattr(flags, name)
        for name in dir(flags)
        if name.startswith("xla_dump_") and isinstance(getattr(flags, name), (bool, str))
    }
