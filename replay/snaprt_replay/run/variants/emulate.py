"""Round the operands of dots and convolutions as a TPU does, on the HloModuleProto.

A TPU multiplies bfloat16 numbers and adds up in float32. Of a float32 operand it takes the first
8 bits of the mantissa, in one pass (precision *default*), or writes it as a sum of two or three
bfloat16 numbers and adds the products that matter, in three (*high*) or six passes (*highest*).
Source: PrecisionConfig in openxla's xla_data.proto, and XLA's DotDecomposer for bf16_3x and 6x.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from snaprt.hlo.proto import XlaMessage
from snaprt_replay.hlo.hlo_module import Editor, Steps, copy_of
from snaprt_replay.run.variants.variants import PRECISIONS

_PRED, _F32 = 1, 11
_MULTIPLIED: Final = ("dot", "convolution")
# Which parts of the left and of the right operand are multiplied, the smallest products first: they
# are added in this order.
_PASSES: Final[Mapping[str, Sequence[tuple[int, int]]]] = {
    "default": ((0, 0),),
    "high": ((1, 0), (0, 1), (0, 0)),
    "highest": ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0)),
}


def with_matmul_precision(module: XlaMessage, precision: str) -> XlaMessage:
    """Return the program with a precision for each dot and convolution that asks for none.

    Args:
        module: An HloModuleProto; it is not changed.
        precision: One of `variants.PRECISIONS`.
    """
    copied = copy_of(module)
    level = PRECISIONS.index(precision)
    for computation in copied.computations:
        for instruction in filter(_is_at_default_precision, computation.instructions):
            instruction.precision_config.operand_precision[:] = [level, level]
    return copied


def with_tpu_precision(module: XlaMessage, precision: str) -> XlaMessage:
    """Return the program with its float32 dots and convolutions as a TPU computes them.

    Args:
        module: An HloModuleProto with default layouts; it is not changed.
        precision: What stands for ``default`` where an operation asks for no more.
    """
    emulated = with_matmul_precision(module, precision)
    editor = Editor(emulated)
    for computation in emulated.computations:
        by_id = {instruction.id: instruction for instruction in computation.instructions}

        def replace(
            instruction: XlaMessage, by_id: Mapping[int, XlaMessage] = by_id
        ) -> Sequence[XlaMessage]:
            operands = [by_id[operand] for operand in instruction.operand_ids]
            wide = [operand for operand in operands if operand.shape.element_type == _F32]
            if instruction.opcode not in _MULTIPLIED or len(wide) < 2:
                return [instruction]
            return _in_passes(editor, instruction, operands)

        editor.replace_each(computation, replace)
    return emulated


def multiplies_at_default_precision(module: XlaMessage) -> bool:
    """Return whether a dot or convolution of float32 asks for no precision."""
    for computation in module.computations:
        types = {each.id: each.shape.element_type for each in computation.instructions}
        for product in filter(_is_at_default_precision, computation.instructions):
            if all(types[operand] == _F32 for operand in product.operand_ids):
                return True
    return False


def _is_at_default_precision(instruction: XlaMessage) -> bool:
    return instruction.opcode in _MULTIPLIED and not _asked(instruction)


def _asked(instruction: XlaMessage) -> int:
    """Return the place in `PRECISIONS` of the most that an operation asks for an operand."""
    return min(max(instruction.precision_config.operand_precision, default=0), 2)


def _in_passes(
    editor: Editor, instruction: XlaMessage, operands: Sequence[XlaMessage]
) -> Sequence[XlaMessage]:
    passes = _PASSES[PRECISIONS[_asked(instruction)]]
    steps = Steps(editor, instruction)
    depth = 1 + max(part for pair in passes for part in pair)
    left, right = (_parts(steps, operand, depth) for operand in operands)
    total: XlaMessage | None = None
    for first, second in passes:
        product = steps.add_twin(instruction, [left[first], right[second]])
        if total is not None:
            if (first, second) == (0, 0):
                total = _finite_or_zero(steps, total)
            product = steps.add("add", product.shape, total, product)
        total = product
    return steps.stand_for(instruction)


def _finite_or_zero(steps: Steps, value: XlaMessage) -> XlaMessage:
    """Add what drops the small products of an infinity, which has no rest."""
    flags = copy_of(value.shape)
    flags.element_type = _PRED
    finite = steps.add("is-finite", flags, value)
    return steps.add(
        "select", value.shape, finite, value, steps.add_filled(np.float32(0), value.shape)
    )


def _parts(steps: Steps, value: XlaMessage, depth: int) -> list[XlaMessage]:
    """Add what splits a value into ``depth`` bfloat16 parts; return the parts."""
    parts = []
    remainder = value
    for number in range(depth):
        # Not two conversions, which XLA takes to be superfluous.
        part = steps.add("reduce-precision", value.shape, remainder)
        part.exponent_bits, part.mantissa_bits = 8, 7
        parts.append(part)
        if number + 1 < depth:
            remainder = steps.add("subtract", value.shape, remainder, part)
    return parts
