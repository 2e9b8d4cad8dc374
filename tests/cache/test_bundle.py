"""Bundles: deterministic files of entries, verified as a whole before anything is taken."""

from __future__ import annotations

import json
import os
import random
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from damage import flip_bit
from snaprt_cache import Cache, CacheError, Key, KeyPart
from snaprt_cache.bundle import Bundle, bundled_blobs, read_bundle, write_bundle

from snaprt.cli import main
from snaprt.cli.cache.bundle import export, import_

SECRET = b"a key of a team's own"
NAMES = ("forward", "backward", "update")
# How many random changes of one byte are tried.
CHANGES = int(os.environ.get("SNAPRT_TEST_CHANGES", "300"))


def _key(name: str) -> Key:
    return Key((KeyPart("module", name), KeyPart("jax", "0.10.2")))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    cache = Cache.open(tmp_path / "cache")
    for number, name in enumerate(NAMES):
        metadata = {"name": name, "kind": "compiled", "compile_seconds": 2.0}
        cache.put(_key(name), os.urandom(100) * (number + 1), metadata)
    return cache


@pytest.fixture
def other(tmp_path: Path) -> Cache:
    return Cache.open(tmp_path / "other")


def _write(cache: Cache, path: Path, key: bytes | None = None) -> Bundle:
    digests = [row.key for row in cache.entries()]
    return write_bundle(path, digests, cache.open_blob, key)


@pytest.fixture
def bundle(cache: Cache, tmp_path: Path) -> Bundle:
    return _write(cache, tmp_path / "three.snapbundle")


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "key"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    monkeypatch.setenv("SNAPRT_CACHE_KEY_FILE", str(path))
    return path


# The file.


def test_the_same_entries_give_the_same_bytes(cache: Cache, bundle: Bundle, tmp_path: Path) -> None:
    again = _write(cache, tmp_path / "again")
    assert again.path.read_bytes() == bundle.path.read_bytes()


def test_an_imported_cache_exports_the_same_bytes(
    cache: Cache, bundle: Bundle, other: Cache, tmp_path: Path
) -> None:
    for digest, content in bundled_blobs(bundle):
        assert other.adopt(digest, content)
    assert _write(other, tmp_path / "again").path.read_bytes() == bundle.path.read_bytes()


def test_a_bundle_is_a_tar_archive_without_a_trace_of_where_it_was_made(bundle: Bundle) -> None:
    with tarfile.open(bundle.path) as archive:
        members = archive.getmembers()
        front = archive.extractfile(members[0])
        assert front is not None
        manifest = json.load(front)
    assert (manifest["format"], manifest["version"]) == ("snaprt bundle", 1)
    keys = [entry["key"] for entry in manifest["entries"]]
    assert keys == sorted(keys)
    names = [f"blobs/{key[:2]}/{key}.blob" for key in keys]
    assert [member.name for member in members] == ["manifest.json", *names]
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname) for m in members} == {(0, 0, 0, "", "")}


def test_what_was_bundled_is_read_back(cache: Cache, bundle: Bundle) -> None:
    assert read_bundle(bundle.path, None) == bundle
    assert {
        digest: cache.blob_path(digest).read_bytes() for digest in (_key(n).digest for n in NAMES)
    } == {digest: content.read() for digest, content in bundled_blobs(bundle)}


def test_a_signed_bundle_is_read_with_its_key_and_with_none(cache: Cache, tmp_path: Path) -> None:
    signed = _write(cache, tmp_path / "signed", SECRET)
    assert signed.signed
    assert read_bundle(signed.path, SECRET) == signed
    assert read_bundle(signed.path, None) == signed


@pytest.mark.parametrize("key", [None, b"another key of 16 bytes"])
def test_a_bundle_without_the_right_signature_is_refused(
    cache: Cache, tmp_path: Path, key: bytes | None
) -> None:
    path = _write(cache, tmp_path / "bundle", key).path
    with pytest.raises(CacheError, match="signed"):
        read_bundle(path, SECRET)


def test_a_signature_does_not_hold_for_another_bundle(
    cache: Cache, bundle: Bundle, tmp_path: Path
) -> None:
    signed = _write(cache, tmp_path / "signed", SECRET).path.read_bytes()
    cache.put(_key("forward"), b"something else", {"name": "forward"})
    changed = _write(cache, tmp_path / "changed", SECRET).path.read_bytes()
    first = 512 + 1024  # the manifest, which both have in the same size
    assert signed[:first] != changed[:first]
    start = next(p for p in range(0, len(signed), 512) if signed[p : p + 9] == b"signature")
    forged = tmp_path / "forged"
    forged.write_bytes(changed[:start] + signed[start : start + 1024] + changed[start + 1024 :])
    with pytest.raises(CacheError, match="signed with a different key"):
        read_bundle(forged, SECRET)


