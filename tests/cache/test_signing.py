"""Signatures: what a shared directory may hold, and what is refused before it is looked into."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import struct
from pathlib import Path

import pytest
from snaprt_cache import Cache, CacheError, Key, KeyPart, file_digests, read_key_file
from snaprt_cache.lock import Flight

from snaprt.compile.cached.store import persistent_cache

KEY = Key((KeyPart("module", "m"),))
OURS = bytes(range(32))
THEIRS = bytes(range(32, 64))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory into which a group may write."""
    path = tmp_path / "cache"
    path.mkdir()
    path.chmod(0o2770)
    return path


def _shared(folder: Path, key: bytes = OURS, events: list[str] | None = None) -> Cache:
    told = [] if events is None else events
    return Cache.open(
        folder, signing_key=key, shared=True, on_event=lambda name, _: told.append(name)
    )


def _version(path: Path) -> int:
    return int(struct.unpack_from("<8sI", path.read_bytes())[1])


def test_a_directory_that_others_write_to_is_used_when_entries_are_signed(folder: Path) -> None:
    with pytest.raises(CacheError, match="other users can write"):
        Cache.open(folder)
    cache = _shared(folder)
    assert cache.put(KEY, b"payload", {"name": "step"})
    entry = _shared(folder).get(KEY)
    assert entry is not None
    assert entry.payload == b"payload"
    assert [row.name for row in cache.entries()] == ["step"]


def test_what_is_made_in_a_shared_directory_is_for_all_its_users(folder: Path) -> None:
    previous = os.umask(0o077)
    try:
        cache = _shared(folder)
        cache.put(KEY, b"payload", {})
        cache.record_miss(KEY, "step")
        with Flight(cache.folder, access=cache.access).lead(KEY.digest, lambda: False):
            [lock] = (cache.folder / "flight").iterdir()
            assert stat.S_IMODE(lock.stat().st_mode) & 0o060 == 0o060
    finally:
        os.umask(previous)
    for path in folder.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o060 == 0o060, path
        assert not stat.S_IMODE(path.stat().st_mode) & 0o002, path


