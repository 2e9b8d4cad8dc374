"""Runs a module with StableHLO's reference interpreter; must not know XLA or devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from snaprt.jaxapi.compiler.modules import operations_within


def interpret(module: Any, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Evaluate an MLIR module with StableHLO's reference interpreter.

    Args:
        module: Its results are real numbers of types that Python's buffers have.
        inputs: One array for each parameter of ``main``, of any dtype that XLA has.

    Raises:
        ValueError: The interpreter does not know an operation of it.
    """
    (main,) = [
        o for o in module.body.operations if o.operation.attributes["sym_name"].value == "main"
    ]
    with module.context, ir.Location.unknown():
        _generalize_dots(module)
        arguments = [
            ir.DenseElementsAttr.get(np.ascontiguousarray(array).tobytes(), type=kind)
            for array, kind in zip(inputs, main.function_type.value.inputs, strict=True)
        ]
        try:
            results = stablehlo.eval_module(module, arguments)
        except Exception as error:  # of several types, by version and cause
            raise ValueError(str(error)) from None
        return [np.asarray(result) for result in results]


def _generalize_dots(module: Any) -> None:
    """Replace ``stablehlo.dot``, which `hlo_to_stablehlo` makes and the interpreter refuses."""
    for dot in list(operations_within(module.operation)):
        if dot.name != "stablehlo.dot":
            continue
        left, right = dot.operands
        contracted = ir.RankedTensorType(left.type).rank - 1
        numbers = stablehlo.DotDimensionNumbers.get([], [], [contracted], [0])
        with ir.InsertionPoint(dot):
            general = stablehlo.dot_general(dot.results[0].type, left, right, numbers)
        dot.results[0].replace_all_uses_with(general)
        dot.erase()