def test_no_change_of_a_byte_anywhere_is_taken_for_a_bundle(cache: Cache, tmp_path: Path) -> None:
    whole = _write(cache, tmp_path / "signed", SECRET).path.read_bytes()
    changed = tmp_path / "changed"
    chance = random.Random(3)
    for _ in range(CHANGES):
        content = bytearray(whole)
        content[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        changed.write_bytes(content)
        with pytest.raises(CacheError):
            read_bundle(changed, SECRET)


def test_no_truncation_and_no_addition_is_taken_for_a_bundle(
    bundle: Bundle, tmp_path: Path
) -> None:
    whole = bundle.path.read_bytes()
    changed = tmp_path / "changed"
    chance = random.Random(4)
    for length in [0, 1, 511, 512, len(whole) - 1, *chance.sample(range(len(whole)), CHANGES // 3)]:
        changed.write_bytes(whole[:length])
        with pytest.raises(CacheError):
            read_bundle(changed, None)
    changed.write_bytes(whole + b"\0")
    with pytest.raises(CacheError):
        read_bundle(changed, None)


def test_a_tar_archive_that_snaprt_did_not_write_is_no_bundle(
    bundle: Bundle, tmp_path: Path
) -> None:
    foreign = tmp_path / "foreign.tar"
    with tarfile.open(foreign, "w") as archive:
        archive.add(bundle.path, "../../escape")
    with pytest.raises(CacheError, match="does not start with the header of a bundle"):
        read_bundle(foreign, None)


def test_a_newer_format_is_named(bundle: Bundle, tmp_path: Path) -> None:
    newer = tmp_path / "newer"
    newer.write_bytes(bundle.path.read_bytes().replace(b'"version": 1', b'"version": 7'))
    with pytest.raises(CacheError, match="format version 7"):
        read_bundle(newer, None)


def test_a_bundle_that_changed_after_it_was_verified_is_not_used(
    cache: Cache, bundle: Bundle
) -> None:
    cache.put(_key("forward"), b"something else", {"name": "forward"})
    _write(cache, bundle.path)
    with pytest.raises(CacheError, match="changed since"):
        list(bundled_blobs(bundle))


def test_a_damaged_entry_is_not_exported(cache: Cache, tmp_path: Path) -> None:
    path = cache.blob_path(_key("forward").digest)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CacheError, match="damaged"):
        _write(cache, tmp_path / "bundle")
    assert [p for p in tmp_path.iterdir() if "bundle" in p.name] == []


# The commands.


def _run(command: object, *words: object) -> Result:
    return CliRunner().invoke(command, [str(word) for word in words])  # type: ignore[arg-type]


def test_a_bundle_never_takes_the_place_of_what_is_no_file(cache: Cache, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(CacheError, match="not a regular file"):
        _write(cache, pipe)
    assert pipe.is_fifo()


def test_export_and_import_carry_entries_to_another_cache(
    cache: Cache, other: Cache, tmp_path: Path
) -> None:
    file = tmp_path / "all.snapbundle"
    assert _run(export, file, "--dir", cache.path).exit_code == 0
    result = _run(import_, file, "--dir", other.path, "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert (answer["schema"], answer["version"]) == ("snaprt.cache.import", 1)
    assert (answer["imported"], answer["already_there"]) == (3, 0)
    assert {row.name for row in other.entries()} == set(NAMES)
    for name in NAMES:
        ours, theirs = cache.get(_key(name)), other.get(_key(name))
        assert ours is not None
        assert theirs is not None
        assert (ours.payload, ours.metadata) == (theirs.payload, theirs.metadata)
    again = json.loads(_run(import_, file, "--dir", other.path, "--json").stdout)
    assert (again["imported"], again["already_there"]) == (0, 3)


def test_export_takes_those_that_are_named(cache: Cache, tmp_path: Path) -> None:
    def exported(*words: str) -> list[str]:
        result = _run(export, tmp_path / "some", "--dir", cache.path, "--json", *words)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["entries"]

    forward, backward, update = (_key(name).digest for name in NAMES)
    assert exported("--name", "ward") == sorted([forward, backward])
    assert exported("--name", "for*d", "--name", "update") == sorted([forward, update])
    assert exported("--key", update[:10].upper()) == [update]


def test_export_of_nothing_is_an_error(
    cache: Cache, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "none"
    words = ["cache", "export", str(file), "--dir", str(cache.path), "--name", "absent"]
    assert main.main(words) == 2
    assert "no entry" in capsys.readouterr().err
    assert not file.exists()


def test_an_unsigned_bundle_is_refused_where_a_key_is_set(
    cache: Cache,
    bundle: Bundle,
    other: Cache,
    key_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main.main(["cache", "import", str(bundle.path), "--dir", str(other.path)]) == 2
    told = capsys.readouterr().err
    assert "is not signed" in told
    assert "hint:" in told
    assert other.entries() == []
    result = _run(export, bundle.path, "--dir", cache.path, "--json")
    assert json.loads(result.stdout)["signed"] is True
    assert main.main(["cache", "import", str(bundle.path), "--dir", str(other.path)]) == 0
    assert len(other.entries()) == 3


def test_nothing_of_a_damaged_bundle_is_imported(
    bundle: Bundle, other: Cache, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_bit(bundle.path, -2000)  # in the last of the entries
    assert main.main(["cache", "import", str(bundle.path), "--dir", str(other.path)]) == 2
    assert "not a valid bundle" in capsys.readouterr().err
    assert other.entries() == []


@pytest.mark.parametrize("words", [["export", "absent/file"], ["import", "absent"]])
def test_a_file_that_cannot_be_opened_is_named(
    cache: Cache,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.main(["cache", *words, "--dir", str(cache.path)]) == 2
    assert words[1] in capsys.readouterr().err
