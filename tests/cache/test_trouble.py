"""Full disks, limits, read-only and vanished directories: one warning, and the program goes on."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from programs import run_program
from snaprt_cache import Cache, CacheError, Key, KeyPart
from snaprt_cache.index import is_local, journal_mode, wal_is_fixed

KEY = Key((KeyPart("module", "m"),))

_PUT_MANY = """
import os, sys
from snaprt_cache import Cache, Key, KeyPart
events = []
cache = Cache.open(sys.argv[1], on_event=lambda name, _: events.append(name))
def key_of(number):
    return Key((KeyPart("module", str(number)),))
small = [cache.put(key_of(n), b"small", {}) for n in range(2)]
assert small == [True, True], small
# No compression makes these smaller.
large = [cache.put(key_of(n), os.urandom(600_000), {}) for n in range(10, 15)]
assert large == [False] * 5, large
assert cache.get(key_of(0)).payload == b"small"
assert cache.get(key_of(10)) is None
assert events.count("PersistentCacheError") == 5
assert not os.listdir(cache.folder / "temporary")
assert len(cache.entries()) == 2
"""


def _one_warning(errors: str) -> str:
    (line,) = errors.splitlines()
    return line


def _run_behind_a_mount(
    mounting: str, script: str, folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` on ``folder`` where ``mounting`` has been done, for it alone."""
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, mounting]).returncode:
        pytest.skip("a process of its own cannot mount here")
    return subprocess.run(
        [*unshare, f'{mounting} && "{sys.executable}" -c "$SCRIPT" {folder}'],
        env={**os.environ, "SCRIPT": script},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_full_disk_costs_the_entry_and_one_warning(tmp_path: Path) -> None:
    mount = tmp_path / "disk"
    mount.mkdir()
    mounting = f"mount -t tmpfs -o size=400k none {mount}"
    done = _run_behind_a_mount(mounting, _PUT_MANY, mount / "cache")
    assert done.returncode == 0, done.stderr
    assert "No space left" in _one_warning(done.stderr)
    assert "Free some space" in done.stderr


def test_a_limit_on_the_size_of_files_costs_the_entry_and_one_warning(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))\n"
    done = run_program(limit + _PUT_MANY, tmp_path / "cache", timeout=60)
    assert "ulimit -f" in _one_warning(done.stderr)


def test_a_directory_that_cannot_be_looked_at_costs_one_warning_and_none_at_exit(
    tmp_path: Path,
) -> None:
    use = """
    import logging, sys
    from snaprt_cache import Cache, Key, KeyPart
    cache, key = Cache.open(sys.argv[1]), Key((KeyPart("module", "m"),))
    assert cache.get(key) is None
    assert not cache.put(key, b"payload", {})
    """
    done = run_program(textwrap.dedent(use), tmp_path / ("x" * 300), timeout=60)
    assert "File name too long" in _one_warning(done.stderr)


def test_a_file_in_the_place_of_the_directory_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("in the way")
    with caplog.at_level(logging.WARNING, "snaprt.cache"):
        cache = Cache.open(tmp_path / "cache")
        for _ in range(3):
            assert cache.get(KEY) is None
            assert not cache.put(KEY, b"payload", {})
        assert cache.entries() == []
        cache.close()
    assert len(caplog.records) == 1
    assert "SNAPRT_CACHE_DIR" in caplog.text
    assert (tmp_path / "cache").read_text() == "in the way"


def test_a_file_in_the_place_of_a_parent_directory_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = Cache.open(tmp_path / "file" / "a" / "cache")
    with caplog.at_level(logging.WARNING, "snaprt.cache"):
        assert cache.get(KEY) is None
        assert not cache.put(KEY, b"payload", {})
    assert len(caplog.records) == 1


_READ_ONLY = """
import sys
from snaprt_cache import Cache, Key, KeyPart
cache = Cache.open(sys.argv[1])
key = Key((KeyPart("module", "m"),))
for _ in range(3):
    assert cache.get(key).payload == b"payload"
    assert not cache.put(Key(()), b"other", {})
cache.discard(key, "cannot be set aside here")
assert [row.key for row in cache.entries()] == [key.digest]
assert cache.stats().entries == 1
cache.close()
"""


