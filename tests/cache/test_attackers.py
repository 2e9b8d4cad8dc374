"""What somebody else, or a broken disk, may put in the place of a cache's files."""

from __future__ import annotations

import json
import os
import resource
import socket
import sqlite3
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import run_program
from snaprt_cache import Cache, CacheError, Key, KeyPart, file_digest, file_digests, frame
from snaprt_cache.bundle import bundled_blobs, read_bundle, write_bundle
from snaprt_cache.frame import BlobDamaged, Signing, check_blob
from snaprt_cache.lock import Flight

SECRET = bytes(range(32))
KEY = Key((KeyPart("module", "m"),))
PAYLOAD = b"an executable " * 100
METADATA = {"name": "step", "compile_seconds": 1.0}
# What programs do with a cache, and whether they get what they should.
_USE = """
import os, sys
from snaprt_cache import Cache, CacheError, Key, KeyPart, file_digest
from snaprt_cache.lock import Flight

shared = sys.argv[2] == "shared"
options = {"signing_key": bytes(range(32)), "shared": True} if shared else {}
cache = Cache.open(sys.argv[1], **options)
key = Key((KeyPart("module", "m"),))
with Flight(cache.folder, access=cache.access).lead(key.digest, lambda: False):
    entry = cache.get(key)
assert entry is None or entry.payload == b"an executable " * 100
cache.put(key, b"an executable " * 100, {"name": "step", "compile_seconds": 1.0})
cache.put(Key((KeyPart("module", "other"),)), b"other", {})
cache.record_miss(key, "step")
cache.misses()
file_digest(sys.executable, cache.folder)
for action in (
    lambda: cache.pin(key.digest),
    lambda: cache.unpin(key.digest),
    lambda: list(cache.verify(heal=True)),
    lambda: cache.gc(0),
    lambda: cache.clear(),
):
    try:
        action()
    except CacheError as error:
        assert error.hint, error
cache.put(key, b"an executable " * 100, {"name": "step", "compile_seconds": 1.0})
cache.stats()
cache.close()
"""


def _use(path: Path, how: str = "private") -> None:
    run_program(_USE, path, how, timeout=60)


def _filled(path: Path, **options: Any) -> Cache:
    cache = Cache.open(path, **options)
    assert cache.put(KEY, PAYLOAD, METADATA)
    cache.record_miss(KEY, "step")
    cache.pin(KEY.digest)
    cache.close()
    return cache


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "mine").write_text("mine")


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path may have a hundred characters
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _endless_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _itself(path: Path) -> None:
    path.symlink_to(path.name)


FILES = {
    "blob": f"blobs/{KEY.digest[:2]}/{KEY.digest}.blob",
    "index": "index-3.sqlite",
    "journal": "index-3.sqlite-journal",
    "log": "index-3.sqlite-wal",
    "lock of the index": "index.lock",
    "lock of a program": f"flight/{KEY.digest}",
    "digests": "file-digests.json",
    "misses": "misses.jsonl",
    "pin": f"pins/{KEY.digest}",
}


@pytest.mark.parametrize(
    "put", [_fifo, _folder, _socket, _endless_device, _itself], ids=lambda put: put.__name__[1:]
)
def test_what_is_no_file_in_the_place_of_one_makes_nobody_wait_or_fail(
    tmp_path: Path, put: Callable[[Path], None]
) -> None:
    cache = _filled(tmp_path / "cache")
    for name in FILES.values():
        path = cache.folder / name
        path.parent.mkdir(exist_ok=True, mode=0o700)
        path.unlink(missing_ok=True)
        put(path)
    _use(cache.path)


def test_a_fifo_in_the_place_of_a_blob_is_set_aside_and_the_next_put_heals_it(
    tmp_path: Path,
) -> None:
    cache = _filled(tmp_path / "cache")
    path = cache.blob_path(KEY.digest)
    path.unlink()
    os.mkfifo(path)
    assert cache.get(KEY) is None
    assert cache.stats().corrupt == 1
    assert cache.put(KEY, PAYLOAD, METADATA)
    entry = cache.get(KEY)
    assert entry is not None
    assert entry.payload == PAYLOAD


# A shared folder, and somebody in it without the key.


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o2777)
    _filled(folder, signing_key=SECRET, shared=True)
    return folder


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to], ids=["symbolic", "hard"])
def test_links_in_a_shared_folder_lead_no_write_to_a_users_own_files(
    shared: Path, tmp_path: Path, link: Callable[[Path, Path], None]
) -> None:
    own = {}
    for number, name in enumerate(FILES.values()):
        path = shared / "v1" / name
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        victim = tmp_path / f"own-{number}"
        # An SQLite database of the user's own, an empty file, and text.
        if number % 3 == 0:
            sqlite3.connect(victim).execute("CREATE TABLE mine (a)").connection.close()
        else:
            victim.write_text("mine\n" * (number % 3 - 1))
        victim.chmod(0o640)
        own[victim] = victim.read_bytes()
        link(path, victim)
    _use(shared, "shared")
    for victim, content in own.items():
        assert victim.read_bytes() == content
        assert stat.S_IMODE(victim.stat().st_mode) == 0o640


