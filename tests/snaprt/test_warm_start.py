"""A second process finds what the first compiled, and repeats its steps as the first does."""

import json
import subprocess
import sys

PROGRAM = r"""
import json, jax, jax.numpy as jnp, snaprt
from snaprt import metrics

with snaprt.lazy():
    weights = jnp.ones((8, 8)) * 0.1
    snaprt.mark_step()
    for _ in range(5):
        loss, gradient = jax.value_and_grad(lambda w: jnp.sum(jax.nn.relu(w @ w.T)))(weights)
        weights = weights - 0.1 * gradient
        snaprt.mark_step()
names = ("PersistentCacheHit", "PersistentCacheMiss", "UncachedCompile", "CachedCompile")
print(json.dumps([float(loss), *[metrics.counter_value(name) or 0 for name in names]]))
"""


def test_a_warm_process_loads_each_program_once_and_compiles_none(tmp_path, monkeypatch):
    monkeypatch.setenv("SNAPRT_CACHE_DIR", str(tmp_path / "cache"))
    runs = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True
        )
        runs.append(json.loads(done.stdout))
    (cold_loss, *cold), (warm_loss, *warm) = runs
    # Two programs, of which the second runs five times.
    assert cold == [0, 2, 2, 4]
    assert warm == [2, 0, 0, 6]
    assert cold_loss == warm_loss
