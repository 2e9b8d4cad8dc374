"""A cache with a remote tier behind it: it fills from there, gives there, and believes nothing."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from answers import Answer, give, stall
from programs import run_program
from snaprt_cache import Cache, Key, KeyPart
from snaprt_cache.remote import object_name, open_tier

KEY = Key((KeyPart("module", "step"), KeyPart("jax", "0.10.2")))
METADATA = {"name": "step", "compile_seconds": 2.0}
PAYLOAD = bytes(range(256)) * 100


class Machine:
    """A cache directory of its own in front of a remote, and the events of both."""

    def __init__(self, folder: Path, url: str, timeout: float = 10.0, key: bytes | None = None):
        self.events: Counter[str] = Counter()
        self.tier = open_tier(url, timeout, self._count)
        self.cache = Cache.open(folder, on_event=self._count, signing_key=key, tier=self.tier)

    def _count(self, name: str, value: float) -> None:
        self.events[name.removeprefix("PersistentCache")] += int(value)

    def payload(self) -> bytes | None:
        entry = self.cache.get(KEY)
        return None if entry is None else entry.payload


def _blob(tmp_path: Path, key: Key = KEY, signing_key: bytes | None = None) -> bytes:
    cache = Cache.open(tmp_path / f"made-{time.time_ns()}", signing_key=signing_key)
    assert cache.put(key, PAYLOAD, METADATA)
    return cache.blob_path(key.digest).read_bytes()


def test_what_one_machine_compiles_another_finds_and_keeps(bucket: str, tmp_path: Path) -> None:
    one = Machine(tmp_path / "one", bucket)
    assert one.payload() is None
    one.cache.put(KEY, PAYLOAD, METADATA)
    one.tier.close(20)
    assert one.events == {"RemoteMiss": 1, "Miss": 1, "Put": 1, "RemotePut": 1}

    two = Machine(tmp_path / "two", bucket)
    assert two.payload() == PAYLOAD
    assert (two.events["RemoteHit"], two.events["Hit"], two.events["SavedSeconds"]) == (1, 1, 1)
    assert two.payload() == PAYLOAD
    assert (two.events["RemoteHit"], two.events["Hit"]) == (1, 2)
    assert [row.key for row in two.cache.entries()] == [KEY.digest]
    assert two.events["Put"] == two.events["RemotePut"] == 0


@pytest.fixture
def lies(tmp_path: Path) -> dict[str, bytes]:
    whole = _blob(tmp_path)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    return {
        "nothing": b"",
        "a page": b"<html>please log in</html>",
        "a bit": bytes(flipped),
        "half": whole[: len(whole) // 2],
        "more": whole + b"\0",
        "another key's": _blob(tmp_path, Key((KeyPart("module", "other"),))),
    }


@pytest.mark.parametrize("lie", ["nothing", "a page", "a bit", "half", "more", "another key's"])
def test_a_lying_remote_is_a_miss_and_leaves_nothing_behind(
    serve: Callable[[Answer], str], lies: dict[str, bytes], lie: str, tmp_path: Path
) -> None:
    machine = Machine(tmp_path / "one", serve(give(lies[lie])))
    assert machine.payload() is None
    assert machine.events == {"Corrupt": 1, "Miss": 1}
    assert machine.cache.entries() == []
    assert machine.cache.put(KEY, PAYLOAD, METADATA)
    assert machine.payload() == PAYLOAD


def test_a_damaged_blob_in_the_bucket_is_healed_by_who_finds_it(
    folder: str, tmp_path: Path
) -> None:
    there = Path(folder.removeprefix("file://")) / object_name(KEY.digest)
    there.parent.mkdir(parents=True)
    there.write_bytes(b"damaged")
    finder = Machine(tmp_path / "finder", folder)
    assert finder.payload() is None
    finder.cache.put(KEY, PAYLOAD, METADATA)
    finder.tier.close(20)
    assert Machine(tmp_path / "next", folder).payload() == PAYLOAD


@pytest.mark.parametrize("signed_with", [None, b"somebody else's key"])
def test_where_a_key_is_set_only_what_it_signed_is_taken_from_the_remote(
    serve: Callable[[Answer], str], signed_with: bytes | None, tmp_path: Path
) -> None:
    blob = _blob(tmp_path, signing_key=signed_with)
    machine = Machine(tmp_path / "one", serve(give(blob)), key=b"the team's own key")
    assert machine.payload() is None
    assert machine.events == {"Refused": 1, "Miss": 1}


def test_a_signed_blob_is_taken_from_the_remote(
    serve: Callable[[Answer], str], tmp_path: Path
) -> None:
    key = b"the team's own key"
    url = serve(give(_blob(tmp_path, signing_key=key)))
    assert Machine(tmp_path / "one", url, key=key).payload() == PAYLOAD


def test_a_local_hit_asks_nobody(serve: Callable[[Answer], str], tmp_path: Path) -> None:
    machine = Machine(tmp_path / "one", serve(stall), timeout=60.0)
    machine.cache.put(KEY, PAYLOAD, METADATA)
    assert machine.payload() == PAYLOAD
    assert machine.events == {"Put": 1, "Hit": 1, "SavedSeconds": 1}


def test_a_hundred_misses_wait_once_for_a_remote_that_hangs(
    serve: Callable[[Answer], str], tmp_path: Path
) -> None:
    machine = Machine(tmp_path / "one", serve(stall), timeout=0.5)
    start = time.monotonic()
    for number in range(100):
        assert machine.cache.get(Key((KeyPart("module", str(number)),))) is None
    assert time.monotonic() - start < 4.5  # before the first pause ends
    assert machine.events == {"Miss": 100, "RemoteError": 1, "RemoteSkipped": 99}


PROGRAM = """
import jax, jax.numpy as jnp, snaprt
with snaprt.lazy():
    print(float(jnp.sum(jnp.arange(8.0) ** 2)))
snaprt.mark_step()
for name in snaprt.metrics.counter_names():
    if "Remote" in name:
        print(name, snaprt.metrics.counter_value(name))
"""


def _run_program(folder: Path, remote: str) -> subprocess.CompletedProcess[str]:
    done = run_program(
        PROGRAM, JAX_PLATFORMS="cpu", SNAPRT_CACHE_DIR=folder, SNAPRT_CACHE_REMOTE=remote
    )
    assert done.stdout.startswith("140.0\n")
    return done


def test_a_program_takes_from_the_bucket_what_another_machine_compiled(
    bucket: str, tmp_path: Path
) -> None:
    first = _run_program(tmp_path / "one", bucket)
    assert "PersistentCacheRemoteMiss" in first.stdout
    second = _run_program(tmp_path / "two", bucket)
    assert "PersistentCacheRemoteHit" in second.stdout
    assert "PersistentCacheRemoteMiss" not in second.stdout


def test_a_program_runs_on_with_one_warning_where_the_remote_is_dead(tmp_path: Path) -> None:
    done = _run_program(tmp_path / "one", "http://127.0.0.1:1/cache")
    assert "PersistentCacheRemoteError 1" in done.stdout
    assert done.stderr.count("The remote compile cache") == 1