def test_a_read_only_directory_is_read_and_costs_one_warning(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    Cache.open(path).put(KEY, b"payload", {})
    mounting = f"mount --bind {path} {path} && mount -o remount,bind,ro {path}"
    done = _run_behind_a_mount(mounting, _READ_ONLY, path)
    assert done.returncode == 0, done.stderr
    assert "Read-only file system" in _one_warning(done.stderr)
    assert "SNAPRT_CACHE_DIR" in done.stderr


def test_a_directory_removed_while_in_use_is_made_again(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "cache")
    assert cache.put(KEY, b"payload", {})
    shutil.rmtree(cache.path)
    assert cache.get(KEY) is None
    assert cache.put(KEY, b"payload", {})
    assert len(cache.entries()) == 1
    assert cache.path.stat().st_mode & 0o077 == 0


_NO_HOME = """
import pwd
def nobody(_):
    raise KeyError("no such user")
pwd.getpwuid = nobody
from snaprt.compile.cached.store import persistent_cache
assert persistent_cache() is None
assert persistent_cache() is None
print("went on")
"""

_BAD_HOME = """
from snaprt_cache import Cache, Key, KeyPart
cache = Cache.open()
key = Key((KeyPart("module", "m"),))
for _ in range(2):
    cache.put(key, b"payload", {})
    cache.get(key)
cache.entries()
cache.close()
print("went on")
"""


def test_without_a_home_directory_the_program_goes_on(tmp_path: Path) -> None:
    taken = ("HOME", "XDG_CACHE_HOME", "SNAPRT_CACHE_DIR")
    done = run_program(_NO_HOME, folder=tmp_path, without=taken, timeout=60)
    assert done.stdout == "went on\n"
    assert "no home directory" in done.stderr
    assert "SNAPRT_CACHE_DIR" in done.stderr
    assert done.stderr.count("persistent cache") == 1


def test_a_home_directory_that_cannot_be_made_costs_one_warning(tmp_path: Path) -> None:
    done = run_program(
        _BAD_HOME, without=("SNAPRT_CACHE_DIR",), timeout=60, HOME="/proc/none", XDG_CACHE_HOME=""
    )
    assert "SNAPRT_CACHE_DIR" in _one_warning(done.stderr)


def test_a_directory_removed_while_in_use_loses_its_pins_and_limits_nothing_after(
    tmp_path: Path,
) -> None:
    cache = Cache.open(tmp_path / "cache", max_bytes=100_000)
    assert cache.put(KEY, os.urandom(60_000), {})
    assert cache.pin(KEY.digest)
    shutil.rmtree(cache.path)
    assert cache.gc() == []
    assert cache.put(KEY, os.urandom(60_000), {})
    assert cache.put(Key(()), os.urandom(60_000), {})
    stats = cache.stats()
    assert (stats.entries, stats.pinned) == (1, 0)


def test_two_jaxlib_versions_and_two_cpus_share_one_directory(tmp_path: Path) -> None:
    keys = [
        Key((KeyPart("module", "m"), KeyPart("jaxlib", jaxlib), KeyPart("cpu_features", cpu)))
        for jaxlib in ("0.10.2", "0.12.0")
        for cpu in ("x86_64-avx2", "x86_64-avx512")
    ]
    caches = [Cache.open(tmp_path / "cache") for _ in keys]
    for cache, key in zip(caches, keys, strict=True):
        assert cache.get(key) is None
        assert cache.put(key, key.digest.encode(), {"jaxlib_version": key.parts[1].value})
    for cache in caches:
        for key in keys:
            entry = cache.get(key)
            assert entry is not None
            assert entry.payload == key.digest.encode()
    versions = sorted(row.jaxlib_version for row in caches[0].entries())
    assert versions == ["0.10.2", "0.10.2", "0.12.0", "0.12.0"]


def test_an_index_of_an_older_version_beside_ours_is_left_alone(tmp_path: Path) -> None:
    older = tmp_path / "cache" / "v1" / "index-1.sqlite"
    older.parent.mkdir(parents=True, mode=0o700)
    older.parent.parent.chmod(0o700)
    older.write_text("theirs")
    cache = Cache.open(tmp_path / "cache")
    assert cache.put(KEY, b"payload", {})
    assert len(cache.entries()) == 1
    assert older.read_text() == "theirs"


def test_a_cache_that_cannot_be_cleared_says_so(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "cache")
    cache.put(KEY, b"payload", {})
    path = cache.blob_path(KEY.digest)
    path.unlink()
    path.mkdir()
    with pytest.raises(CacheError, match="cannot clear") as caught:
        cache.clear()
    assert caught.value.hint


# The journal.


@pytest.mark.parametrize(
    ("version", "fixed"),
    [
        ((3, 40, 1), False),
        ((3, 44, 5), False),
        ((3, 44, 6), True),
        ((3, 45, 0), False),
        ((3, 50, 6), False),
        ((3, 50, 7), True),
        ((3, 51, 2), False),
        ((3, 51, 3), True),
        ((3, 53, 0), True),
        ((4, 0, 0), True),
    ],
)
def test_wal_is_used_on_versions_of_sqlite_that_have_the_fix(
    tmp_path: Path, version: tuple[int, int, int], fixed: bool
) -> None:
    assert wal_is_fixed(version) is fixed
    if not fixed:
        assert journal_mode(tmp_path, version) == "truncate"


@pytest.mark.parametrize(
    ("kind", "local"),
    [("ext4", True), ("tmpfs", True), ("nfs4", False), ("cifs", False), ("fuse.sshfs", False)],
)
def test_wal_is_used_on_local_file_systems_only(tmp_path: Path, kind: str, local: bool) -> None:
    device = os.stat(tmp_path).st_dev
    table = tmp_path / "mountinfo"
    table.write_text(
        "22 1 0:999999 / /proc rw - proc proc rw\n"
        f"36 22 {os.major(device)}:{os.minor(device)} / {tmp_path} rw,noatime master:1 - "
        f"{kind} server:/export rw\n"
    )
    assert is_local(tmp_path, table) is local


def test_a_file_system_that_nothing_is_known_of_is_not_taken_for_local(tmp_path: Path) -> None:
    assert not is_local(tmp_path, tmp_path / "no-such-table")


def test_an_index_left_in_wal_mode_goes_on_in_the_mode_that_is_safe_here(tmp_path: Path) -> None:
    import sqlite3

    cache = Cache.open(tmp_path / "cache")
    cache.put(KEY, b"payload", {})
    cache.close()
    connection = sqlite3.connect(cache.index_path)
    connection.execute("PRAGMA journal_mode = wal")
    connection.close()
    assert cache.stats().journal_mode == journal_mode(cache.folder)
    assert len(cache.entries()) == 1


def test_a_relative_path_below_a_removed_working_directory_is_refused_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(CacheError, match="working directory that was removed") as refused:
        Cache.open("cache")
    assert "absolute path" in refused.value.hint
