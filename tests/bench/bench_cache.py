"""What get and put cost as a cache fills; run it: python tests/bench/bench_cache.py [--quick].

Beside them, in the same run: JAX's LRUCache with a size limit, and a bare file that is read and
decompressed.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import fmean

import zstandard
from jax._src.lru_cache import LRUCache
from measuring import machine, median, show_table
from snaprt_cache import Cache, Key, KeyPart

from snaprt_cache import frame  # isort: skip (the benchmark fills the folder itself)

PAYLOAD_BYTES = 20_000
PARTS = 15
#: JAX's cache is this slow to fill only with a limit; ours is given one, too.
LIMIT_BYTES = 1 << 40
GET_SIZES = (100, 10_000, 100_000)
PUT_SIZES = (100, 1_000, 5_000, 10_000, 100_000)
PEER_SIZES = (100, 1_000, 5_000, 10_000)
LARGE_BYTES = 1_000_000


def _key(number: int) -> Key:
    parts = (KeyPart(f"part {part}", f"value {part}") for part in range(PARTS - 1))
    return Key((KeyPart("module", str(number)), *parts))


def _payload(count: int = PAYLOAD_BYTES) -> bytes:
    """Return bytes that compress about as an executable does, to a third."""
    chosen = random.Random(count)
    words = [chosen.randbytes(12) for _ in range(256)]
    return b"".join(chosen.choice(words) + chosen.randbytes(3) for _ in range(count // 15 + 1))[
        :count
    ]


PAYLOAD = _payload()


def _seconds(action: Callable[[int], object], numbers: Iterable[int]) -> list[float]:
    found = []
    for number in numbers:
        start = time.perf_counter()
        action(number)
        found.append(time.perf_counter() - start)
    return found


def _put(cache: Cache, number: int) -> None:
    assert cache.put(_key(number), PAYLOAD, {"name": f"program {number}", "compile_seconds": 1.0})


def _fill(cache: Cache, first: int, last: int) -> None:
    """Store blobs in bulk, as puts would leave them, and have the index made from them."""
    for number in range(first, last):
        header, head, stored = frame.encode_blob(
            _key(number), PAYLOAD, {"name": f"program {number}", "compile_seconds": 1.0}
        )
        path = cache.blob_path(header.key.digest)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_bytes(head + stored)
    cache.entries()


def ours(folder: Path, sizes: tuple[int, ...], rounds: int) -> dict[str, dict[int, list[float]]]:
    """Measure get and put at each size; ``evicting put`` is one that is over the limit."""
    times: dict[str, dict[int, list[float]]] = {"get": {}, "put": {}, "evicting put": {}}
    cache = Cache.open(folder, max_bytes=LIMIT_BYTES)
    _put(cache, 0)
    there = 1
    for size in sizes:
        _fill(cache, there, size)
        there = size + rounds
        times["put"][size] = _seconds(partial(_put, cache), range(size, there))
        chosen = random.Random(size).sample(range(size), min(rounds, size))
        times["get"][size] = _seconds(lambda number: cache.get(_key(number)), chosen)
        cache.close()
        full = Cache.open(folder, max_bytes=cache.stats().stored_bytes)
        times["evicting put"][size] = _seconds(partial(_put, full), range(there, there + rounds))
        full.close()
        there += rounds
    cache.close()
    return times


def peer(folder: Path, sizes: tuple[int, ...], rounds: int) -> dict[str, dict[int, list[float]]]:
    """Measure JAX's LRUCache, with a limit on its size, at each size."""
    times: dict[str, dict[int, list[float]]] = {"get": {}, "put": {}}
    cache = LRUCache(str(folder), max_size=LIMIT_BYTES)
    # JAX compresses before it stores; the same bytes go into both.
    content = zstandard.ZstdCompressor(level=frame.ZSTD_LEVEL).compress(PAYLOAD)
    there = 0
    for size in sizes:
        for number in range(there, size):
            (folder / f"entry-{number}-cache").write_bytes(content)
            (folder / f"entry-{number}-atime").write_bytes((0).to_bytes(8, "little"))
        count = rounds if size <= 1_000 else max(3, rounds // 20)
        there = size + count
        times["put"][size] = _seconds(
            lambda number: cache.put(f"entry-{number}", content), range(size, there)
        )
        chosen = random.Random(size).sample(range(size), min(count, size))
        times["get"][size] = _seconds(lambda number: cache.get(f"entry-{number}"), chosen)
    return times


def large(folder: Path, rounds: int) -> tuple[list[float], list[float]]:
    """Measure a get of 1 MB, and a bare file of the same bytes that is read and decompressed."""
    payload = _payload(LARGE_BYTES)
    cache = Cache.open(folder)
    assert cache.put(_key(0), payload, {})
    bare = folder / "bare"
    bare.write_bytes(zstandard.ZstdCompressor(level=frame.ZSTD_LEVEL).compress(payload))

    def read_bare(_: int) -> bytes:
        return zstandard.ZstdDecompressor().decompress(bare.read_bytes())

    gets: list[float] = []
    bares: list[float] = []
    for _ in range(rounds):
        gets += _seconds(lambda _: cache.get(_key(0)), range(1))
        bares += _seconds(read_bare, range(1))
    cache.close()
    return gets, bares


def _cell(times: list[float] | None) -> str:
    if times is None:
        return ""
    figures = (min(times), median(times), fmean(times), max(times))
    return "/".join(f"{1e3 * seconds:.2f}" for seconds in figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="up to 5,000 entries only")
    parser.add_argument("--rounds", type=int, default=300, help="calls measured at each size")
    parser.add_argument("--folder", type=Path, help="where to work; by default a temporary folder")
    arguments = parser.parse_args()
    top = 5_000 if arguments.quick else max(PUT_SIZES)
    print(machine())
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        root = Path(folder)
        for name in ("ours", "jax", "large"):
            (root / name).mkdir(mode=0o700)
        sizes = tuple(size for size in sorted({*GET_SIZES, *PUT_SIZES}) if size <= top)
        times = ours(root / "ours", sizes, arguments.rounds)
        peers = peer(
            root / "jax", tuple(size for size in PEER_SIZES if size <= top), arguments.rounds
        )
        gets, bares = large(root / "large", arguments.rounds)
    print("\nmilliseconds, min/median/mean/max")
    rows = []
    for size in sizes:
        put, theirs = times["put"][size], peers["put"].get(size)
        ratio = f"{median(theirs) / median(put):.1f}" if theirs else ""
        cells = [put, times["evicting put"][size], theirs, times["get"][size]]
        rows.append([f"{size:,}", *map(_cell, cells), _cell(peers["get"].get(size)), ratio])
    heads = ["entries", "put", "evicting put", "LRUCache put", "get", "LRUCache get"]
    show_table([*heads, "LRUCache put : put"], rows)
    growth = median(times["get"][sizes[-1]]) / median(times["get"][sizes[0]])
    print(f"\nget at {sizes[-1]:,} : get at {sizes[0]:,} entries, medians: {growth:.2f}")
    growth = median(times["put"][sizes[-1]]) / median(times["put"][sizes[0]])
    print(f"put at {sizes[-1]:,} : put at {sizes[0]:,} entries, medians: {growth:.2f}")
    print(
        f"get of 1 MB {_cell(gets)}, bare file {_cell(bares)}: ratio of medians "
        f"{median(gets) / median(bares):.2f}"
    )


if __name__ == "__main__":
    main()
