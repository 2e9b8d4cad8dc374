"""A second process finds what the first compiled, and repeats its steps as the first does."""

import copy
import json
import pickle

import jax
import numpy as np
import pytest
from programs import run_program

import snaprt
from snaprt import jaxapi
from snaprt.jaxapi.compiler.compilation_cache import _without_names
from snaprt.jaxapi.compiler.modules import bytecode_without_locations

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


# What is loaded first, and takes longest, is asked for last.
OVERTAKING = r"""
import json, sys, jax, jax.numpy as jnp, snaprt
from snaprt import metrics

def large(x):
    for _ in range(30):
        x = jnp.sin(x @ x) + jnp.cumsum(x, axis=0)
    return x

def small(x):
    return x + 2

results = []
with snaprt.lazy():
    for function in (large, small) if sys.argv[1] == "first" else (small, large):
        results.append(float(function(jnp.ones((4, 4)))[0, 0]))
print(json.dumps([sorted(results), metrics.counter_value("PersistentCacheMiss") or 0]))
"""


def test_a_program_that_asks_for_another_executable_first_does_not_wait_in_vain(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("SNAPRT_CACHE_DIR", str(tmp_path / "cache"))
    script = tmp_path / "script.py"
    script.write_text(OVERTAKING)
    runs = []
    for order in ("first", "again"):
        runs.append(json.loads(run_program(script, order).stdout))
    (cold, missed), (warm, missed_again) = runs
    assert cold == warm
    assert (missed, missed_again) == (2, 0)


UNDER_JIT = r"""
import json, time, jax, jax.numpy as jnp, snaprt
from snaprt import metrics

snaprt.cache.install()
step = jax.jit(lambda x: jnp.sin(x @ x) + jax.nn.softmax(x))
x = jax.device_put(jnp.arange(16.0).reshape(4, 4))
deadline = time.monotonic() + (60 if __import__("sys").argv[1] == "warm" else 0)
while not (metrics.counter_value("Prefetched") or 0) >= 3 and time.monotonic() < deadline:
    time.sleep(0.01)
result = step(x)
names = ("PersistentCacheHit", "PersistentCacheMiss", "Prefetched", "PrefetchUsed")
counts = {name: metrics.counter_value(name) or 0 for name in names}
read = metrics.metric_data("PersistentCacheReadBytes")
print(json.dumps({"sum": float(result.sum()), "read": read[1] if read else 0, **counts}))
"""


def test_under_jax_jit_executables_are_loaded_before_they_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("SNAPRT_CACHE_DIR", str(tmp_path / "cache"))
    script = tmp_path / "script.py"
    script.write_text(UNDER_JIT)
    cold, warm = [json.loads(run_program(script, kind).stdout) for kind in ("cold", "warm")]
    assert warm["sum"] == cold["sum"]
    assert (cold["PersistentCacheHit"], cold["Prefetched"]) == (0, 0)
    assert (warm["PersistentCacheHit"], warm["PersistentCacheMiss"]) == (
        cold["PersistentCacheMiss"],
        0,
    )
    assert 1 <= warm["PrefetchUsed"] <= warm["Prefetched"]
    assert warm["read"] > 0


def test_a_warm_process_loads_each_program_once_and_compiles_none(tmp_path, monkeypatch):
    monkeypatch.setenv("SNAPRT_CACHE_DIR", str(tmp_path / "cache"))
    runs = [json.loads(run_program(PROGRAM).stdout) for _ in range(2)]
    (cold_loss, *cold), (warm_loss, *warm) = runs
    # Two programs, of which the second runs five times.
    assert cold == [0, 2, 2, 4]
    assert warm == [2, 0, 0, 6]
    assert cold_loss == warm_loss


def test_what_jaxs_own_cache_has_is_compiled_for_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "of jax"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    losses = set()
    for mode, cache in [("off", "none"), ("read-write", "filled"), ("read-write", "filled")]:
        monkeypatch.setenv("SNAPRT_CACHE_MODE", mode)
        monkeypatch.setenv("SNAPRT_CACHE_DIR", str(tmp_path / cache))
        loss, *_ = json.loads(run_program(PROGRAM).stdout)
        losses.add(loss)
    assert len(losses) == 1
    assert any("lazy_graph" in path.name for path in (tmp_path / "of jax").iterdir())


# XLA reads XLA_FLAGS once: what is in the environment later is not in effect.
FLAGS_TAKEN_AWAY = r"""
import hashlib, json, os, sys, jax

jax.devices()
os.environ.pop("XLA_FLAGS", None)
import jax.numpy as jnp, numpy as np, snaprt
from snaprt import metrics

x = np.linspace(-3, 3, 1001, dtype=np.float32)
with snaprt.lazy():
    y = np.asarray(jnp.tanh(jnp.asarray(x) * 1.7) / jnp.exp(x))
hits = metrics.counter_value("PersistentCacheHit") or 0
print(json.dumps([hashlib.sha256(y.tobytes()).hexdigest(), hits]))
"""


def test_flags_that_xla_parsed_tell_programs_apart_after_they_left_the_environment(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("SNAPRT_CACHE_DIR", str(tmp_path / "cache"))
    script = tmp_path / "script.py"
    script.write_text(FLAGS_TAKEN_AWAY)
    runs = []
    honored = ("nans", "infs", "functions", "division")
    fast = " ".join(f"--xla_cpu_fast_math_honor_{what}=false" for what in honored)
    for flags in (f"--xla_cpu_enable_fast_math=true {fast}", "", ""):
        runs.append(json.loads(run_program(script, XLA_FLAGS=flags).stdout))
    (fast_values, _), (values, hits), (values_again, hits_again) = runs
    assert fast_values != values == values_again
    assert (hits, hits_again) == (0, 1)


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_types_of_keys_that_are_loaded_are_those_that_jax_knows(implementation):
    kind = jax.random.key(0, impl=implementation).dtype
    for loaded in (pickle.loads(pickle.dumps(kind)), copy.deepcopy(kind)):
        assert loaded == kind
        assert loaded._impl is kind._impl  # jax.random.poisson takes no copy


def test_the_type_of_a_users_own_keys_is_loaded_by_its_functions():
    own = jax.random.key(0).dtype._impl._replace(name="own", tag="own")
    assert pickle.loads(pickle.dumps(own)) == own


def test_key_types_that_share_a_module_do_not_share_an_executable(tmp_path, monkeypatch):
    monkeypatch.setenv("SNAPRT_CACHE_DIR", str(tmp_path / "cache"))
    for implementation in ("rbg", "unsafe_rbg", "rbg"):
        key = jax.random.key(0, impl=implementation)
        eager = np.asarray(jax.random.uniform(key, (3,)))
        with snaprt.lazy():
            drawn = jax.random.uniform(key, (3,))
            assert np.array_equal(np.asarray(drawn), eager)


def calls_of_two(first: str, second: str, operations: tuple[str, str]) -> bytes:
    def function(name: str, operation: str) -> str:
        return (
            f'func.func private @"{name}"(%x: tensor<f32>) -> tensor<f32> {{\n'
            f"%y = stablehlo.{operation} %x : tensor<f32>\nreturn %y : tensor<f32>\n}}\n"
        )

    module = jaxapi.parse_module(
        "module @m {\nfunc.func public @main(%x: tensor<f32>) -> tensor<f32> {\n"
        f'%y = call @"{first}"(%x) : (tensor<f32>) -> tensor<f32>\n'
        f'%z = call @"{second}"(%y) : (tensor<f32>) -> tensor<f32>\n'
        "return %z : tensor<f32>\n}\n"
        f"{function(first, operations[0])}{function(second, operations[1])}}}"
    )
    return bytecode_without_locations(_without_names(module))


@pytest.mark.parametrize("names", [("f", "snaprt.0"), ("snaprt.1", "snaprt.0"), ("__0", "__1")])
def test_a_function_with_a_name_of_ours_is_told_from_the_one_that_gets_it(names):
    plain = calls_of_two("f", "g", ("sine", "cosine"))
    assert calls_of_two(*names, ("sine", "cosine")) == plain
    assert calls_of_two(*names, ("cosine", "sine")) != plain
    assert calls_of_two(*names, ("cosine", "cosine")) != plain