@pytest.mark.parametrize("key", [None, THEIRS], ids=["unsigned", "wrongly signed"])
def test_an_entry_without_the_right_signature_is_refused_counted_and_healed_by_a_put(
    folder: Path, tmp_path: Path, key: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    other = Cache.open(tmp_path / "theirs", signing_key=key)
    other.put(KEY, b"their code", {})
    events: list[str] = []
    cache = _shared(folder, events=events)
    path = cache.blob_path(KEY.digest)
    path.parent.mkdir(parents=True)
    shutil.copy(other.blob_path(KEY.digest), path)
    with caplog.at_level(logging.WARNING, "snaprt.cache"):
        assert cache.get(KEY) is None
        assert cache.get(KEY) is None
    assert events.count("PersistentCacheRefused") == events.count("PersistentCacheMiss") == 2
    assert "PersistentCacheCorrupt" not in events
    assert len(caplog.records) == 1
    assert "SNAPRT_CACHE_KEY_FILE" in caplog.text
    assert path.exists()
    assert cache.header(KEY.digest) is None
    (finding, *_) = cache.verify()
    assert "signed" in finding.problem
    assert cache.put(KEY, b"our code", {})
    entry = cache.get(KEY)
    assert entry is not None
    assert entry.payload == b"our code"
    assert cache.stats().refused == 2


def test_a_payload_swapped_under_a_right_signature_is_not_handed_out(folder: Path) -> None:
    cache = _shared(folder)
    cache.put(KEY, b"a" * 100, {})
    other = Key((KeyPart("module", "other"),))
    cache.put(other, b"b" * 100, {})
    shutil.copy(cache.blob_path(other.digest), cache.blob_path(KEY.digest))
    assert cache.get(KEY) is None


def test_the_signature_covers_what_is_said_about_an_entry(folder: Path) -> None:
    from blake3 import blake3

    cache = _shared(folder)
    cache.put(KEY, b"payload", {"name": "step"})
    path = cache.blob_path(KEY.digest)
    content = bytearray(path.read_bytes().replace(b'"step"', b'"pets"'))
    length = struct.unpack_from("<I", content, 12)[0]
    content[96:128] = blake3(content[:96] + content[128 : 160 + length]).digest()
    path.write_bytes(content)
    assert cache.get(KEY) is None
    assert cache.stats().refused == 1


def test_a_shared_cache_without_a_key_is_refused(folder: Path) -> None:
    with pytest.raises(CacheError, match="needs a key") as caught:
        Cache.open(folder, shared=True)
    assert "SNAPRT_CACHE_KEY_FILE" in caught.value.hint


def test_a_private_cache_reads_entries_signed_or_not_and_signs_if_it_has_a_key(
    tmp_path: Path,
) -> None:
    plain = Cache.open(tmp_path / "cache")
    plain.put(KEY, b"payload", {})
    assert _version(plain.blob_path(KEY.digest)) == 1
    signing = Cache.open(tmp_path / "cache", signing_key=OURS)
    assert signing.get(KEY) is not None
    signing.put(KEY, b"payload", {})
    assert _version(plain.blob_path(KEY.digest)) == 2
    header = plain.header(KEY.digest)
    assert header is not None
    assert header.signed
    assert plain.get(KEY) is not None


class _Tier:
    """A tier that is a dictionary."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}

    def fetch(self, name: str) -> bytes | None:
        return self.blobs.get(name)

    def send(self, name: str, content: bytes) -> None:
        self.blobs.setdefault(name, content)

    def close(self, timeout: float) -> None:
        pass


def test_a_tier_is_sent_what_is_put_and_fills_the_directory(tmp_path: Path) -> None:
    tier, events = _Tier(), list[str]()
    Cache.open(tmp_path / "one", tier=tier).put(KEY, b"payload", {"compile_seconds": 5})
    two = Cache.open(tmp_path / "two", tier=tier, on_event=lambda name, _: events.append(name))
    for _ in range(2):
        entry = two.get(KEY)
        assert entry is not None
        assert entry.payload == b"payload"
    assert events.count("PersistentCacheRemoteHit") == 1
    assert events.count("PersistentCacheHit") == 2
    assert two.blob_path(KEY.digest).read_bytes() == tier.blobs[KEY.digest]
    assert two.stats().remote_hits == 1


@pytest.mark.parametrize("damage", [b"nonsense", b"", None], ids=["nonsense", "nothing", "cut"])
def test_what_a_lying_tier_gives_is_a_miss(tmp_path: Path, damage: bytes | None) -> None:
    tier, events = _Tier(), list[str]()
    Cache.open(tmp_path / "one", tier=tier).put(KEY, b"payload", {})
    whole = tier.blobs[KEY.digest]
    tier.blobs[KEY.digest] = whole[:-1] if damage is None else damage
    two = Cache.open(tmp_path / "two", tier=tier, on_event=lambda name, _: events.append(name))
    assert two.get(KEY) is None
    assert events == ["PersistentCacheCorrupt", "PersistentCacheMiss"]
    tier.blobs[KEY.digest] = whole
    assert two.get(Key((KeyPart("module", "other"),))) is None
    assert two.get(KEY) is not None


def test_with_a_key_a_tier_is_not_trusted_without_a_signature(tmp_path: Path) -> None:
    tier, events = _Tier(), list[str]()
    Cache.open(tmp_path / "one", tier=tier).put(KEY, b"payload", {})
    two = Cache.open(
        tmp_path / "two",
        tier=tier,
        signing_key=OURS,
        on_event=lambda name, _: events.append(name),
    )
    assert two.get(KEY) is None
    assert events == ["PersistentCacheRefused", "PersistentCacheMiss"]


def test_a_digest_that_others_could_have_written_down_is_not_believed(
    folder: Path, tmp_path: Path
) -> None:
    import json

    from snaprt_cache import file_digest

    library = tmp_path / "libxla.so"
    library.write_bytes(b"code")
    os.utime(library, (1e9, 1e9))
    own = tmp_path / "own" / "v1"
    digest = file_digest(library, own)
    memo = json.loads((own / "file-digests.json").read_text())
    memo["files"] = dict.fromkeys(memo["files"], "0" * 64)
    theirs = folder / "v1"
    theirs.mkdir()
    (theirs / "file-digests.json").write_text(json.dumps(memo))
    file_digests._digests_of_this_process.clear()
    assert file_digest(library, theirs) == digest


# Key files.


def test_a_key_is_all_bytes_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(OURS)
    path.chmod(0o640)
    assert read_key_file(path) == OURS


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o602])
def test_a_key_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    path.write_bytes(OURS)
    path.chmod(mode)
    with pytest.raises(CacheError, match="other users can read") as caught:
        read_key_file(path)
    assert "chmod 600" in caught.value.hint


def test_a_key_file_that_is_absent_or_short_is_refused_with_how_to_make_one(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"secret")
    (tmp_path / "short").chmod(0o600)
    for name in ("absent", "short"):
        with pytest.raises(CacheError) as caught:
            read_key_file(tmp_path / name)
        assert "/dev/urandom" in caught.value.hint


def test_a_pipe_that_nobody_writes_into_is_a_short_key_and_no_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(CacheError, match="has 0 bytes"):
        read_key_file(tmp_path / "pipe")


def test_the_settings_name_the_key_and_the_sharing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SNAPRT_CACHE_DIR", str(folder))
    monkeypatch.setenv("SNAPRT_CACHE_SHARED", "1")
    with caplog.at_level(logging.WARNING, "snaprt.cache"):
        assert persistent_cache() is None
    assert "SNAPRT_CACHE_KEY_FILE" in caplog.text
    (tmp_path / "key").write_bytes(OURS)
    (tmp_path / "key").chmod(0o600)
    monkeypatch.setenv("SNAPRT_CACHE_KEY_FILE", str(tmp_path / "key"))
    cache = persistent_cache()
    assert cache is not None
    assert cache.put(KEY, b"payload", {})
    assert _version(cache.blob_path(KEY.digest)) == 2
