"""What a run would compile is collected, compiled ahead of time, and then found by the run."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import SNAPRT, run_program
from snaprt_cache.store import Cache

from snaprt import jaxapi
from snaprt.cli.main import main
from snaprt.compile.ahead.collect import described, restored

TRAIN = r"""
import json, sys
import jax, jax.numpy as jnp
import snaprt
from snaprt import metrics

weights = jnp.ones((8, 8)) * 0.1
key = jax.random.key(3)
snaprt.mark_step()
for step in range(4):
    loss, gradient = jax.value_and_grad(lambda w: jnp.sum(jax.nn.relu(w @ w.T)))(weights)
    key, now = jax.random.split(key)
    weights = weights - 0.1 / (step + 1) * gradient + 0.01 * jax.random.normal(now, (8, 8))
    snaprt.mark_step()
if len(sys.argv) > 1:
    raise ValueError(f"loss is {float(loss)}")
names = ("UncachedCompile", "PersistentCacheMiss", "LoweringSkipped")
counts = [metrics.counter_value(name) or 0 for name in names]
print(json.dumps({"loss": float(loss).hex(), "counts": counts}))
"""
MODULE = """
func.func public @main(%x: tensor<4x4xf32>) -> tensor<4x4xf32> {
  %y = stablehlo.tanh %x : tensor<4x4xf32>
  return %y : tensor<4x4xf32>
}
"""


def snaprt(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_program((*SNAPRT, *map(str, words)), status=None, **environment)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("train") / "train.py"
    path.write_text(TRAIN)
    return path


@pytest.fixture(scope="module")
def collected(train: Path) -> Path:
    """The programs of two steps of the training."""
    folder = train.parent / "programs"
    done = snaprt("cache", "collect", "--out", folder, "--steps", 2, "--", train)
    assert done.returncode == 0, done.stderr
    assert "Collected 2 programs" in done.stderr
    assert not done.stdout
    return folder


@pytest.fixture
def copied(collected: Path, tmp_path: Path) -> Path:
    """The same with one program, to be changed."""
    source = sorted(collected.glob("*.program.json"))[0]
    content = json.loads(source.read_text())
    (tmp_path / source.name).write_text(source.read_text())
    (tmp_path / content["module"]).write_bytes((collected / content["module"]).read_bytes())
    return tmp_path / source.name


def changed(path: Path, **fields: object) -> Path:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return path


def test_after_collecting_and_warming_a_run_compiles_and_lowers_nothing(train, tmp_path):
    programs, cache = tmp_path / "programs", tmp_path / "cache"
    plain = snaprt("run", "--lazy", "--", train, SNAPRT_CACHE="0")
    done = snaprt("cache", "collect", "--out", programs, "--", train)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["loss"] == "0x0.0p+0"
    wanted = len(list(programs.glob("*.program.json")))

    done = snaprt("cache", "warm", programs, "--target", "cpu", "-j", 2, "--dir", cache, "--json")
    assert done.returncode == 0, done.stderr
    warmed = json.loads(done.stdout)["programs"]
    assert [row["was_there"] for row in warmed] == [False] * wanted
    assert f"[{wanted}/{wanted}]" in done.stderr

    run = snaprt("run", "--lazy", "--", train, SNAPRT_CACHE_DIR=str(cache))
    result = json.loads(run.stdout)
    assert result["counts"] == [0, 0, wanted]
    assert result["loss"] == json.loads(plain.stdout)["loss"]


HOLDS = """
import sys, jax.numpy as jnp, snaprt
x = jnp.ones(1 << 14) + 0
snaprt.mark_step()
held = x if sys.argv[1] == "holds" else None
x = x * 2
snaprt.mark_step()
print(snaprt.metrics.counter_value("UncachedCompile") or 0)
"""


def test_a_run_that_holds_another_array_than_when_it_was_collected_compiles_nothing(tmp_path):
    programs, cache, script = tmp_path / "programs", tmp_path / "cache", tmp_path / "holds.py"
    script.write_text(HOLDS)
    for words in (
        ("collect", "--out", programs, "--", script, "lets go"),
        ("warm", programs, "--target", "cpu", "--dir", cache),
    ):
        assert snaprt("cache", *words).returncode == 0
    run = snaprt("run", "--lazy", "--", script, "holds", SNAPRT_CACHE_DIR=str(cache))
    assert run.stdout == "0\n", run.stderr


def test_what_a_run_wanted_before_an_error_of_its_own_is_kept(train, tmp_path):
    done = snaprt("cache", "collect", "--out", tmp_path / "programs", "--", train, "fail")
    assert done.returncode == 0
    assert "ValueError: loss is 0.0" in done.stderr
    assert "ended with status 1" in done.stderr
    assert list((tmp_path / "programs").glob("*.program.json"))


def test_programs_without_room_cost_one_line_and_the_run_goes_on(train, tmp_path):
    script, programs = tmp_path / "limited.py", tmp_path / "programs"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
    script.write_text(limit + train.read_text())
    done = snaprt(
        *("cache", "collect", "--out", programs, "--", script), PYTHONDONTWRITEBYTECODE="1"
    )
    assert done.returncode == 2
    assert done.stderr.count(f"cannot write programs into {programs}: File too large. ") == 1
    assert "ended with status" not in done.stderr
    assert "could not be compiled" not in done.stderr
    assert "Collected 0 programs" in done.stderr
    assert list(programs.iterdir()) == []


@pytest.mark.parametrize("kind", ["module", "collected"])
def test_a_program_that_the_cache_cannot_store_has_failed(collected, tmp_path, kind):
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "v1").touch()  # in the way of the directory of the entries
    (tmp_path / "module.mlir").write_text(MODULE)
    programs = collected if kind == "collected" else tmp_path / "module.mlir"
    done = snaprt("cache", "warm", programs, "--target", "cpu", "-j", 1, "--dir", cache)
    assert done.returncode == 2
    assert f"  The compile cache in {cache} cannot " in done.stderr
    assert "0 programs compiled for cpu" in done.stderr


def test_a_cache_directory_that_cannot_be_made_is_an_error_before_anything_is_compiled(
    collected, tmp_path
):
    (tmp_path / "file").touch()
    done = snaprt(
        *("cache", "warm", collected, "--target", "cpu", "--dir", tmp_path / "file" / "cache")
    )
    assert done.returncode == 2
    assert f"error: cannot write to {tmp_path / 'file' / 'cache'}: Not a directory" in done.stderr
    assert "compiled" not in done.stderr


def test_a_run_that_wants_nothing_compiled_is_an_error(tmp_path):
    script = tmp_path / "nothing.py"
    script.write_text("print('no jax')")
    done = snaprt("cache", "collect", "--out", tmp_path / "programs", "--", script)
    assert done.returncode == 2
    assert "the program compiled nothing" in done.stderr


def test_one_program_that_cannot_be_warmed_costs_the_others_nothing(collected, copied, tmp_path):
    # XLA ends the process at a flag that it does not know.
    changed(copied, xla_flags=["--xla_no_such_flag=1"])
    done = snaprt("cache", "warm", copied, collected, "--target", "cpu", "--dir", tmp_path / "c")
    assert done.returncode == 2
    assert "the process that compiled it ended with status" in done.stderr
    assert "xla_no_such_flag" in done.stderr
    assert "2 programs compiled for cpu, 0 already in the cache, 1 failed." in done.stderr


def test_a_process_that_cannot_be_started_is_told_as_such(collected, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    words = ("cache", "warm", collected, "--target", "cpu", "--dir", tmp_path / "c")
    assert main([*map(str, words)]) == 2
    said = capfd.readouterr().err
    assert f"cannot start {tmp_path}/python: [Errno 2] No such file" in said
    assert "ended with status" not in said


REFUSED: dict[str, dict[str, object]] = {
    "collected with jax 0.1.2": {"jax": "0.1.2"},
    "collected for gpu": {"platform": "gpu"},
    "does not have them": {"devices": [77], "committed": True},
    "cannot rebuild the program": {"signature": "other"},
    "differs from the collected one": {"module": "changed.mlirbc"},
}


def test_a_program_for_another_place_or_that_was_changed_is_refused(copied, tmp_path):
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    (copied.parent / "changed.mlirbc").write_bytes(jaxapi.bytecode(lowered))
    paths = []
    for number, fields in enumerate(REFUSED.values()):
        paths.append(copied.with_name(f"{number}.{copied.name}"))
        paths[-1].write_text(copied.read_text())
        changed(paths[-1], **fields)
    done = snaprt("cache", "warm", *paths, "--target", "cpu", "--dir", tmp_path / "cache")
    assert done.returncode == 2
    assert [says for says in REFUSED if says not in done.stderr] == []
    assert f"{len(REFUSED)} failed" in done.stderr
    assert not list(Cache.open(tmp_path / "cache").entries())


@pytest.mark.parametrize(
    ("fields", "says"),
    [({"schema": "other"}, "is not a readable collected program"), ({"version": 99}, "is 99")],
)
def test_a_file_of_another_kind_or_version_is_refused(copied, tmp_path, fields, says, capsys):
    changed(copied, **fields)
    words = ("cache", "warm", copied, "--target", "cpu", "--dir", tmp_path / "cache")
    assert main(list(map(str, words))) == 2
    assert says in capsys.readouterr().err


def test_a_warmed_module_is_found_by_replay(tmp_path):
    file = tmp_path / "tanh.mlir"
    file.write_text(MODULE)
    environment = {"SNAPRT_CACHE_DIR": str(tmp_path / "cache")}
    for was_there in (False, True):
        done = snaprt("cache", "warm", file, "--target", "cpu", "--json", **environment)
        (row,) = json.loads(done.stdout)["programs"]
        assert row["was_there"] is was_there
    metrics = tmp_path / "metrics.json"
    done = snaprt(
        *("replay", file, "--random", "1"),
        **environment,
        SNAPRT_METRICS_FILE=str(metrics),
    )
    assert json.loads(metrics.read_text())["counters"].get("PersistentCacheHit") == 1, done.stderr


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_programs_are_compiled_for_a_tpu_topology_without_a_tpu(collected, tmp_path):
    words = ("cache", "warm", collected, "--dir", tmp_path, "-j", 2, "--json", "--target")
    done = snaprt(*words, "tpu:v5e:2x2")
    assert done.returncode == 0, done.stderr
    rows = [row for row in Cache.open(tmp_path).entries() if row.kind == "topology"]
    assert len(rows) == len(json.loads(done.stdout)["programs"]) == 2
    assert {row.platform for row in rows} == {"tpu"}
    assert {row.device_kind for row in rows} == {"TPU v5 lite"}
    again = json.loads(snaprt(*words, "tpu:v5e:2x2").stdout)["programs"]
    assert all(row["was_there"] for row in again)
    other = json.loads(snaprt(*words, "tpu:v4:2x2x1").stdout)["programs"]
    assert not any(row["was_there"] or row["error"] for row in other)


def test_a_target_that_is_none_is_an_error():
    done = snaprt("cache", "warm", ".", "--target", "tpu")
    assert done.returncode == 2
    assert "tpu:v5e:2x2" in done.stderr


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4", "bool", "float8_e4m3fn"])
@pytest.mark.parametrize("weak", [False, True])
def test_abstract_values_survive_their_file(dtype, weak):
    value = jax.ShapeDtypeStruct((2, 3), jnp.dtype(dtype), weak_type=weak)
    back = restored(json.loads(json.dumps(described(value))), {})
    assert (back.shape, back.dtype, back.weak_type) == (value.shape, value.dtype, weak)


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_of_random_numbers_survive_their_file(implementation):
    key = jax.random.key(1, impl=implementation)
    assert restored(described(jax.typeof(key)), {}).dtype == key.dtype


def test_shardings_survive_their_file():
    devices = {device.id: device for device in jax.devices()}
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("a", "b"))
    for sharding in (
        jax.sharding.SingleDeviceSharding(jax.devices()[0]),
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("a", "b"), None)),
    ):
        value = jax.ShapeDtypeStruct((2, 3), jnp.float32, sharding=sharding)
        back = restored(json.loads(json.dumps(described(value))), devices)
        assert back.sharding == sharding