@pytest.mark.parametrize(
    "name", ["", "flight", "pins", "temporary", "quarantine", "blobs", f"blobs/{KEY.digest[:2]}"]
)
def test_a_folder_that_leads_out_of_a_shared_one_is_not_followed(
    shared: Path, tmp_path: Path, name: str
) -> None:
    own = tmp_path / "own"
    own.mkdir(mode=0o750)
    for kept in (KEY.digest, f"{KEY.digest}.blob", "index-3.sqlite", "misses.jsonl"):
        (own / kept).write_text("mine")
    path = shared / "v1" / name
    if path.is_dir():
        path.rename(tmp_path / "was there")
    path.symlink_to(own)
    _use(shared, "shared")
    assert {file.name for file in own.iterdir()} == {
        KEY.digest,
        f"{KEY.digest}.blob",
        "index-3.sqlite",
        "misses.jsonl",
    }
    assert all(file.read_text() == "mine" for file in own.iterdir())
    assert stat.S_IMODE(own.stat().st_mode) == 0o750


_ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
SCHEMAS = {
    "a trigger that fills the disk": (
        "CREATE TRIGGER t AFTER INSERT ON totals BEGIN "
        "INSERT OR REPLACE INTO totals SELECT randomblob(9), randomblob(1000000), 1 "
        "FROM key_parts, key_parts AS a, key_parts AS b, key_parts AS c, key_parts AS d; END"
    ),
    "a trigger that calls itself": (
        "CREATE TRIGGER t AFTER INSERT ON entries BEGIN "
        "INSERT INTO entries (key) VALUES (hex(randomblob(32))); END"
    ),
    "a view without end": (
        f"DROP TABLE entries; CREATE VIEW entries AS {_ENDLESS} SELECT i AS key FROM n"
    ),
    "an index of its own": "CREATE INDEX mine ON entries (name)",
    "a table of its own": "CREATE TABLE mine (a)",
    "a column less": "ALTER TABLE entries DROP COLUMN device_kind",
}


@pytest.mark.parametrize("is_open", [False, True], ids=["between runs", "while open"])
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_an_index_with_another_schema_than_ours_runs_nothing_and_is_made_anew(
    tmp_path: Path, schema: str, is_open: bool
) -> None:
    cache = _filled(tmp_path / "cache")
    if is_open:
        assert len(cache.entries()) == 1
    connection = sqlite3.connect(cache.index_path)
    connection.executescript(schema)
    connection.close()
    start = time.monotonic()
    if not is_open:
        cache = Cache.open(cache.path)
    assert cache.get(KEY) is not None
    assert [row.key for row in cache.entries()] == [KEY.digest]
    cache.close()
    assert time.monotonic() - start < 20
    connection = sqlite3.connect(cache.index_path)
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    connection.close()
    assert names == {"entries", "entries_by_size", "key_parts", "totals"}


# A private folder that others could write to.


def test_a_cache_that_was_open_to_all_is_used_when_the_hint_was_followed_and_not_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = _filled(tmp_path / "cache")
    path = cache.blob_path(KEY.digest)
    for there in (path, *path.relative_to(tmp_path).parents):
        (tmp_path / there).chmod(0o777)
    tmp_path.chmod(0o700)
    with pytest.raises(CacheError) as caught:
        Cache.open(cache.path)
    assert f"chmod -R go-w '{cache.path}'" in caught.value.hint
    # Not the whole of the hint: the blob and its folders stay as they were.
    for there in (cache.path, cache.folder):
        there.chmod(0o755)
    cache = Cache.open(cache.path)
    assert cache.get(KEY) is None
    assert f"chmod -R go-w '{cache.path}'" in caplog.text
    subprocess.run(["chmod", "-R", "go-w", str(cache.path)], check=True)
    assert Cache.open(cache.path).get(KEY) is not None


def test_a_blob_alone_that_others_can_write_is_not_run(tmp_path: Path) -> None:
    cache = _filled(tmp_path / "cache")
    cache.blob_path(KEY.digest).chmod(0o666)
    assert Cache.open(cache.path).get(KEY) is None


# Files that are made to fill the memory.


