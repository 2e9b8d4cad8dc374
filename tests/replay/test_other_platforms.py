"""Programs that were recorded on another platform: an NVIDIA H100, JAX 0.11.2."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from programs import SNAPRT, run_program
from snaprt_replay.compare.tolerance import ToleranceRequest
from snaprt_replay.load.load import load
from snaprt_replay.run.devices import find_device
from snaprt_replay.run.rerun import replay
from snaprt_replay.run.trial import try_case
from snaprt_replay.run.variants.variants import parse_variant
from snaprt_replay.run.workers import Workers

from snaprt import jaxapi
from snaprt.compile.module import compile_module
from snaprt.errors import CompileError

# A mixture of experts, whose cumulative sum is lowered differently for a GPU.
ON_H100 = Path(__file__).parents[1] / "support" / "snapshots" / "h100-experts.inputs.snap"


def test_a_cumulative_sum_lowered_for_a_gpu_runs_on_a_cpu_in_a_process_of_its_own() -> None:
    assert b"chlo.scan" in load(ON_H100).stablehlo
    result = replay(ON_H100, tolerance=ToleranceRequest(rtol=1e-2, atol=1e-3))
    assert not result.mismatch, result.summary
    assert result.played.isolated


def test_a_mismatch_says_that_a_gpu_multiplies_in_tf32() -> None:
    result = replay(ON_H100)
    assert result.mismatch
    (said,) = (warning for warning in result.warnings if "TF32" in warning)
    assert "record with JAX_DEFAULT_MATMUL_PRECISION=highest" in said


def test_the_sum_of_a_folder_says_so_once(tmp_path: Path) -> None:
    for name in "ab":
        for role in "inputs", "outputs":
            shutil.copy(
                ON_H100.with_name(f"h100-experts.{role}.snap"), tmp_path / f"{name}.{role}.snap"
            )
    done = run_program((*SNAPRT, "replay", str(tmp_path)), status=1)
    said = " ".join(done.stdout.split())
    assert said.count("in TF32") == 1, said
    assert "warning: 2 of 2 files: a GPU multiplies float32 in TF32" in said


@pytest.mark.parametrize("variant", ["op-by-op", "cpu", "tpu-precision=highest"])
def test_it_runs_as_any_variant_and_is_judged(workers: Workers, variant: str) -> None:
    sides = parse_variant("cpu"), parse_variant(variant)
    trial = try_case(load(ON_H100), *sides, workers=workers)
    assert trial.judgement.kind == "within rounding", trial.judgement


def test_a_function_that_only_a_gpu_has_is_named() -> None:
    module = """
    func.func public @main(%0: tensor<2x2xf32>) -> tensor<2x2xf32> {
      %1 = stablehlo.custom_call @cusolver_orgqr_ffi(%0) {api_version = 4 : i32}
        : (tensor<2x2xf32>) -> tensor<2x2xf32>
      return %1 : tensor<2x2xf32>
    }"""
    stablehlo = jaxapi.portable_artifact(jaxapi.parse_module(module))
    with pytest.raises(CompileError) as caught:
        compile_module(stablehlo, device=find_device("cpu"))
    assert "calls cusolver_orgqr_ffi, which is not there on a cpu" in caught.value.hint
