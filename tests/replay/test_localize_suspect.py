"""A recorded infinity that the searched program does not show once XLA has simplified it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from snaprt_replay.load import sniff
from snaprt_replay.load.case import Case, name_arrays
from snaprt_replay.localize.pipeline import LocalizeRequest, localize
from snaprt_replay.localize.suspect import nonfinite_suspect
from snaprt_replay.minify.pipeline import MinifyRequest, minify
from snaprt_replay.run.variants.variants import parse_variant
from snaprt_replay.run.workers import Workers

# XLA divides once, by the product of the divisors, which is 1.
SIMPLIFIED = """
func.func @main(%x: tensor<f32>, %small: tensor<f32>, %large: tensor<f32>) -> tensor<f32> {
  %0 = stablehlo.divide %x, %small : tensor<f32>
  %1 = stablehlo.divide %0, %large : tensor<f32>
  return %1 : tensor<f32>
}
"""


@pytest.fixture
def case() -> Case:
    inputs = name_arrays([np.asarray(value, np.float32) for value in (1e30, 1e-30, 1e30)], "arg")
    outputs = name_arrays([np.asarray(np.inf, np.float32)], "out")
    return Case(Path("t.mlir"), sniff.MLIR_TEXT, "t", SIMPLIFIED.encode(), inputs, outputs)


def test_a_recorded_infinity_is_found_one_operation_at_a_time(case: Case) -> None:
    found = localize(case)
    assert [place.opcode for place in found.instructions] == ["divide"]
    assert found.suspect == "op-by-op"
    assert any("cpu does not reproduce the NaN or infinity" in note for note in found.notes)


def test_a_recorded_infinity_is_minified_one_operation_at_a_time(
    case: Case, tmp_path: Path
) -> None:
    minified = minify(case, MinifyRequest("nan"), tmp_path / "out")
    assert minified is not None
    assert minified.shrunk.candidate.instructions == 1
    assert any("side A is op-by-op" in note for note in minified.notes)


def test_the_side_that_was_asked_for_is_kept(case: Case) -> None:
    assert localize(case, LocalizeRequest(parse_variant("cpu"))).suspect == "cpu"


def test_a_difference_is_searched_where_it_was_recorded(case: Case) -> None:
    assert localize(case, LocalizeRequest(find="difference")).suspect == "cpu"


def test_what_no_way_to_run_it_reproduces_leaves_the_side_as_it_is(
    case: Case, workers: Workers
) -> None:
    ones = name_arrays([np.asarray(1, np.float32)] * 3, "arg")
    suspect, notes = nonfinite_suspect(dataclasses.replace(case, inputs=ones), None, workers.submit)
    assert (suspect.text, notes) == ("cpu", ())
