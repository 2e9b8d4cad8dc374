"""The cache under plain ``jax.jit``: real programs in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import programs
import pytest
from damage import flip_bit
from programs import SNAPRT, start_program
from snaprt_cache import Cache

ROOT = Path(__file__).parents[2]

_PROGRAM = """
import jax, jax.numpy as jnp
{before}

@jax.jit
def {name}(x):
    return {body}

result = float({name}(jnp.arange(16.0).reshape(4, 4))[1, 2])
"""
_SHOWN = """
import json, sys
metrics = sys.modules.get("snaprt.metrics")
counts = {n: metrics.counter_value(n) for n in metrics.counter_names()} if metrics else {}
sums = {n: metrics.metric_data(n)[1] for n in metrics.metric_names()} if metrics else {}
print(json.dumps({"result": result, **counts, **sums}))
"""
_INSTALL = "import snaprt; snaprt.cache.install()"
_BODY = "jnp.where(x > 3, jnp.sin(x) @ x, jax.nn.relu(x))"


def program(name: str = "f", body: str = _BODY, before: str = _INSTALL) -> str:
    return _PROGRAM.format(name=name, body=body, before=before) + _SHOWN


def start(folder: Path, code: str, *words: str, **environment: object) -> subprocess.Popen[str]:
    script = folder / f"script-{abs(hash(code))}.py"
    if not script.exists():  # others may be about to read it
        script.write_text(code)
    taken = [name for name in os.environ if name.startswith(("SNAPRT_", "XLA_", "JAX_"))]
    ours = {"JAX_PLATFORMS": "cpu", "SNAPRT_CACHE_DIR": folder / "cache"} | environment
    return start_program((*words, str(script)), without=taken, **ours)


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    done = programs.finish(process)
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found | {"stderr": done.stderr}


def run(folder: Path, code: str, *words: str, **environment: object) -> dict[str, Any]:
    return finish(start(folder, code, *words, **environment))


def entries_of(folder: Path, name: str) -> list[Any]:
    return [row for row in Cache.open(folder / "cache").entries() if row.name == name]


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("cold")
    return folder, run(folder, program())


def test_a_second_process_finds_what_the_first_compiled_and_both_are_counted(cold) -> None:
    folder, first = cold
    assert first["PersistentCachePut"] == first["PersistentCacheMiss"] >= 1
    assert "PersistentCacheHit" not in first
    stored = Cache.open(folder / "cache").stats()
    second = run(folder, program())
    assert second["result"] == first["result"]
    assert second["PersistentCacheHit"] == first["PersistentCachePut"]
    assert "PersistentCacheMiss" not in second
    assert second["PersistentCacheReadBytes"] == first["PersistentCacheWrittenBytes"] > 0
    assert second["PersistentCacheSavedSeconds"] > 0
    now = Cache.open(folder / "cache").stats()
    assert now.hits == stored.hits + second["PersistentCacheHit"]
    assert now.saved_seconds > stored.saved_seconds
    [entry] = entries_of(folder, "jit_f")
    assert (entry.kind, entry.platform) == ("jit", "cpu")
    assert entry.compile_seconds > 0


def test_names_and_dump_flags_do_not_matter_and_flags_of_the_compiler_do(cold) -> None:
    folder, first = cold
    renamed = program("train_step")
    dumping = f"--xla_dump_to={folder / 'dump'} --xla_dump_hlo_as_text"
    other = run(folder, renamed, XLA_FLAGS=dumping)
    assert other["PersistentCacheHit"] == first["PersistentCachePut"]
    assert "PersistentCacheMiss" not in other
    fast = run(folder, program(), XLA_FLAGS="--xla_cpu_enable_fast_math=true")
    assert fast["PersistentCacheMiss"] == first["PersistentCachePut"]


def test_another_program_of_the_same_shape_misses(cold) -> None:
    folder, first = cold
    other = run(folder, program(body=_BODY.replace("sin", "cos")))
    assert other["PersistentCacheMiss"] == 1
    assert other["result"] != first["result"]


def test_the_key_has_the_parts_that_jax_leaves_out(cold) -> None:
    folder, _ = cold
    cache = Cache.open(folder / "cache")
    header = cache.header(entries_of(folder, "jit_f")[0].key)
    assert header is not None
    parts = {part.name: part.value for part in header.key.parts}
    assert parts["cpu_features"]
    binaries = [value for name, value in parts.items() if name.startswith("binary ")]
    assert binaries
    assert all(len(value) == 64 for value in binaries)


def test_a_damaged_entry_never_reaches_xla_and_is_made_anew(cold) -> None:
    folder, first = cold
    cache = Cache.open(folder / "cache")
    for entry in entries_of(folder, "jit_f"):
        path = cache.blob_path(entry.key)
        flip_bit(path, path.stat().st_size * 2 // 3)
    found = run(folder, program())
    assert found["result"] == first["result"]
    assert found["PersistentCacheCorrupt"] == found["PersistentCachePut"] == 1
    assert run(folder, program())["PersistentCacheHit"] == first["PersistentCachePut"]


def test_processes_that_start_cold_together_compile_each_program_once(tmp_path: Path) -> None:
    processes = [start(tmp_path, program()) for _ in range(4)]
    found = [finish(process) for process in processes]
    assert len({one["result"] for one in found}) == 1
    cache = Cache.open(tmp_path / "cache")
    programs = [row for row in cache.entries() if row.kind == "jit"]
    puts = sum(one.get("PersistentCachePut", 0) for one in found)
    assert cache.stats().puts == len(programs) == puts
    assert list(tmp_path.glob("cache/v1/flight/*")) == []


def test_what_jax_was_told_of_programs_to_leave_out_holds(tmp_path: Path) -> None:
    found = run(tmp_path, program(), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="1000")
    assert found["PersistentCacheMiss"] >= 1
    assert "PersistentCachePut" not in found
    assert list(tmp_path.glob("cache/v1/flight/*")) == []


def test_a_program_that_cannot_be_compiled_keeps_nobody_waiting(tmp_path: Path) -> None:
    body = "jax.lax.custom_linear_solve(lambda v: v, x, lambda a, b: b) + unknown(x)"
    before = (
        _INSTALL
        + """
