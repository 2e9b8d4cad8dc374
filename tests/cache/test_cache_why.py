"""``snaprt cache why``: real programs that missed, and what it says about them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import zstandard
from click.testing import CliRunner, Result
from programs import run_program
from snaprt_cache import Cache, CacheError, Key, KeyPart

from snaprt.cli.main import cache_group

PROGRAM = """
import os
import jax.numpy as jnp
import snaprt

def block(x):
    h = jnp.tanh(x)
    h = h * float(os.environ.get("SCALE", "2.5"))  # line 8
    if "SINE" in os.environ:
        h = jnp.sin(h)  # line 10
    return h - x if "SWAP" not in os.environ else x - h  # line 11

x = jnp.ones(int(os.environ.get("ROWS", "8")))
with snaprt.lazy():
    print(block(block(x))[0])
"""
VARIANTS = {
    "first": {},
    "shape": {"ROWS": "12"},
    "constant": {"SCALE": "3"},
    "code": {"SINE": "1"},
    "order": {"SWAP": "1"},
    "flags": {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a cache that each variant of the program has missed, in order."""
    folder = tmp_path_factory.mktemp("why")
    (folder / "train.py").write_text(PROGRAM)
    for variables in VARIANTS.values():
        run_program(folder / "train.py", SNAPRT_CACHE_DIR=folder / "cache", **variables)
    return folder


def _invoke(cache: Path, *words: str) -> Result:
    return CliRunner().invoke(cache_group, ["why", *words, "--dir", str(cache)])


