"""The processes of a job share what one of them compiled, and hit it at the next start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from programs import SNAPRT, run_program

SCRIPT = """
import jax
jax.distributed.initialize()
import jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("data",))
x = jax.make_array_from_callback((8,), NamedSharding(mesh, P("data")), lambda at: np.arange(8.)[at])
def of_all(x):
    return jnp.sum(jnp.tanh(x))
def of_one(x):
    return jnp.sum(jnp.sin(x))
print(float(jax.jit(of_all)(x)), float(jax.jit(of_one)(np.arange(3.0))))
"""


@pytest.mark.parametrize("mode", ["jit", "lazy"])
def test_a_program_of_all_is_compiled_by_one_and_a_second_start_compiles_nothing(
    tmp_path: Path, mode: str
):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    counts = []
    skipped = []
    printed = set()
    for start in ("cold", "warm"):
        done = run_program(
            (*SNAPRT, "launch", "-n", "2", *(["--lazy"] if mode == "lazy" else [])),
            *("--metrics", tmp_path / start, "--", script),
            SNAPRT_CACHE_DIR=tmp_path / "cache",
            SNAPRT_JAX_CACHE=int(mode == "jit"),
        )
        printed |= {line[4:] for line in done.stdout.splitlines() if "Gloo" not in line}
        counters = [
            json.loads((tmp_path / f"{start}.{rank}").read_text())["counters"] for rank in (0, 1)
        ]
        counts.append(
            [
                sum(each.get(f"PersistentCache{name}", 0) for each in counters)
                for name in ("Put", "Hit")
            ]
        )
        skipped.append(sum(each.get("LoweringSkipped", 0) for each in counters))
    assert len(printed) == 1
    cold, warm = counts
    # The program over all devices once; those of one device, by each process for itself.
    assert cold == [3, 1], counts
    assert warm == [0, 4], counts
    if mode == "lazy":  # what one has lowered, the other need not
        assert skipped == [1, 4]
