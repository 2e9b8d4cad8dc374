"""Correct programs on the CPU, under flags that do no harm: nobody is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from snaprt_replay.compare.verdict import Judgement
from snaprt_replay.load.load import load
from snaprt_replay.run.trial import PROCESSES, try_case
from snaprt_replay.run.variants.variants import parse_variant
from snaprt_replay.run.workers import Workers
from sound_programs import HARMLESS, KINDS, sound_program

FULL = 200


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(PROCESSES, 120) as processes:
        yield processes


def judged(kind: str, seed: int, folder: Path, workers: Workers) -> Judgement:
    """Return what is said of a program on the CPU without and with a harmless flag."""
    program, arrays = sound_program(kind, seed)
    module, inputs = folder / "module.mlir", folder / "inputs.npz"
    module.write_text(jax.jit(program, keep_unused=True).lower(*arrays).as_text())
    np.savez(inputs, *arrays)
    flagged = parse_variant(HARMLESS[seed % len(HARMLESS)])
    plain = parse_variant("cpu")
    return try_case(load(module, inputs), plain, flagged, workers=workers).judgement


@pytest.mark.parametrize("kind", ["branches", "mlp", "order", "spectrum"])
def test_a_correct_program_under_a_harmless_flag_is_not_called_wrong(
    kind: str, tmp_path: Path, workers: Workers
) -> None:
    verdict = judged(kind, 1, tmp_path, workers)
    assert verdict.kind in ("within rounding", "ill-conditioned"), verdict.sentence


@pytest.mark.full
@pytest.mark.parametrize("number", range(FULL))
def test_none_of_200_correct_programs_is_called_wrong(
    number: int, tmp_path: Path, workers: Workers
) -> None:
    kind = sorted(KINDS)[number % len(KINDS)]
    verdict = judged(kind, number // len(KINDS), tmp_path, workers)
    assert verdict.kind in ("within rounding", "ill-conditioned"), verdict.sentence
