"""Offer programs that are nearly the failing one, and may pass; it must not know which do.

What makes a failure go says more about it than what does not: an option of the compiler, other
values. Where nothing does, the program that it is compared with is the nearest there is.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from snaprt_replay.load.case import Signature
from snaprt_replay.load.modules import random_inputs
from snaprt_replay.minify.candidate import Candidate, changed
from snaprt_replay.minify.views.flags import with_text
from snaprt_replay.run.variants.variants import with_options

_VIEW = "neighbor"
_UNOPTIMIZED = {"xla_backend_optimization_level": 0}


def neighbors(candidate: Candidate) -> Iterator[Candidate]:
    """Yield programs that differ in one thing, nearest first."""
    if candidate.variants and candidate.variants[0].kind == "device":
        plain = with_text(with_options(candidate.variants[0], _UNOPTIMIZED))
        if plain.options != candidate.variants[0].options:
            variants = (plain, *candidate.variants[1:])
            yield changed(candidate, _VIEW, f"side A on {plain.text}", variants=variants)
    if candidate.expected is None:
        for index, array in enumerate(candidate.inputs):
            (drawn,) = random_inputs(index, [Signature(array.shape, array.dtype)])
            for values, what in ((np.ones_like(array), "all one"), (drawn.value, "random")):
                inputs = list(candidate.inputs)
                inputs[index] = values
                yield changed(candidate, _VIEW, f"input {index} {what}", inputs=inputs)
    if len(candidate.modules) > 1:
        what = "side A running the program of side B"
        yield changed(candidate, _VIEW, what, modules=candidate.modules[1:])
