from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from snaprt_replay.compare.verdict import LIMIT, Evidence, Judgement, Yardstick, judge
from snaprt_replay.load.load import load
from snaprt_replay.run.jobs import STABLEHLO, ReplayJob
from snaprt_replay.run.variants.variants import compile_only
from snaprt_replay.run.work import WorkEvent, perform

from snaprt import jaxapi

RANDOM = np.random.default_rng(0)
CENTER = RANDOM.normal(size=(30, 20))
SPREAD = 1e-6


def yardstick(center: np.ndarray = CENTER, spread: float = SPREAD) -> Yardstick:
    samples = [(center + RANDOM.normal(size=center.shape) * spread,) for _ in range(8)]
    return Yardstick("f64", (center,), (center,), samples)


def side(value: np.ndarray, *others: np.ndarray, name: str = "cpu") -> Evidence:
    return Evidence(name, (value,), [(other,) for other in others])


def rounded(scale: float = 1.0) -> np.ndarray:
    return (CENTER + RANDOM.normal(size=CENTER.shape) * SPREAD * scale).astype(np.float32)


def faulty(error: float = 1e-3) -> np.ndarray:
    value = rounded()
    value[3, 4] += error
    return value


def judged(a: np.ndarray, b: np.ndarray, measure: Yardstick | None = None) -> Judgement:
    return judge(side(a), side(b), measure or yardstick(), ["out0"])


def test_two_sides_that_rounding_explains_are_within_rounding() -> None:
    verdict = judged(rounded(), rounded())
    assert verdict.kind == "within rounding"
    assert 0 < verdict.a.score < LIMIT


def test_the_side_with_a_larger_error_is_wrong_and_the_element_is_named() -> None:
    assert judged(rounded(), faulty()).kind == "B is wrong"
    verdict = judged(faulty(), rounded())
    assert verdict.kind == "A is wrong"
    assert verdict.a.outputs[0].worst == (3, 4)
    assert verdict.a.outputs[0].beyond == 1
    assert [verdict.to_json()[letter]["wrong"] for letter in "ab"] == [True, False]
    assert "out0[3,4] is off by 0.00" in verdict.sentence


def test_both_may_be_wrong() -> None:
    assert judged(faulty(), faulty()).kind == "both are wrong"


def test_a_difference_that_rounding_explains_is_ill_conditioning() -> None:
    measure = yardstick(spread=0.1)
    a, b = (CENTER + RANDOM.normal(size=CENTER.shape) * 0.1 for _ in range(2))
    verdict = judged(a.astype(np.float32), b.astype(np.float32), measure)
    assert verdict.kind == "ill-conditioned"
    assert verdict.amplification is not None
    assert verdict.amplification > 1e4


def test_a_side_whose_runs_differ_by_more_than_rounding_does_not_agree_with_itself() -> None:
    verdict = judge(side(rounded(), faulty()), side(rounded()), yardstick(), ["out0"])
    assert verdict.kind == "does not agree with itself"
    assert "A (cpu)" in verdict.sentence
    shaken = judge(side(rounded(), rounded()), side(rounded()), yardstick(), ["out0"])
    assert shaken.kind == "within rounding"
    assert shaken.a.self_score is not None


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_count_on_their_own(value: float) -> None:
    spoilt = rounded()
    spoilt[1, 2] = value
    verdict = judged(rounded(), spoilt)
    assert verdict.kind == "B is wrong"
    assert verdict.b.outputs[0].specials == 1


def test_what_overflows_in_the_programs_type_may_be_infinite() -> None:
    center = CENTER.copy()
    center[0, 0] = 1e40
    sample = center.copy()
    sample[0, 0] = np.inf
    measure = Yardstick("f64", (center,), (center,), [(sample,)])
    with np.errstate(over="ignore"):
        value = center.astype(np.float32)
    assert judged(value, value, measure).kind == "within rounding"


def test_whole_numbers_and_bools_are_exact_unless_rounding_decides_them() -> None:
    center = np.arange(6)
    swapped = np.asarray([0, 1, 2, 4, 3, 5])
    settled = Yardstick("f64", (center,), (center,), [(center,)])
    assert judged(center, swapped, settled).kind == "B is wrong"
    open_question = Yardstick("f64", (center,), (center,), [(swapped,)])
    assert judged(center, swapped, open_question).kind == "ill-conditioned"


def test_without_a_result_there_is_no_verdict_but_the_failure() -> None:
    failed = Evidence("gpu", None, failure="missing device: there is no gpu")
    verdict = judge(failed, side(rounded()), yardstick(), ["out0"])
    assert verdict.kind == "cannot be judged"
    assert "A (gpu) gave no result: missing device" in verdict.sentence
    unmeasured = judge(side(rounded()), side(rounded()), None, ["out0"], ["no reference"])
    assert unmeasured.kind == "cannot be judged"
    assert unmeasured.notes == ("no reference",)


