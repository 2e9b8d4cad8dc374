"""Find the compiler pass whose work goes wrong; it must not know how the piece was found.

Called where cutting a piece makes its error vanish: then no instruction is at fault, but what the
compiler makes of several of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from snaprt.errors import ExecutionError
from snaprt_replay.extract import Piece
from snaprt_replay.localise.findings import PassEffect
from snaprt_replay.localise.session import BudgetSpentError, Order, Session, Side, Values
from snaprt_replay.localise.sides import Frame, Pair

# The passes over HLO that change what is computed and how it is rounded, by XLA's own names: those
# of all devices first, then those of the CPU's and the GPU's pipelines.
PASSES: Final = (
    "fusion",
    "algsimp",
    "constant_folding",
    "cse",
    "reshape-mover",
    "dot_decomposer",
    "dot-merger",
    "transpose-folding",
    "simplify-fp-conversions",
    "float-normalization-bf16",
    "while-loop-invariant-code-motion",
    "while-loop-simplifier",
    "simplify-conditional",
    "scatter_expander",
    "logistic-expander",
    "convolution-canonicalization",
    "tree_reduction_rewriter",
    "priority-fusion",
    "multi_output_fusion",
    "gemm-rewriter",
    "cudnn-fused-convolution-rewriter",
)
ADDITIONS: Final = ("optimization=0", *(f"disable-hlo-pass={name}" for name in PASSES))


def try_passes(
    session: Session,
    frame: Frame,
    piece: Piece,
    known: Values,
    whole: Pair,
    vary: Callable[[str], Side],
) -> tuple[PassEffect, ...]:
    """Run a piece without one pass after the other.

    Args:
        session: Runs it.
        frame: Where the piece is from.
        piece: What goes wrong.
        known: The values that it takes.
        whole: What it gave on both sides.
        vary: Gives the suspect side with an addition to its variant.

    Returns:
        What became of the error under each variant, smallest first.
    """
    effects = []
    for addition in ADDITIONS:
        session.tell(f"without a pass: {addition}")
        side = vary(addition)
        try:
            ((values,),) = session.run(Order(side, frame.line, [piece], [known]))
        except BudgetSpentError:
            break
        except ExecutionError as error:
            effects.append(PassEffect(side.name, float("inf"), error.message))
        else:
            effects.append(PassEffect(side.name, Pair(values, whole.reference).error()))
    return tuple(sorted(effects, key=lambda one: one.error))
