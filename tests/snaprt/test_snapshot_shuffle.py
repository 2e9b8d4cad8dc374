"""Byte-shuffling: undone exactly, and used where a sample says that it pays."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from snaprt.snapshot.format import arrays, schema
from snaprt.snapshot.format.arrays import BLOCK_BYTES, shuffle, to_storage, unshuffle
from snaprt.snapshot.format.store import ArrayStore


@settings(max_examples=40, deadline=None)
@given(count=st.integers(0, 3000), itemsize=st.sampled_from((1, 2, 4, 8, 16)))
def test_unshuffling_undoes_shuffling(count: int, itemsize: int) -> None:
    content = np.random.default_rng(count).bytes(count * itemsize)
    shuffled = shuffle(memoryview(content), itemsize)
    assert bytes(unshuffle(shuffled, itemsize)) == content


def test_blocks_are_shuffled_each_alone() -> None:
    content = np.random.default_rng(0).bytes(BLOCK_BYTES + 400)
    shuffled = bytes(shuffle(memoryview(content), 4))
    first = np.frombuffer(content[:BLOCK_BYTES], np.uint8).reshape(-1, 4).T
    last = np.frombuffer(content[BLOCK_BYTES:], np.uint8).reshape(-1, 4).T
    assert shuffled == first.tobytes() + last.tobytes()
    assert bytes(unshuffle(memoryview(shuffled), 4)) == content


def weights(dtype: str) -> np.ndarray:
    values = np.random.default_rng(0).standard_normal(1 << 19, np.float32) * 0.02
    return to_storage(values.astype(getattr(ml_dtypes, dtype, dtype)))


@pytest.mark.parametrize(("dtype", "ratio"), [("bfloat16", 1.4), ("float32", 1.15)])
def test_weights_are_shuffled_and_shrink(dtype: str, ratio: float) -> None:
    stored = weights(dtype)
    assert arrays.choose_compression(stored, arrays.WRITTEN_ONCE) == "zstd-shuffled"
    whole = arrays.bytes_of(stored)
    frame = zstandard.ZstdCompressor(3).compress(shuffle(whole, stored.itemsize))
    assert len(whole) / len(frame) > ratio


def test_what_does_not_gain_is_not_shuffled() -> None:
    noise = np.random.default_rng(0).integers(0, 2**64, 1 << 16, np.uint64)
    text = np.frombuffer(b"all of this compresses as it is. " * 4000, np.uint8)
    assert arrays.choose_compression(noise, arrays.WRITTEN_ONCE) == "none"
    assert arrays.choose_compression(text, arrays.WRITTEN_ONCE) == "zstd"
    assert arrays.choose_compression(noise[:10], arrays.WRITTEN_ONCE) == "none"


def test_arrays_in_a_snapshot_are_never_shuffled_so_that_ordinary_tools_read_them() -> None:
    ramp = np.arange(1 << 17)
    assert arrays.choose_compression(ramp, arrays.WRITTEN_EACH_TIME) == "zstd"
    assert arrays.choose_compression(ramp, arrays.WRITTEN_ONCE) == "zstd-shuffled"


def test_a_large_shuffled_array_comes_back_bit_for_bit(tmp_path: Path) -> None:
    import jax
    import jax.numpy as jnp
    from recordings import record

    from snaprt.snapshot.format.read import open_snapshot

    value = jax.random.normal(jax.random.key(0), (9 << 19,), jnp.bfloat16)  # two pieces
    path = record(tmp_path, lambda v: v[0], {"v": value}, store=ArrayStore(tmp_path))
    file = open_snapshot(path)
    assert file.record("v").compression == "zstd-shuffled"
    assert file.record("v").stored_bytes < 0.75 * value.nbytes
    assert file.array("v").tobytes() == np.asarray(value).tobytes()


def test_a_reader_of_format_1_is_told_by_the_version() -> None:
    plain = schema.ArrayRecord(
        name="a", shape=(), dtype="int8", weak_type=False, member="", compression="zstd",
        stored_dtype="|i1", stored_shape=(), stored_bytes=0, raw_bytes=1, digest="", key_impl="",
        sharding="", global_shape=(),
    )  # fmt: skip
    assert schema.major_version([plain]) == 1
    shuffled = schema.ArrayRecord(**{**vars(plain), "compression": "zstd-shuffled"})
    assert schema.major_version([plain, shuffled]) == 2