def _zeros(megabytes: int, monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.setattr(frame, "_is_bomb", lambda stored, payload: False)
    _, head, stored = frame.encode_blob(KEY, bytes(megabytes << 20), METADATA)
    monkeypatch.undo()
    return head + stored


def test_a_blob_that_would_fill_the_memory_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = _zeros(300, monkeypatch)
    cache = _filled(tmp_path / "cache")
    cache.blob_path(KEY.digest).write_bytes(content)
    assert cache.get(KEY) is None
    assert cache.stats().corrupt == 1


_MEMORY = """
import resource, sys
from pathlib import Path
from typing import Any
from snaprt_cache import Cache
from snaprt_cache.bundle import bundled_blobs, read_bundle
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
cache = Cache.open(sys.argv[1])
bundle = read_bundle(Path(sys.argv[2]), None)
for digest, content in bundled_blobs(bundle):
    assert cache.adopt(digest, content)
assert not [finding for finding in cache.verify() if finding.problem]
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_bundle_is_imported_in_little_memory_whatever_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache.open(tmp_path / "cache")
    assert cache.put(KEY, bytes(250 << 20), METADATA)
    other = Key((KeyPart("module", "large"),))
    assert cache.put(other, os.urandom(100 << 20), METADATA)
    bundle = write_bundle(tmp_path / "b", [KEY.digest, other.digest], cache.open_blob, None)
    done = run_program(_MEMORY, tmp_path / "into", bundle.path)
    assert int(done.stdout) < 40 * 1024


def test_a_payload_longer_than_it_claims_is_found_without_unpacking_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    import zstandard

    long = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(200 << 20))
    monkeypatch.setattr(zstandard.ZstdCompressor, "compress", lambda self, payload: long)
    _, head, stored = frame.encode_blob(KEY, b"short", METADATA)
    with pytest.raises(BlobDamaged, match="length"):
        check_blob(KEY.digest, io.BytesIO(head + stored), Signing())


@pytest.mark.parametrize("wrong", [1.5, "8", None, True, -1, [], 1 << 80])
def test_a_size_of_a_wrong_type_in_a_bundle_is_damage_with_a_hint(
    tmp_path: Path, wrong: object
) -> None:
    cache = _filled(tmp_path / "cache")
    bundle = write_bundle(tmp_path / "b", [KEY.digest], cache.open_blob, None)
    content = bundle.path.read_bytes()
    size = bundle.blobs[0].bytes
    manifest = content[512:].split(b"\0")[0]
    forged = json.loads(manifest)
    forged["entries"][0]["bytes"] = wrong
    text = (json.dumps(forged, indent=1) + "\n").encode()
    import tarfile

    header = tarfile.TarInfo("manifest.json")
    header.size = len(text)
    rest = content[512 + len(manifest) + -len(manifest) % 512 :]
    bundle.path.write_bytes(
        header.tobuf(tarfile.GNU_FORMAT) + text + bytes(-len(text) % 512) + rest
    )
    assert size > 0
    with pytest.raises(CacheError, match="is not a valid bundle") as caught:
        list(bundled_blobs(read_bundle(bundle.path, None)))
    assert caught.value.hint


# The file of digests.


def test_a_changed_digit_among_the_digests_misses_nothing_and_is_found_by_verify(
    tmp_path: Path,
) -> None:
    library = tmp_path / "libxla.so"
    library.write_bytes(b"code")
    os.utime(library, (1e9, 1e9))
    cache = _filled(tmp_path / "cache")
    right = file_digest(library, cache.folder)
    memo = cache.folder / file_digests.FILE_NAME
    for changed in (right.replace(right[9], "0" if right[9] != "0" else "1"), "short", 7):
        memo.write_text(memo.read_text().replace(f'"{right}"', json.dumps(changed)))
        (finding,) = [finding for finding in cache.verify() if finding.problem]
        assert (finding.subject, finding.path, finding.healed) == ("file of digests", memo, False)
        file_digests._digests_of_this_process.clear()
        assert file_digest(library, cache.folder) == right
        assert not [finding for finding in cache.verify() if finding.problem]
        file_digests._digests_of_this_process.clear()
    memo.write_text("{")
    assert [finding.healed for finding in cache.verify(heal=True) if finding.problem] == [True]
    assert not [finding for finding in cache.verify() if finding.problem]


def test_files_that_killed_writers_left_are_removed(tmp_path: Path) -> None:
    cache = _filled(tmp_path / "cache")
    left = [
        cache.folder / "temporary" / "0123456789ab-0123456789abcdef.tmp",
        cache.folder / ".misses.jsonl.0123456789abcdef.tmp",
        cache.folder / ".file-digests.json.0123456789abcdef.tmp",
        tmp_path / ".snaprt-bundle.0123456789abcdef.tmp",
    ]
    for path in left:
        path.write_text("half of it")
        os.utime(path, (1e9, 1e9))
    cache = Cache.open(cache.path)
    cache.put(KEY, PAYLOAD, METADATA)
    write_bundle(tmp_path / "b", [KEY.digest], cache.open_blob, None)
    assert [path for path in left if path.exists()] == []


def test_waiting_for_a_lock_that_is_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "v1"
    (folder / "flight").mkdir(parents=True, mode=0o700)
    for there in (folder.parent, folder):
        there.chmod(0o700)
    os.mkfifo(folder / "flight" / KEY.digest)
    with Flight(folder).lead(KEY.digest, lambda: False) as role:
        assert not role.leader


def test_a_record_of_misses_of_any_size_is_read_in_little_memory(tmp_path: Path) -> None:
    cache = _filled(tmp_path / "cache")
    with (cache.folder / "misses.jsonl").open("r+b") as file:
        line = file.readline()
        file.truncate(4 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + line)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert [miss.name for miss in cache.misses()][-1] == "step"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
