"""The modes: who may read, who may write, and where a program must not compile."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from programs import run_program
from snaprt_cache import MODES, Cache, CacheError, Key, KeyPart

from snaprt import metrics, settings
from snaprt.cli.cache.why import NEW_PROGRAM, REFRESHED, Neighbors
from snaprt.compile.cached.store import open_cache, persistent_cache
from snaprt.errors import UsageError

PAYLOAD = b"payload" * 100


def _key(module: str, jaxlib: str = "0.10.2", flags: str = "") -> Key:
    return Key((KeyPart("module", module), KeyPart("jaxlib", jaxlib), KeyPart("flags", flags)))


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    cache = Cache.open(tmp_path / "cache")
    cache.put(_key("a"), PAYLOAD, {"name": "train_step"})
    cache.close()
    return cache.path


def _state(path: Path) -> dict[str, tuple[int, int]]:
    return {
        str(p.relative_to(path)): (p.stat().st_mtime_ns, p.stat().st_size)
        for p in sorted(path.rglob("*"))
    }


def test_read_only_gives_what_is_there_and_changes_no_file(filled: Path) -> None:
    before = _state(filled)
    events: list[str] = []
    cache = Cache.open(filled, mode="read-only", on_event=lambda name, _: events.append(name))
    entry = cache.get(_key("a"))
    assert entry is not None
    assert entry.payload == PAYLOAD
    assert cache.get(_key("b")) is None
    assert not cache.put(_key("b"), PAYLOAD, {})
    cache.close()
    assert _state(filled) == before
    assert events == ["PersistentCacheHit", "PersistentCacheMiss"]


def test_read_only_leaves_a_damaged_entry_where_it_is(filled: Path) -> None:
    Cache.open(filled).blob_path(_key("a").digest).write_bytes(b"nonsense")
    before = _state(filled)
    cache = Cache.open(filled, mode="read-only")
    assert cache.get(_key("a")) is None
    cache.discard(_key("a"), "XLA cannot load it")
    cache.close()
    assert _state(filled) == before


def test_fail_on_miss_names_the_program_and_what_its_key_has_otherwise(filled: Path) -> None:
    cache = Cache.open(filled, mode="fail-on-miss")
    assert cache.get(_key("a")) is not None
    before = _state(filled)
    with pytest.raises(CacheError) as caught:
        cache.get(_key("a", jaxlib="0.12.0"), name="train_step")
    assert "'train_step'" in caught.value.message
    assert "jaxlib (0.10.2 -> 0.12.0)" in caught.value.message
    assert "flags" not in caught.value.message
    assert "SNAPRT_CACHE_MODE" in caught.value.hint
    assert _state(filled) == before


def test_fail_on_miss_lets_nobody_compile_for_an_entry_that_is_of_no_use(filled: Path) -> None:
    cache = Cache.open(filled, mode="fail-on-miss")
    with pytest.raises(CacheError, match="XLA cannot load it"):
        cache.discard(_key("a"), "XLA cannot load it")
    assert cache.get(_key("a")) is not None


def test_fail_on_miss_with_an_empty_directory_says_that_there_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="no entry is similar enough"):
        Cache.open(tmp_path / "cache", mode="fail-on-miss").get(_key("a"))
    assert not (tmp_path / "cache").exists()


def test_what_only_helps_to_find_a_program_may_be_missing_and_is_not_counted(filled: Path) -> None:
    events: list[str] = []
    for mode in ("fail-on-miss", "read-write"):
        cache = Cache.open(filled, mode=mode, on_event=lambda name, _: events.append(name))
        assert cache.get(_key("note"), counted=False) is None
        assert cache.get(_key("a"), counted=False) is not None
        cache.put(_key("other note"), PAYLOAD, {}, counted=False)
    assert events == []


def test_refresh_makes_everything_anew_once_and_then_uses_it(filled: Path) -> None:
    cache = Cache.open(filled, mode="refresh")
    assert cache.get(_key("a")) is None
    assert cache.put(_key("a"), b"anew", {})
    entry = cache.get(_key("a"))
    assert entry is not None
    assert entry.payload == b"anew"
    assert Cache.open(filled, mode="refresh").get(_key("a")) is None


def test_off_neither_reads_nor_writes_nor_counts(filled: Path) -> None:
    before = _state(filled)
    events: list[str] = []
    cache = Cache.open(filled, mode="off", on_event=lambda name, _: events.append(name))
    assert cache.get(_key("a")) is None
    assert not cache.put(_key("a"), PAYLOAD, {})
    cache.close()
    assert events == []
    assert _state(filled) == before


def test_a_mode_that_does_not_exist_is_refused_with_those_that_do(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="unknown compile cache mode 'readonly'") as caught:
        Cache.open(tmp_path, mode="readonly")
    assert all(name in caught.value.hint for name in MODES)


# The settings.


def test_the_settings_choose_mode_and_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SNAPRT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SNAPRT_CACHE_MODE", "read-only")
    monkeypatch.setenv("SNAPRT_CACHE_MAX_SIZE", "500M")
    cache = persistent_cache()
    assert cache is not None
    assert (cache.mode.name, cache.max_bytes) == ("read-only", 500 << 20)
    assert open_cache().mode.name == "read-write"
    assert open_cache(tmp_path / "other").path == tmp_path / "other"
    monkeypatch.setenv("SNAPRT_CACHE_MAX_SIZE", "0")
    again = persistent_cache()
    assert again is not None
    assert again.max_bytes is None
    monkeypatch.setenv("SNAPRT_CACHE_MODE", "off")
    assert persistent_cache() is None


def test_the_modes_of_the_setting_are_those_of_the_cache() -> None:
    (setting,) = [one for one in settings.SETTINGS if one.name == "SNAPRT_CACHE_MODE"]
    assert setting.kind.allowed == ", ".join(MODES)


@pytest.mark.parametrize("text", ["many", "-1", "10 apples", "1e3", "G"])
def test_a_size_that_is_none_is_an_error_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("SNAPRT_CACHE_MAX_SIZE", text)
    with pytest.raises(UsageError, match="SNAPRT_CACHE_MAX_SIZE"):
        persistent_cache()


def test_a_cache_that_cannot_be_used_fails_where_nothing_may_compile_and_warns_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    monkeypatch.setenv("SNAPRT_CACHE_DIR", str(tmp_path / "cache"))
    with caplog.at_level(logging.WARNING, "snaprt.cache"):
        assert persistent_cache() is None
        assert persistent_cache() is None
    assert len(caplog.records) == 1
    monkeypatch.setenv("SNAPRT_CACHE_MODE", "fail-on-miss")
    with pytest.raises(CacheError, match="other users can write"):
        persistent_cache()


_STEP = """
import jax.numpy as jnp, snaprt
with snaprt.lazy():
    y = jnp.arange(8.0) * 3 + 1
    print(float(y.sum()))
"""


def test_a_program_runs_from_a_filled_cache_and_ends_on_a_miss_where_it_must_not_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_CACHE_DIR", str(tmp_path / "cache"))

    empty = run_program(_STEP, SNAPRT_CACHE_MODE="fail-on-miss", status=1)
    assert "no entry is similar enough" in empty.stderr
    for mode in ("read-write", "fail-on-miss"):
        assert run_program(_STEP, SNAPRT_CACHE_MODE=mode).stdout == "92.0\n"


def test_a_program_that_is_made_anew_is_counted_once_and_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SNAPRT_METRICS_FILE", str(tmp_path / "metrics.json"))
    for mode in ("read-write", "refresh"):
        run_program(_STEP, SNAPRT_CACHE_MODE=mode)
    counters = metrics.load(tmp_path / "metrics.json").counters
    assert (counters["PersistentCacheMiss"], counters["PersistentCachePut"]) == (1, 1)
    neighbors = Neighbors(open_cache())
    first, second = map(neighbors.explain_miss, neighbors.misses)
    assert (first.reason, second.reason) == (NEW_PROGRAM, REFRESHED)
