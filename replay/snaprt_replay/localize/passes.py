"""Find the compiler pass whose work goes wrong; it must not know how the piece was found.

Called where cutting a piece makes its error vanish: then no instruction is at fault, but what the
compiler makes of several of them. XLA is asked which of its passes change the piece, and runs it
again without each of them.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from snaprt.errors import ExecutionError
from snaprt_replay.hlo.extract import Piece
from snaprt_replay.localize.findings import PassEffect
from snaprt_replay.localize.session import BudgetSpentError, Order, Session, Side, Values
from snaprt_replay.localize.sides import Frame, Pair

_WITHOUT_ANY: Final = "optimization=0"
# Tried where a device's compiler does not say what its passes did.
_USUAL: Final = ("algsimp", "fusion")
# How XLA names what it dumps between passes: module_0001.NAME.0014.PIPELINE.after_X.before_Y.txt
_AFTER: Final = re.compile(r"\.after_([^.]+)\.before_[^.]+\.txt$")
_NO_PASS: Final = "pipeline-start"


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

    def run(side: Side) -> Values:
        ((values,),) = session.run(Order(side, frame.line, [piece], [known]))
        return values

    effects = []
    try:
        names = _passes_that_change(run, vary) or _USUAL
        for addition in (_WITHOUT_ANY, *(f"disable-hlo-pass={name}" for name in names)):
            session.tell(f"with {addition}")
            side = vary(addition)
            try:
                error, failed = Pair(run(side), whole.reference, whole.moved).error(), ""
            except ExecutionError as failure:
                error, failed = math.inf, failure.message
            effects.append(PassEffect(side.name, error, failed))
    except BudgetSpentError:
        pass  # what was tried until then is said
    return tuple(sorted(effects, key=lambda one: one.error))


def _passes_that_change(
    run: Callable[[Side], Values], vary: Callable[[str], Side]
) -> Sequence[str]:
    """Return the names of the passes that change the piece, in order; none if XLA does not say."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(vary(f"xla-flags=--xla_dump_to={folder} --xla_dump_hlo_pass_re=.*"))
        except ExecutionError:
            return ()
        found = [_AFTER.search(path.name) for path in sorted(Path(folder).iterdir())]
    names = dict.fromkeys(one[1] for one in found if one is not None)
    return [name for name in names if name != _NO_PASS]