def test_how_far_rounding_moves_is_told_in_ulps_of_the_outputs_size_and_no_more() -> None:
    mostly_zero = np.where(np.arange(CENTER.size).reshape(CENTER.shape) % 3, 0.0, CENTER)
    told = judged(rounded(), rounded(), yardstick(mostly_zero)).amplification
    assert told is not None
    assert 1 < told < 100
    far = judged(rounded(), rounded(), yardstick(CENTER * 1e-20)).amplification
    assert far == 2.0**23
    nothing = np.zeros_like(CENTER)
    assert judged(rounded(), rounded(), yardstick(nothing)).amplification is None


def test_complex_numbers_are_judged_by_component() -> None:
    center = CENTER + 1j
    measure = Yardstick("f64", (center,), (center,), [(center + SPREAD,)])
    value = center.astype(np.complex64)
    wrong = value.copy()
    wrong[2, 2] += 0.5j
    verdict = judged(value, wrong, measure)
    assert verdict.kind == "B is wrong"
    assert verdict.b.outputs[0].worst == (2, 2)


# --- the command ---

Run = Callable[..., tuple[int, str, str]]


def test_the_command_judges_what_was_recorded_file_by_file(
    snaprt: Run, recorded: Path, rewritten: Callable[..., Path]
) -> None:
    def spoil(name: str, value: np.ndarray) -> np.ndarray:
        if value.dtype == np.float32:
            value.reshape(-1)[2] *= 1.01
        return value

    status, out, _ = snaprt(
        *("replay", recorded, rewritten(spoil), "--a", "recorded"),
        *("--b", "cpu,optimization=0", "--repeat", "2"),
    )
    assert status == 1
    assert "WITHIN ROUNDING: both are within rounding" in out
    assert "A IS WRONG: " in out
    assert "all runs gave identical bits" in out


def test_a_side_that_cannot_run_leaves_with_status_2(snaprt: Run, recorded: Path) -> None:
    status, out, _ = snaprt("replay", recorded, "--a", "cpu", "--b", "cpu:77", "--json")
    found = json.loads(out)
    assert (status, found["schema"], found["version"]) == (2, "snaprt.report", 1)
    (file,) = found["reports"]
    assert file["headline"]["word"] == "CANNOT BE JUDGED"
    assert "B (cpu:77) gave no result: missing device" in file["judgement"]["sentence"]
    assert file["runs"]["a"]["device"] == "cpu:0"


def test_a_file_without_outputs_needs_another_side(snaprt: Run, modules: dict[str, Path]) -> None:
    status, _, err = snaprt("replay", next(iter(modules.values())), "--b", "cpu", "--random", "0")
    assert status == 2
    assert "no outputs were recorded" in err
    assert "--a op-by-op" in err


def test_compiling_only_tells_memory_and_cost_and_saves_the_hlo(
    snaprt: Run, modules: dict[str, Path], tmp_path: Path
) -> None:
    module, saved = next(iter(modules.values())), tmp_path / "optimised.hlo.txt"
    words = ("replay", module, "--device", "cpu", "--compile-only", "--save-hlo", saved)
    status, out, _ = snaprt(*words, "--json")
    found = json.loads(out)
    assert (status, found["schema"], found["version"]) == (0, "snaprt.report", 1)
    (file,) = found["reports"]
    assert file["headline"]["word"] == "COMPILES"
    assert file["compiled"]["cost"]["flops"] > 0
    assert "argument_size" in file["compiled"]["memory"]
    assert saved.read_text().startswith("HloModule")
    status, out, _ = snaprt(*words, "--xla-flag", "xla_nope=1")
    assert status == 1
    assert "DOES NOT COMPILE: for cpu: compile error" in out


def test_compiling_only_asks_xla_for_the_optimized_modules_once(
    modules: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_module = jaxapi.compile_module
    asked = []

    class Counted:
        def __init__(self, executable: Any) -> None:
            self._executable = executable

        def __getattr__(self, name: str) -> Any:
            if name == "hlo_modules":
                asked.append(name)
            return getattr(self._executable, name)

    def counted(*arguments: Any) -> Counted:
        return Counted(compile_module(*arguments))

    monkeypatch.setattr(jaxapi, "compile_module", counted)
    case = load(next(iter(modules.values())))
    job = ReplayJob(compile_only("cpu", {}), case.stablehlo, (), form=STABLEHLO)
    told: list[WorkEvent] = []
    perform(job, told.append)
    report = told[0]["report"]
    assert report["hlo"].startswith("HloModule")
    assert report["largest"]
    assert len(asked) == 1


def test_an_unknown_topology_or_no_libtpu_is_an_error_with_a_hint(
    snaprt: Run, modules: dict[str, Path]
) -> None:
    module = next(iter(modules.values()))
    status, _, err = snaprt("replay", module, "--device", "tpu:v99:7x7", "--compile-only")
    assert status == 2
    assert "v99:7x7" in err
    assert "hint: install snaprt[tpu]" in err
