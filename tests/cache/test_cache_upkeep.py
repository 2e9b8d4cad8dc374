"""``snaprt cache verify``, ``gc``, ``pin`` and ``unpin``: what they do and how they leave."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from damage import flip_bit
from snaprt_cache import Cache, CacheError, Key, KeyPart

from snaprt.cli.main import cache_group

SIZE = 10_000


def _key(name: str) -> Key:
    return Key((KeyPart("module", name),))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    cache = Cache.open(tmp_path / "cache")
    for name in ("a", "b", "c"):
        cache.put(_key(name), os.urandom(SIZE), {"name": name, "compile_seconds": 10.0})
    cache.get(_key("b"))
    return cache


def _invoke(cache: Cache, *words: str) -> Result:
    cache.close()
    return CliRunner().invoke(cache_group, [*words, "--dir", str(cache.path)])


def _json(cache: Cache, *words: str) -> dict:
    return json.loads(_invoke(cache, *words, "--json").stdout)


def _damage(cache: Cache, name: str) -> Path:
    path = cache.blob_path(_key(name).digest)
    flip_bit(path, -1)
    return path


def test_verify_of_a_sound_cache_finds_nothing_and_leaves_with_0(cache: Cache) -> None:
    result = _invoke(cache, "verify")
    assert result.exit_code == 0
    assert "3 entries checked, no problems" in result.output


def test_verify_finds_damage_leaves_with_1_and_changes_nothing(cache: Cache) -> None:
    path = _damage(cache, "b")
    result = _invoke(cache, "verify")
    assert result.exit_code == 1
    assert _key("b").digest[:12] in result.output
    assert "--heal" in result.output
    assert path.is_file()
    found = _json(cache, "verify")
    assert (found["schema"], found["checked"] >= 3) == ("snaprt.cache.verify", True)
    assert [problem["key"] for problem in found["problems"]] == [_key("b").digest]


def test_verify_heals_what_it_found_and_then_finds_nothing(cache: Cache) -> None:
    path = _damage(cache, "b")
    result = _invoke(cache, "verify", "--heal")
    assert result.exit_code == 1
    assert "healed" in result.output
    assert not path.exists()
    assert _invoke(cache, "verify").exit_code == 0
    assert {row.name for row in cache.entries()} == {"a", "c"}


def test_gc_removes_what_is_worth_least_until_the_others_fit(cache: Cache) -> None:
    gone = _json(cache, "gc", "--max-size", "15kB")
    assert {row["name"] for row in gone["removed"]} == {"a", "c"}
    assert gone["freed_bytes"] > 2 * SIZE
    assert [row.name for row in cache.entries()] == ["b"]


def test_gc_refuses_what_is_no_size(cache: Cache) -> None:
    result = _invoke(cache, "gc", "--max-size", "much")
    assert result.exit_code == 2
    assert "is not a size" in result.output


def test_a_pinned_entry_outlives_a_gc_until_it_is_unpinned(cache: Cache) -> None:
    digest = _key("a").digest
    assert _invoke(cache, "pin", digest[:10]).exit_code == 0
    assert "pinned" in _invoke(cache, "ls").output
    assert _invoke(cache, "gc", "--max-size", "0").exit_code == 0
    assert [row.key for row in cache.entries()] == [digest]
    assert _json(cache, "unpin", digest)["keys"] == [digest]
    assert _invoke(cache, "gc", "--max-size", "0").exit_code == 0
    assert cache.entries() == []


def test_pinning_pins_all_keys_or_none(cache: Cache) -> None:
    result = _invoke(cache, "pin", _key("a").digest, "xyz")
    assert isinstance(result.exception, CacheError)
    assert not any(row.pinned for row in cache.entries())