def unknown(x):
    return jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
"""
    )
    code = program(body=body, before=before)
    for process in (start(tmp_path, code), start(tmp_path, code)):
        err = process.communicate(timeout=120)[1]
        assert process.returncode == 1
        assert "no_such_target" in err
    assert list(tmp_path.glob("cache/v1/flight/*")) == []


_INTERRUPTED = """
from snaprt_cache import Cache

record_miss = Cache.record_miss

def interrupted(*words):
    Cache.record_miss = record_miss
    raise KeyboardInterrupt

Cache.record_miss = interrupted
try:
    jax.jit(lambda x: {body})(jnp.arange(16.0).reshape(4, 4))
except KeyboardInterrupt:
    pass
"""


def test_a_process_does_not_wait_for_itself_after_ctrl_c(tmp_path: Path) -> None:
    code = program("_lambda", before=_INSTALL + _INTERRUPTED.format(body=_BODY))
    found = finish(start(tmp_path, code, SNAPRT_CACHE_WAIT=30))
    assert "PersistentCacheWait" not in found
    assert found["PersistentCachePut"] >= 1


def test_programs_that_call_back_into_python_run_as_ever(tmp_path: Path) -> None:
    body = "jax.pure_callback(lambda y: y + 1, jax.ShapeDtypeStruct(x.shape, x.dtype), x)"
    for _ in range(2):
        assert run(tmp_path, program(body=body))["result"] == 7.0
    assert list(tmp_path.glob("cache/v1/flight/*")) == []


def test_what_runs_lazily_is_stored_once(tmp_path: Path) -> None:
    code = (
        "import jax, jax.numpy as jnp\n"
        + _INSTALL
        + "\nx = jnp.ones((4, 4))\nwith snaprt.lazy():\n    y = jnp.sin(x) @ x\n    y = y + x\n"
        "    snaprt.mark_step()\nresult = float(y[0, 0])\n" + _SHOWN
    )
    run(tmp_path, code)
    rows = Cache.open(tmp_path / "cache").entries()
    assert [row.kind for row in rows if row.name == "jit_program"] == []
    assert len([row for row in rows if row.kind == "compiled"]) == 1


def test_fail_on_miss_fails_in_every_process_and_names_the_program(cold) -> None:
    folder, first = cold
    strict = {"SNAPRT_CACHE_MODE": "fail-on-miss"}
    other = program("other_step", body=_BODY.replace("sin", "tan"))
    failing = [start(folder, other, **strict) for _ in range(2)]
    hitting = start(folder, program(), **strict)
    for process in failing:
        err = process.communicate(timeout=120)[1]
        assert process.returncode == 1
        assert "CacheError: the program 'jit_other_step'" in err
    assert finish(hitting)["result"] == first["result"]


def test_an_environment_variable_is_enough_under_snaprt_run(cold) -> None:
    folder, first = cold
    words = (*SNAPRT, "run")
    plain = program(before="")
    found = run(folder, plain, *words, SNAPRT_JAX_CACHE="1")
    assert found["PersistentCacheHit"] == first["PersistentCachePut"]
    assert "PersistentCacheHit" not in run(folder, plain, *words)


def test_jax_finds_the_cache_itself_where_snaprt_is_installed(cold, tmp_path: Path) -> None:
    folder, first = cold
    installed = tmp_path / "site" / "snaprt-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: snaprt\nVersion: 0\n")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    points = project.partition("[project.entry-points.jax_plugins]\n")[2].partition("\n[")[0]
    written = "[jax_plugins]\n" + points.replace('"', "")
    (installed / "entry_points.txt").write_text(written)
    path = os.pathsep.join([str(installed.parent), *filter(None, sys.path)])
    found = run(folder, program(before=""), SNAPRT_JAX_CACHE="1", PYTHONPATH=path)
    assert found["PersistentCacheHit"] == first["PersistentCachePut"]


def test_a_refused_directory_is_reported_and_the_program_goes_on(cold, tmp_path: Path) -> None:
    folder, first = cold
    unsafe = tmp_path / "unsafe"
    unsafe.mkdir()
    unsafe.chmod(0o777)
    words = (*SNAPRT, "run")
    found = run(
        folder, program(before=""), *words, SNAPRT_JAX_CACHE="1", SNAPRT_CACHE_DIR=str(unsafe)
    )
    assert found["result"] == first["result"]
    assert "chmod -R go-w" in found["stderr"]