def _json(cache: Path, *words: str) -> dict:
    result = _invoke(cache, *words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def _digests(folder: Path) -> dict[str, str]:
    recorded = Cache.open(folder / "cache").misses()
    programs = [miss for miss in recorded if miss.name == "train.py: lazy_graph"]
    assert len(programs) == len(VARIANTS)
    return {name: miss.key.digest for name, miss in zip(VARIANTS, programs, strict=True)}


def test_why_last_names_the_flag_that_was_added(folder: Path) -> None:
    found = _json(folder / "cache", "--last")
    assert found["schema"] == "snaprt.cache.why"
    assert found["reason"] == "other flags"
    assert found["miss"]["script"] == "train.py"
    assert found["nearest"]["key"] == _digests(folder)["first"]
    assert [one["words"] for one in found["differences"]] == [
        ["added --xla_cpu_enable_fast_math=true"]
    ]


@pytest.mark.parametrize(
    ("variant", "kind", "text", "line"),
    [
        ("shape", "shapes", "tensor<12xf32>", 7),
        ("constant", "constants", "dense<3.000000e+00>", 8),
        ("code", "code", "stablehlo.sine", 10),
        ("order", "code", "stablehlo.subtract", 11),
    ],
)
def test_why_two_keys_names_the_first_operation_that_differs_and_its_line(
    folder: Path, variant: str, kind: str, text: str, line: int
) -> None:
    digests = _digests(folder)
    found = _json(folder / "cache", digests["first"], digests[variant])
    assert [one["part"] for one in found["differences"]] == ["module"]
    assert found["program"]["kind"] == kind
    first = found["program"]["operations"][0]
    assert text in first["after"]
    assert first["after_source"] == f"{folder / 'train.py'}:{line} in block"


def test_why_prints_the_operation_before_and_after(folder: Path) -> None:
    digests = _digests(folder)
    result = _invoke(folder / "cache", digests["first"][:12], digests["shape"][:12])
    assert "argument arg0: tensor<8xf32> -> tensor<12xf32>" in result.output
    assert "- tanh %arg0 : tensor<8xf32>" in result.output
    assert "+ tanh %arg0 : tensor<12xf32>" in result.output
    result = _invoke(folder / "cache", digests["first"], digests["first"])
    assert "The keys are identical" in result.output


def test_why_one_key_compares_it_with_what_was_there_before_it(folder: Path) -> None:
    digests = _digests(folder)
    found = _json(folder / "cache", digests["shape"])
    assert found["nearest"]["key"] == digests["first"]
    assert found["reason"] == "changed shape or constant"
    assert _json(folder / "cache", digests["first"])["nearest"] is None


def test_stats_tell_why_each_program_missed(folder: Path) -> None:
    result = CliRunner().invoke(cache_group, ["stats", "--dir", str(folder / "cache"), "--json"])
    reasons = json.loads(result.stdout)["reasons"]
    assert reasons["other flags"] == 1
    assert reasons["changed code"] == 1
    assert sum(reasons.values()) == len(Cache.open(folder / "cache").misses())


def test_a_summary_is_not_shown_as_it_stands(folder: Path) -> None:
    words = ["show", _digests(folder)["first"], "--dir", str(folder / "cache"), "--json"]
    shown = json.loads(CliRunner().invoke(cache_group, words).stdout)
    assert "summary" not in shown["metadata"]


def _key(name: str) -> Key:
    return Key((KeyPart("module", name), KeyPart("flags", "")))


def test_a_miss_of_a_damaged_entry_and_of_a_removed_one_are_told_apart(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path)
    for name in ("damaged", "removed"):
        cache.put(_key(name), b"payload", {"name": name})
    path = cache.blob_path(_key("damaged").digest)
    path.write_bytes(path.read_bytes()[:-1])
    assert cache.get(_key("damaged")) is None
    cache.record_miss(_key("damaged"), "damaged")
    cache.close()
    assert _json(tmp_path, "--last")["reason"] == "damaged, set aside"
    record = cache.folder / "misses.jsonl"
    cache.record_miss(_key("removed"), "removed")
    lines = [{**json.loads(line), "time": 1.0} for line in record.read_text().splitlines()]
    record.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    cache.record_miss(_key("removed"), "removed")
    assert _json(tmp_path, "--last")["reason"] == "was there, removed since"


def test_why_without_a_miss_or_an_entry_says_so(tmp_path: Path) -> None:
    result = _invoke(tmp_path, "--last")
    assert (result.exit_code, "No miss is recorded" in result.output) == (0, True)
    assert _json(tmp_path, "--last")["miss"] is None
    assert isinstance(_invoke(tmp_path, "a", "b").exception, CacheError)
    assert _invoke(tmp_path).exit_code == 2
    assert _invoke(tmp_path, "a", "--last").exit_code == 2


def test_an_entry_without_a_summary_is_explained_by_its_key_alone(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path)
    for name, summary in (("a", "no base64!"), ("b", "AAAA"), ("c", 5)):
        cache.put(_key(name), b"payload", {"name": "step", "summary": summary})
    cache.close()
    found = _json(tmp_path, _key("a").digest, _key("b").digest)
    assert (found["program"], [one["part"] for one in found["differences"]]) == (None, ["module"])


@pytest.mark.parametrize(
    ("before", "after", "jaxes", "said"),
    [
        ("", " {tf.aliasing_output = 0 : i32}", ("0.12", "0.12"), "Donation differs"),
        ("", "", ("0.12", "0.12"), "The difference is in something that these lists omit"),
        ("", "", ("0.10", "0.12"), "another version of JAX wrote it"),
    ],
)
def test_modules_with_the_same_operations_differ_for_a_reason_that_is_true(
    before: str, after: str, jaxes: tuple[str, str], said: str, tmp_path: Path
) -> None:
    cache = Cache.open(tmp_path)
    keys = []
    for attributes, jax, module in zip((before, after), jaxes, "ab", strict=True):
        text = f"func.func public @main(%arg0: tensor<f32>{attributes}) -> tensor<f32> {{\n}}\n"
        summary = base64.b64encode(zstandard.compress(text.encode())).decode()
        keys.append(Key((KeyPart("module", module), KeyPart("jax", jax))))
        cache.put(keys[-1], b"payload", {"name": "step", "summary": summary})
    result = _invoke(tmp_path, *[key.digest for key in keys])
    assert said in result.output
