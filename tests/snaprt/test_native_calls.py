"""Programs that call native functions, or Python: across processes, from the cache, replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback
from programs import SNAPRT, run_program
from recordings import record

from snaprt import jaxapi

# Each function is a program of its own: a second process must run it without having lowered any.
LINEAR_ALGEBRA = r"""
import json, sys, jax, jax.numpy as jnp, jax.scipy.linalg as jsl, numpy as np, snaprt
from snaprt import metrics

def seed(n):
    return jax.random.key(n)

a = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
s = a @ a.T + 4 * np.eye(4, dtype=np.float32)
b = np.arange(4, dtype=np.float32)
FUNCTIONS = {
    "cholesky": lambda: jnp.linalg.cholesky(s),
    "qr": lambda: jnp.linalg.qr(a)[1],
    "eigh": lambda: jnp.linalg.eigh(s)[0],
    "svd": lambda: jnp.linalg.svd(a)[1],
    "lu": lambda: jsl.lu(a)[2],
    "solve": lambda: jnp.linalg.solve(a, b),
    "inv": lambda: jnp.linalg.inv(a),
    "eig": lambda: jnp.abs(jnp.linalg.eig(a)[0]),
    "schur": lambda: jsl.schur(a)[0],
    "triangular_solve": lambda: jsl.solve_triangular(s, b),
    "lstsq": lambda: jnp.linalg.lstsq(a, b)[0],
    "multivariate_normal": lambda: jax.random.multivariate_normal(seed(0), b, s),
    "orthogonal": lambda: jax.random.orthogonal(seed(1), 4),
}
results = {}
with snaprt.lazy():
    if "scipy" in sys.argv:  # while a thread prefetches what needs it, too
        jax.devices()
        import scipy.linalg
    for name, function in FUNCTIONS.items():
        value = function()
        snaprt.mark_step()
        results[name] = np.asarray(value).tolist()
names = ("PersistentCacheMiss", "LoweringSkipped")
print(json.dumps([results, [metrics.counter_value(name) or 0 for name in names]]))
"""


def run(script: Path, *words: str, **environment: str) -> Any:
    """Run a script that prints JSON in its last line, and return that."""
    done = run_program(script, *words, timeout=300, **environment)
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_start_runs_what_calls_lapack_without_lowering_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_CACHE_DIR", str(tmp_path / "cache"))
    script = tmp_path / "script.py"
    script.write_text(LINEAR_ALGEBRA)
    cold, (missed, _) = run(script)
    assert missed >= len(cold) == 13
    for prefetch, *words in (("0",), ("1",), ("1", "scipy")):
        warm, (missed, skipped) = run(script, *words, SNAPRT_PREFETCH=prefetch)
        assert warm == cold
        assert missed == 0
        assert skipped >= len(cold)


# Registers a kernel of LAPACK's under another name, as a user's library does with its own.
FOREIGN = r"""
import json, sys, jax, numpy as np, snaprt
from jaxlib import lapack
from snaprt import metrics

if "register" in sys.argv:
    kernels = {name: kernel for name, kernel, _ in lapack.registrations()["cpu"]}
    jax.ffi.register_ffi_target("users_cholesky", kernels["lapack_spotrf_ffi"], platform="cpu")
    lapack._lapack.initialize()

@jax.jit
def cholesky(x):
    shapes = jax.ShapeDtypeStruct((4, 4), np.float32), jax.ShapeDtypeStruct((), np.int32)
    return jax.ffi.ffi_call("users_cholesky", shapes)(x, uplo=np.uint8(ord("L")))[0]

found = None
try:
    with snaprt.lazy():
        found = np.asarray(cholesky(4 * np.eye(4, dtype=np.float32))).tolist()
except snaprt.errors.CompileError as error:
    found = str(error)
names = ("PersistentCacheHit", "PersistentCacheMiss", "PersistentCacheCorrupt")
print(json.dumps([found, *[metrics.counter_value(name) or 0 for name in names]]))
"""


def test_an_executable_whose_function_nobody_registered_is_a_miss_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_CACHE_DIR", str(tmp_path / "cache"))
    script = tmp_path / "script.py"
    script.write_text(FOREIGN)
    (cold, hits, *_) = run(script, "register")
    assert hits == 0
    (message, hits, misses, damaged) = run(script)
    assert (hits, misses, damaged) == (0, 1, 0)
    assert "users_cholesky" in message
    why = run_program((*SNAPRT, "cache", "why", "--last"), status=None)
    assert "calls users_cholesky, which this process has not registered" in " ".join(
        why.stdout.split()
    )
    assert run(script, "register") == [cold, 1, 0, 0]  # the entry has stayed


# Several of each: objects that are gone leave their addresses to the next ones.
PARTITIONED = r"""
import contextlib, gc, json, sys, jax, jax.numpy as jnp, numpy as np, snaprt
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from snaprt import metrics

def scaled_by(factor):
    @custom_partitioning
    def scaled(x):
        return x

    def partition(mesh, arguments, result):
        return mesh, lambda x: x * factor, result.sharding, (arguments[0].sharding,)

    scaled.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda mesh, arguments, result: arguments[0].sharding,
        sharding_rule="i -> i",
    )
    return lambda x: scaled(x) + 1

