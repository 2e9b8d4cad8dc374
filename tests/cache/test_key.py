"""Keys: parts that cannot run together, flags that matter, digests that are remembered."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import blake3
import pytest
from hypothesis import given
from hypothesis import strategies as st
from snaprt_cache import Key, KeyPart, cpu_features, file_digest, file_digests, relevant_xla_flags

_texts = st.text(max_size=8)
_keys = st.lists(st.builds(KeyPart, _texts, _texts), max_size=4).map(lambda p: Key(tuple(p)))


@given(_keys, _keys)
def test_two_keys_have_one_digest_exactly_when_their_parts_are_equal(one: Key, two: Key) -> None:
    assert (one.digest == two.digest) == (one == two)


def test_a_keys_digest_is_the_same_in_every_process_and_version() -> None:
    key = Key((KeyPart("module", "m"), KeyPart("jax", "0.10.2")))
    assert key.digest == "b6d57e10983c26ab30fd4ef3e6a6faf867ede61c2e52c9f9993f6ebdd06c17b8"


def test_text_that_moves_between_name_and_value_changes_the_digest() -> None:
    assert Key((KeyPart("ab", "c"),)).digest != Key((KeyPart("a", "bc"),)).digest


@pytest.mark.parametrize(
    "flag",
    [
        "--xla_dump_to=/tmp/x",
        "--xla_dump_hlo_as_text",
        "--xla_dump_hlo_snapshots=true",
        "--xla_hlo_profile",
        "--xla_force_host_platform_device_count=8",
        "--xla_gpu_kernel_cache_file=/tmp/k",
        "--v=2",
        "--vmodule=a=3",
        "--minloglevel=1",
    ],
)
def test_flags_for_dumps_logs_and_caches_are_not_part_of_a_key(flag: str) -> None:
    assert relevant_xla_flags([flag]) == ()


def test_flags_that_may_change_the_executable_are_sorted_by_name() -> None:
    flags = ["--xla_b=2", "--xla_dump_to=x", "--xla_a=1", "--verify_hlo"]
    assert relevant_xla_flags(flags) == ("--verify_hlo", "--xla_a=1", "--xla_b=2")


def test_a_flag_given_twice_keeps_its_order_for_the_last_one_wins() -> None:
    assert relevant_xla_flags(["--xla_a=9", "--xla_a=1"]) == ("--xla_a=9", "--xla_a=1")


def test_cpu_features_are_short_and_name_the_architecture() -> None:
    text = cpu_features()
    assert os.uname().machine in text
    assert len(text) < 40
    assert text == cpu_features()


def _old_file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    an_hour_ago = time.time() - 3600
    os.utime(path, (an_hour_ago, an_hour_ago))
    return path


def test_a_files_digest_is_blake3_of_its_content(tmp_path: Path) -> None:
    path = _old_file(tmp_path / "lib.so", b"x" * 100_000)
    assert file_digest(path, tmp_path / "memo") == blake3.blake3(b"x" * 100_000).hexdigest()


def test_an_empty_file_has_a_digest(tmp_path: Path) -> None:
    path = _old_file(tmp_path / "empty", b"")
    assert file_digest(path) == blake3.blake3(b"").hexdigest()


def test_a_digest_is_remembered_and_a_changed_file_is_read_again(tmp_path: Path) -> None:
    memo = tmp_path / "cache" / "v1"
    path = _old_file(tmp_path / "lib.so", b"one")
    first = file_digest(path, memo)
    assert list(json.loads((memo / "file-digests.json").read_text())["files"].values()) == [first]
    path.write_bytes(b"two")  # the same size; only the time of change tells
    assert file_digest(path, memo) == blake3.blake3(b"two").hexdigest()


def test_a_file_that_changed_just_now_is_not_remembered(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(b"one")
    file_digest(path, tmp_path / "memo")
    assert not (tmp_path / "memo").exists()


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"[]", b'{"files": 3}', b'{"files": {"a": 1}}']
)
def test_a_garbled_memory_of_digests_is_made_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file-digests.json").write_bytes(content)
    path = _old_file(tmp_path / "lib.so", b"library " + content)
    assert file_digest(path, tmp_path) == blake3.blake3(b"library " + content).hexdigest()
    assert json.loads((tmp_path / "file-digests.json").read_text())["version"] == 2


def test_a_file_that_many_want_the_digest_of_at_once_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _old_file(tmp_path / "library.so", b"x" * 100_000)
    reads: list[str | Path] = []
    digest_of_content = file_digests._digest_of_content

    def counted(path: str | Path) -> str:
        reads.append(path)
        time.sleep(0.05)
        return digest_of_content(path)

    monkeypatch.setattr(file_digests, "_digest_of_content", counted)
    with ThreadPoolExecutor(8) as pool:
        digests = set(pool.map(lambda _: file_digest(path, tmp_path / "memo"), range(8)))
    assert digests == {blake3.blake3(b"x" * 100_000).hexdigest()}
    assert len(reads) == 1


def test_a_memory_that_cannot_be_written_only_costs_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    path = _old_file(tmp_path / "lib.so", b"content")
    expected = blake3.blake3(b"content").hexdigest()
    assert file_digest(path, tmp_path / "file" / "memo") == expected


def test_a_file_that_is_not_there_has_no_digest(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        file_digest(tmp_path / "absent")
