"""``snaprt diff``: says in what two executions differ, and in nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recordings import record

Diff = Callable[..., tuple[int, str, str]]


@pytest.fixture
def diff(snaprt: Diff) -> Diff:
    """Return a function that runs ``snaprt diff`` and gives status, stdout and stderr."""
    return partial(snaprt, "diff")


def scale(x: jax.Array, factor: jax.Array) -> jax.Array:
    return x * factor


ARGUMENTS = {"x": jnp.arange(6.0), "factor": jnp.asarray(2.0)}


def test_two_executions_of_one_program_on_one_input_do_not_differ(
    diff: Diff, tmp_path: Path
) -> None:
    first = record(tmp_path, scale, ARGUMENTS)
    second = record(tmp_path, scale, ARGUMENTS, execution_count=7, step=9, time=5.0, run="aaaaaaaa")
    status, out, _ = diff(first, second)
    assert (status, out.splitlines()) == (0, ["3 arrays are identical", "no differences"])
    assert diff(first, first)[0] == 0


def test_inputs_and_outputs_that_differ_are_named_with_by_how_much(
    diff: Diff, tmp_path: Path
) -> None:
    first = record(tmp_path / "a", scale, ARGUMENTS)
    second = record(tmp_path / "b", scale, {**ARGUMENTS, "x": jnp.arange(6.0).at[3].add(0.5)})
    status, out, _ = diff(first, second)
    assert status == 1
    assert "input x float32[6]: 1 of 6 elements differ, by at most 0.5" in out
    assert "output out0 float32[6]: 1 of 6 elements differ, by at most 1" in out
    assert "1 arrays are identical" in out
    told = json.loads(diff(first, second, "--json")[1])
    assert (told["schema"], told["version"], told["differ"]) == ("snaprt.diff", 1, True)
    assert [one["name"] for one in told["arrays"]] == ["x", "out0"]
    assert told["instructions"] == []


def test_where_and_why_they_were_recorded_is_no_difference(diff: Diff, tmp_path: Path) -> None:
    def recorded(folder: str, why: str) -> Path:
        environment = {"SNAPRT_DUMP_DIR": folder, "SNAPRT_RECORD": why, "SNAPRT_RECORD_STOP": why}
        flags = f"--xla_dump_to={folder} --xla_dump_hlo_snapshots"
        return record(tmp_path / folder, scale, ARGUMENTS, environment=environment, xla_flags=flags)

    status, out, _ = diff(recorded("monday", "nan"), recorded("tuesday", "error"))
    assert (status, out.splitlines()[-1]) == (0, "no differences")


def test_flags_versions_and_environment_are_compared_one_by_one(diff: Diff, tmp_path: Path) -> None:
    first = record(tmp_path / "a", scale, ARGUMENTS, xla_flags="--xla_a=1 --xla_b",
                   versions={"jax": "0.10.2"}, environment={"JAX_ENABLE_X64": "1"})  # fmt: skip
    second = record(tmp_path / "b", scale, ARGUMENTS, xla_flags="--xla_a=2 --xla_b",
                    versions={"jax": "0.12.0"}, environment={})  # fmt: skip
    facts = json.loads(diff(first, second, "--json")[1])["facts"]
    assert [tuple(one.values()) for one in facts] == [
        ("version of jax", "0.10.2", "0.12.0"),
        ("XLA flag xla_a", "1", "2"),
        ("environment JAX_ENABLE_X64", "1", ""),
    ]


def test_instructions_are_a_unified_diff_without_source_locations(
    diff: Diff, tmp_path: Path
) -> None:
    def scaled(x: jax.Array, factor: jax.Array) -> jax.Array:
        return x * factor

    scaled.__name__ = "scale"  # the same program from other lines
    first = record(tmp_path / "a", scale, ARGUMENTS)
    assert diff(first, record(tmp_path / "b", scaled, ARGUMENTS))[0] == 0

    def other(x: jax.Array, factor: jax.Array) -> jax.Array:
        return x + factor

    other.__name__ = "scale"
    status, out, _ = diff(first, record(tmp_path / "c", other, ARGUMENTS))
    assert status == 1
    lines = out.splitlines()
    assert any(line.startswith("-") and "stablehlo.multiply" in line for line in lines)
    assert any(line.startswith("+") and "stablehlo.add" in line for line in lines)


def test_large_constants_are_compared_though_not_printed(diff: Diff, tmp_path: Path) -> None:
    def with_table(seed: int) -> Callable[[jax.Array], jax.Array]:
        table = np.random.default_rng(seed).standard_normal(500)

        def add(x: jax.Array) -> jax.Array:
            return x + table.astype(np.float32)

        return add

    argument = {"x": jnp.zeros(500)}
    first, same, other = (
        record(tmp_path / str(number), with_table(seed), argument)
        for number, seed in enumerate((1, 1, 2))
    )
    assert diff(first, same)[0] == 0
    status, out, _ = diff(first, other)
    assert status == 1
    assert out.count("// constant ") == 2


def test_an_array_that_one_side_lacks_is_named(diff: Diff, tmp_path: Path) -> None:
    first = record(tmp_path / "a", lambda x: x, {"x": jnp.zeros(3)})
    second = record(tmp_path / "b", lambda x, y: x + y, {"x": jnp.zeros(3), "y": jnp.zeros(3)})
    status, out, _ = diff(first, second)
    assert status == 1
    assert "input y: is only in B" in out


def test_a_file_that_cannot_be_read_is_an_error(diff: Diff, tmp_path: Path) -> None:
    first = record(tmp_path, scale, ARGUMENTS)
    status, _, err = diff(first, tmp_path / "none.inputs.snap")
    assert status == 2
    assert "there is no file" in err
