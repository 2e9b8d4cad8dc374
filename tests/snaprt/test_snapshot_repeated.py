"""Small files of one program are put together of what they have in common: nobody can tell."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recordings import recorded

import snaprt
from snaprt.snapshot.format import repeated


def test_each_of_many_executions_has_its_own_values_numbers_and_surroundings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = jax.jit(lambda x, y: (x * y, x.sum()))
    given = []
    with snaprt.record(when="all", folder=tmp_path):
        for number in range(40):
            monkeypatch.setenv("JAX_TRACEBACK_FILTERING", "off" if number < 20 else "auto")
            x = np.random.default_rng(number).normal(size=[(3,), (40, 50)][number % 2])
            y = jnp.asarray(2.0) if number % 4 < 2 else jnp.float32(3)  # weakly typed, and not
            x = jnp.asarray(x, jnp.float32)
            given.append((x, y, step(x, y)))
            snaprt.mark_step()
    inputs, outputs = recorded(tmp_path, "inputs"), recorded(tmp_path, "outputs")
    assert len(inputs) == len(outputs) == 40
    counts: dict[int, int] = {}
    for number, ((x, y, results), before, after) in enumerate(
        zip(given, inputs, outputs, strict=True)
    ):
        for snapshot, expected in ((before, (x, y)), (after, results)):
            execution = snapshot.manifest.execution
            assert execution.environment["JAX_TRACEBACK_FILTERING"] == (
                "off" if number < 20 else "auto"
            )
            assert execution.step == inputs[0].manifest.execution.step + number
            for record, value in zip(snapshot.manifest.arrays, expected, strict=True):
                assert np.array_equal(snapshot.array(record.name), value)
                assert record.weak_type == value.weak_type
        execution = before.manifest.execution
        count = counts.setdefault(execution.executable, 0)
        assert execution.execution_count == after.manifest.execution.execution_count == count
        counts[execution.executable] += 1
    assert len(counts) == 4


def test_a_file_whose_arrays_become_compressible_is_small_again_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeated, "_MOST_USES", 3)
    double = jax.jit(lambda x: x * 2)
    with snaprt.record(when="all", folder=tmp_path):
        for number in range(12):
            x = np.random.default_rng(0).normal(size=3000) if number < 2 else np.ones(3000)
            double(jnp.asarray(x, jnp.float32))
    found = [one.manifest.arrays[0].compression for one in recorded(tmp_path, "inputs")]
    assert found[:2] == ["none", "none"]
    assert found[-1] == "zstd"