def seen(x):
    jax.debug.inspect_array_sharding(x, callback=lambda sharding: looks.append(1))
    return x + 2

mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
x = jax.device_put(jnp.ones(2), NamedSharding(mesh, PartitionSpec("a")))
if "jit" in sys.argv:
    snaprt.cache.install()
looks, results = [], []
for factor in range(2, 8):
    with contextlib.nullcontext() if "jit" in sys.argv else snaprt.lazy():
        results.append(float(np.asarray(jax.jit(scaled_by(factor))(x))[0]))
        np.asarray(jax.jit(seen)(x))
    jax.clear_caches()
    gc.collect()
uncacheable = metrics.counter_value("PersistentCacheUncacheable") or 0
print(json.dumps([results, bool(looks), uncacheable >= 6]))
"""


@pytest.mark.parametrize("how", ["lazily", "jit"])
def test_what_names_python_objects_by_address_is_not_taken_from_the_cache(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    script = tmp_path / "script.py"
    script.write_text(PARTITIONED)
    for _ in range(2):
        assert run(script, how) == [[3.0, 4.0, 5.0, 6.0, 7.0, 8.0], True, True]


COMPILER_PASS = r"""
import json, jax, jax.numpy as jnp, numpy as np, snaprt
from jax.extend import xla
from snaprt import metrics

stored = []

def run(size):
    with snaprt.lazy():
        np.asarray(jnp.arange(size) * 2)
    stored.append(metrics.counter_value("PersistentCachePut") or 0)

run(2)
xla.register_hlo_module_transformation(lambda module: None, name="mine", platforms="cpu")
run(3)
xla.clear_hlo_module_transformation(name="mine", platforms="cpu")
run(4)
print(json.dumps(stored))
"""


@pytest.mark.skipif(jax.version.__version_info__ < (0, 12), reason="JAX has no passes of users")
def test_programs_that_a_pass_of_the_user_may_change_are_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_CACHE_DIR", str(tmp_path / "cache"))
    script = tmp_path / "script.py"
    script.write_text(COMPILER_PASS)
    assert run(script) == [1, 1, 2]


def calls_of(target: str, configuration: str = '""') -> jaxapi.CustomCalls:
    return jaxapi.custom_calls(
        jaxapi.parse_module(
            "func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {\n"
            f"%y = stablehlo.custom_call @{target}(%x) {{backend_config = {configuration}, "
            "api_version = 2 : i32} : (tensor<2xf32>) -> tensor<2xf32>\n"
            "return %y : tensor<2xf32>\n}"
        )
    )


@pytest.mark.parametrize(
    "target",
    [
        "CustomSPMDPartitioning",
        "InspectSharding",
        "xla_buffer_python_cpu_callback",
        "xla_ffi_partitioned_python_gpu_callback",
        "xla_ffi_python_cpu_callback",
        "xla_python_cpu_callback",
    ],
)
def test_a_module_that_calls_python_is_bound_to_its_process(target: str) -> None:
    assert "Python" in calls_of(target).bound_to


def test_an_address_in_a_configuration_binds_a_module_to_its_process() -> None:
    held = bytearray(1 << 20)
    assert calls_of("kernel", f'"state={id(held)}"').bound_to
    assert calls_of("kernel", f'"state={id(held):#x}"').bound_to
    assert calls_of("kernel", f'"{{\\22state\\22: \\22{id(held)}\\22}}"').bound_to
    for harmless in ("seed=1234567890123456", "version=0000000001", "0x00000001"):
        assert calls_of("kernel", f'"{harmless}"') == jaxapi.CustomCalls(("kernel",))


def test_a_function_that_xla_has_itself_need_not_be_registered() -> None:
    jax.devices()
    names = "Sharding", "lapack_spotrf_ffi"
    assert jaxapi.functions_of_process(names, "cpu") == ("lapack_spotrf_ffi",)
    assert jaxapi.make_available(["lapack_spotrf_ffi", "cpu_csr_sparse_dense_ffi"], "cpu") == ()
    assert jaxapi.make_available(["no_such_function"], "cpu") == ("no_such_function",)


def callback(x: jax.Array) -> Any:
    return jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct((2,), "float32"), x)


def counting(x: jax.Array) -> Any:
    return io_callback(lambda v: v, jax.ShapeDtypeStruct((2,), "float32"), x, ordered=True)


def test_programs_with_a_callback_are_refused_at_replay_with_status_2(tmp_path: Path) -> None:
    paths = []
    for function in (callback, counting):
        (tmp_path / function.__name__).mkdir()
        paths.append(record(tmp_path / function.__name__, function, {"x": jnp.ones(2)}))
    # In a process of its own: where they are not refused, XLA ends it.
    done = run_program((*SNAPRT, "replay"), *paths, status=2)
    refused = "needs a Python callback, which exists only in the process that recorded it"
    assert done.stderr.count(refused) == len(paths), done.stderr
