"""What proves which executable ran: recorded, shown, and compared when it is replayed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from several_devices import write_anew
from snaprt_replay.batch import ReplayRequest, replay_files
from snaprt_replay.compare.results import IDENTICAL
from snaprt_replay.run.rerun import replay
from snaprt_replay.run.variants.variants import parse_variant

from snaprt import jaxapi
from snaprt.cli.main import main
from snaprt.graph.artifacts import proof_of
from snaprt.snapshot.format.read import open_snapshot, sibling_outputs
from snaprt.snapshot.recorder import describe

OLD = Path(__file__).parents[1] / "support" / "snapshots" / "format-1.0.inputs.snap"


@pytest.fixture
def changed(recorded: Path, tmp_path: Path) -> Callable[..., Path]:
    """Copy the recorded pair, with other words about what ran."""

    def copy(proof: dict[str, Any] | None = None, **execution: Any) -> Path:
        for path in (recorded, sibling_outputs(recorded)):
            assert path is not None
            manifest = open_snapshot(path).manifest
            write_anew(
                path,
                tmp_path / path.name,
                execution=execution,
                proof=dataclasses.replace(manifest.proof, **(proof or {})),
            )
        return tmp_path / recorded.name

    return copy


def test_a_snapshot_says_which_executable_ran(recorded: Path) -> None:
    manifest = open_snapshot(recorded).manifest
    assert len(manifest.proof.optimised_hlo) == 64
    assert manifest.proof.fingerprint
    assert manifest.execution.processor == describe.processor("cpu")
    assert describe.processor("cpu")


def test_a_replay_where_it_was_recorded_makes_the_same_executable(recorded: Path) -> None:
    result = replay(recorded)
    assert result.warnings == ()
    proof = open_snapshot(recorded).manifest.proof
    assert result.played.environment["optimised_hlo"] == proof.optimised_hlo


def test_in_a_process_of_its_own_it_makes_the_same_executable_too(recorded: Path) -> None:
    request = ReplayRequest(variant=parse_variant("default"), isolated=True)
    ((_, report),) = replay_files([recorded], request)
    assert report.headline.word == "MATCH"
    assert report.warnings == ()


@pytest.fixture
def of_a_newer_jaxlib(recorded: Path, tmp_path: Path) -> Path:
    """Return a snapshot whose StableHLO has an operation that nobody knows here."""
    unknown = b"ML\xefR\rStableHLO_v99.0.0\x00 and more"
    for path in (recorded, sibling_outputs(recorded)):
        assert path is not None
        file = open_snapshot(path)
        write_anew(
            path,
            tmp_path / path.name,
            module=dataclasses.replace(file.module, stablehlo=unknown),
            execution={"versions": {**file.manifest.execution.versions, "jaxlib": "99.0"}},
        )
    return tmp_path / recorded.name


def test_a_module_in_a_newer_stablehlo_is_replayed_from_its_hlo(
    of_a_newer_jaxlib: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = replay(of_a_newer_jaxlib)
    assert result.comparison is not None
    assert result.comparison.verdict == IDENTICAL
    assert "using its HLO instead" in result.case.notes[0]
    assert main(["inspect", str(of_a_newer_jaxlib), "--stablehlo"]) == 0
    told = capfd.readouterr()
    assert "stablehlo.tanh" in told.out
    assert told.err == ""


def test_a_module_in_a_newer_stablehlo_cannot_be_redacted(
    of_a_newer_jaxlib: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--redact", "names", "-o", str(tmp_path / "out.pack")]
    assert main(["pack", str(of_a_newer_jaxlib), *words]) == 2
    assert "hint: redact it with jaxlib 99.0" in capfd.readouterr().err


def test_every_difference_is_told_and_none_is_a_failure(
    changed: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    path = changed(
        {"optimised_hlo": "0" * 64, "aliases": ("0 <- 1",)},
        versions={"jaxlib": "0.9.9", "snaprt": "99"},
        xla_flags="--xla_cpu_enable_fast_math=true",
        device=dataclasses.replace(open_snapshot_device(changed), kind="TPU v9"),
        driver="NVRM version: 999",
        processor="Z80",
    )
    assert main(["replay", "--json", str(path)]) == 0
    (file,) = json.loads(capfd.readouterr().out)["reports"]
    told = "\n".join(file["warnings"])
    for words in (
        "jaxlib 0.9.9, replayed with",
        "device 'TPU v9', replayed with cpu",
        "driver 'NVRM version: 999', replayed without it",
        "processor Z80",
        "XLA_FLAGS --xla_cpu_enable_fast_math=true, replayed with ''",
        "aliases (result <- parameter) '0 <- 1'",
        "optimized HLO 0000000000000000, replayed with ",
    ):
        assert words in told
    assert main(["replay", str(path)]) == 0
    assert "warning: recorded with optimized HLO 0000000000000000" in capfd.readouterr().out


def open_snapshot_device(changed: Callable[..., Path]) -> Any:
    return open_snapshot(changed()).manifest.execution.device


def test_inspect_shows_what_proves_what_ran(
    recorded: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(recorded)]) == 0
    told = capfd.readouterr().out
    proof = open_snapshot(recorded).manifest.proof
    assert proof.fingerprint in told
    assert proof.optimised_hlo in told
    assert "processor" in told


def test_inspect_says_why_it_was_recorded_and_what_it_ended_with(
    changed: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    path = changed(reason="error, rank=master", error="ValueError: boom\n\nTraceback ...")
    assert main(["inspect", str(path)]) == 0
    told = capfd.readouterr().out
    assert "error, rank=master" in told
    assert "ValueError: boom\n" in told
    assert "Traceback ..." in told
    assert main(["replay", str(path)]) == 0
    assert "note: recorded when this was raised: ValueError: boom\n" in capfd.readouterr().out


def test_a_file_of_format_1_0_replays_without_what_it_does_not_know() -> None:
    result = replay(OLD)
    assert result.comparison is not None
    assert not result.mismatch
    assert not any("optimized HLO" in one or "processor" in one for one in result.warnings)


def test_the_proof_is_the_same_wherever_the_source_lies() -> None:
    def proof(source: str) -> Any:
        names: dict[str, Any] = {"jnp": jnp}
        exec(compile(source, "train.py", "exec"), names)
        return proof_of(jaxapi.loaded_executable(jax.jit(names["f"]).lower(jnp.ones(3)).compile()))

    one = proof("def f(x): return jnp.tanh(x) + 1")
    moved = proof("\n\n\ndef f(x):\n  return jnp.tanh(x) + 1")
    assert moved.optimised_hlo == one.optimised_hlo
    assert proof("def f(x): return jnp.tanh(x) + 2").optimised_hlo != one.optimised_hlo


@pytest.mark.parametrize(("size", "is_shown"), [(100, True), (100_000, False)])
def test_the_proof_shows_the_values_of_constants_unless_they_would_take_long_to_print(
    size: int, is_shown: bool
) -> None:
    def proof(seed: int) -> str:
        values = np.random.default_rng(seed).standard_normal(size, np.float32)
        compiled = jax.jit(lambda x: x * values).lower(jnp.ones(size)).compile()
        return proof_of(jaxapi.loaded_executable(compiled)).optimised_hlo

    assert proof(0) == proof(0)
    assert (proof(0) != proof(1)) is is_shown


def test_aliases_name_the_parameters_whose_memory_results_take() -> None:
    def step(weights: jax.Array, gradient: jax.Array, count: jax.Array) -> Any:
        return count + 1, weights - gradient

    donating = jax.jit(step, donate_argnums=(0, 2))
    compiled = donating.lower(jnp.ones((4, 4)), jnp.ones((4, 4)), jnp.int32(0)).compile()
    assert proof_of(jaxapi.loaded_executable(compiled)).aliases == ("0 <- 2", "1 <- 0")
    assert proof_of(None).aliases == ()
