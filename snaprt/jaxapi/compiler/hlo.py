"""Converts between StableHLO, and HLO as protos and text; must not know executables."""

from __future__ import annotations

import io
from typing import Any

from jaxlib import _hlo  # type: ignore[attr-defined]
from jaxlib import _jax as _jaxlib  # pyright: ignore[reportAttributeAccessIssue]


def module_to_hlo_proto(module: Any) -> bytes:
    """Convert a StableHLO module to a serialized, unoptimized ``xla.HloModuleProto``.

    Raises:
        ValueError: XLA has no HLO for something in it.
    """
    buffer = io.BytesIO()
    module.operation.write_bytecode(file=buffer)
    try:
        computation = _jaxlib.mlir.mlir_module_to_xla_computation(buffer.getvalue())
    except Exception as error:  # of several types, by version and cause
        raise ValueError(str(error)) from None
    return computation.as_serialized_hlo_module_proto()


def hlo_to_stablehlo(proto: bytes) -> bytes:
    """Convert a serialized ``xla.HloModuleProto`` to StableHLO, as MLIR bytecode.

    Raises:
        ValueError: It is none, or something in it has no StableHLO.
    """
    try:
        return _jaxlib.mlir.hlo_to_stablehlo(proto)
    except Exception as error:  # of several types, by version and cause
        raise ValueError(str(error)) from None


def hlo_text(proto: bytes) -> str:
    """Return a serialized ``xla.HloModuleProto`` as HLO text.

    Raises:
        ValueError: It is none, or XLA does not accept it.
    """
    try:
        return _hlo.HloModule.from_serialized_hlo_module_proto(proto).to_string()
    except Exception as error:
        raise ValueError(str(error)) from None


def parse_hlo_text(text: str) -> bytes:
    """Parse HLO text into a serialized ``xla.HloModuleProto``.

    Raises:
        ValueError: XLA's parser refuses it; the message names line and column.
    """
    try:
        return _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    except Exception as error:
        raise ValueError(str(error)) from None
