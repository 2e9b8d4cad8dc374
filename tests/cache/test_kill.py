"""SIGKILL at every system call of a put and of an eviction: the cache stays usable."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from snaprt_cache import Cache, Key, KeyPart
from system_calls import can_trace, killed_at

pytestmark = pytest.mark.skipif(
    not can_trace(), reason="no ptrace here: a child cannot be stopped at its system calls"
)

PAYLOAD = bytes(range(256)) * 40
#: By default one system call in so many, in the slow test each.
STEP = 7


def _key(number: int) -> Key:
    return Key((KeyPart("module", str(number)),))


def _put_one(path: Path) -> None:
    Cache.open(path).put(_key(0), PAYLOAD, {"name": "killed"})


def _replace_one(path: Path) -> None:
    Cache.open(path).put(_key(1), PAYLOAD + b"again", {"name": "killed"})


def _put_over_the_limit(path: Path) -> None:
    Cache.open(path, max_bytes=2_000).put(_key(0), PAYLOAD, {"name": "killed"})


def _collect(path: Path) -> None:
    Cache.open(path).gc(1_000)


def _get_a_damaged_one(path: Path) -> None:
    Cache.open(path).blob_path(_key(1).digest).write_bytes(b"nonsense")
    Cache.open(path).get(_key(1))


WORK: list[Callable[[Path], None]] = [
    _put_one,
    _replace_one,
    _put_over_the_limit,
    _collect,
    _get_a_damaged_one,
]


def _assert_usable(path: Path) -> None:
    cache = Cache.open(path)
    for number in range(5):
        entry = cache.get(_key(number))
        assert entry is None or entry.payload in (PAYLOAD, PAYLOAD + b"again")
    rows = cache.entries()
    there = {p.stem for p in cache.folder.glob("blobs/*/*.blob")}
    assert {row.key for row in rows} == there
    assert cache.put(_key(9), PAYLOAD, {"name": "after"})
    entry = cache.get(_key(9))
    assert entry is not None
    assert entry.payload == PAYLOAD
    stats = cache.stats()
    assert stats.entries == len(there | {_key(9).digest})
    assert stats.stored_bytes == sum(
        path.stat().st_size for path in cache.folder.glob("blobs/*/*.blob")
    )
    assert all(not finding.problem for finding in cache.verify())
    cache.gc(0)
    assert cache.entries() == []
    cache.close()


def _kill_at_each(tmp_path: Path, work: Callable[[Path], None], step: int) -> None:
    before = tmp_path / "before"
    cache = Cache.open(before)
    for number in range(1, 5):
        cache.put(_key(number), PAYLOAD, {"name": f"program {number}"})
    cache.close()
    del cache
    number = 0
    while True:
        path = tmp_path / "cache"
        shutil.copytree(before, path)
        killed = killed_at(partial(work, path), number)
        _assert_usable(path)
        shutil.rmtree(path)
        if not killed:
            break
        number += step
    assert number > 20


@pytest.mark.slow
@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__[1:])
def test_a_kill_at_any_of_many_system_calls_leaves_a_usable_cache(
    tmp_path: Path, work: Callable[[Path], None]
) -> None:
    _kill_at_each(tmp_path, work, STEP)


@pytest.mark.full
@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__[1:])
def test_a_kill_at_every_system_call_leaves_a_usable_cache(
    tmp_path: Path, work: Callable[[Path], None]
) -> None:
    _kill_at_each(tmp_path, work, 1)


def test_a_kill_at_any_of_many_system_calls_of_the_first_put_leaves_a_usable_cache(
    tmp_path: Path,
) -> None:
    number = 0
    while True:
        path = tmp_path / f"cache{number}"
        killed = killed_at(partial(_put_one, path), number)
        _assert_usable(path)
        if not killed:
            break
        number += 4 * STEP
