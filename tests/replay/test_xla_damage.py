"""Damaged and foreign files of XLA's kinds are refused with a sentence, never with a traceback."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from snaprt_replay.load.load import load
from snaprt_replay.load.xla_files import (
    load_hlo_module,
    load_hlo_snapshot,
    load_hlo_text,
    load_unoptimized_snapshot,
)

from snaprt import jaxapi
from snaprt.errors import SnapshotError
from snaprt.hlo import proto
from snaprt.hlo.literals import array_to_literal

X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(scope="module")
def module() -> bytes:
    return jaxapi.hlo_proto(jax.jit(lambda x: jnp.tanh(x @ x.T)).lower(X))


@pytest.fixture
def snapshot(module: bytes) -> proto.XlaMessage:
    snapshot = proto.HloSnapshot()
    snapshot.hlo.hlo_module.ParseFromString(module)
    snapshot.arguments.append(array_to_literal(X))
    snapshot.result.CopyFrom(array_to_literal(np.tanh(X @ X.T)))
    return snapshot


def written(folder: Path, content: bytes) -> Path:
    path = folder / "module_0001.jit_f.snapshot.1.pb"
    path.write_bytes(content)
    return path


def refused(path: Path) -> bool:
    """Return whether the file is refused; anything but a SnapshotError fails the test."""
    with contextlib.suppress(SnapshotError):
        load_hlo_snapshot(path)
        return False
    return True


def test_a_snapshot_built_here_loads(tmp_path: Path, snapshot: proto.XlaMessage) -> None:
    loaded = load_hlo_snapshot(written(tmp_path, proto.serialize(snapshot)))
    assert loaded.outputs is not None


def test_an_empty_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="empty file for snapshots over 2 GB"):
        load(written(tmp_path, b""))


def test_every_truncation_is_refused_or_complete(
    tmp_path: Path, snapshot: proto.XlaMessage
) -> None:
    content = proto.serialize(snapshot)
    for length in range(1, len(content), 7):
        path = written(tmp_path, content[:length])
        if not refused(path):  # cut between two fields: the result is missing, and said to be
            assert load_hlo_snapshot(path).outputs is None


def test_flipped_bits_never_raise_anything_else(tmp_path: Path, snapshot: proto.XlaMessage) -> None:
    content = proto.serialize(snapshot)
    choice = random.Random(0)
    for _ in range(200):
        damaged = bytearray(content)
        damaged[choice.randrange(len(damaged))] ^= 1 << choice.randrange(8)
        refused(written(tmp_path, bytes(damaged)))


def test_foreign_bytes_are_refused_by_every_loader(tmp_path: Path) -> None:
    path = written(tmp_path, np.random.default_rng(0).bytes(4000))
    for loader in (load_hlo_snapshot, load_unoptimized_snapshot, load_hlo_module, load_hlo_text):
        with pytest.raises(SnapshotError):
            loader(path)


def test_arguments_that_do_not_fit_the_module_are_named(
    tmp_path: Path, snapshot: proto.XlaMessage
) -> None:
    snapshot.arguments.append(array_to_literal(X))
    with pytest.raises(
        SnapshotError, match=r"float32\[2,3\], float32\[2,3\].*parameters of the module"
    ):
        load_hlo_snapshot(written(tmp_path, proto.serialize(snapshot)))


def test_a_program_of_two_devices_is_refused(tmp_path: Path, module: bytes) -> None:
    snapshot = proto.HloUnoptimizedSnapshot()
    snapshot.hlo_module.ParseFromString(module)
    for _ in range(2):
        snapshot.partitions.add().arguments.append(array_to_literal(X))
    with pytest.raises(SnapshotError, match="ran on 2 devices"):
        load_unoptimized_snapshot(written(tmp_path, proto.serialize(snapshot)))


def test_hlo_text_with_its_constants_left_out_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "module.txt"
    path.write_text("HloModule m\n\nENTRY e {\n  ROOT c = f32[99]{0} constant({...})\n}\n")
    with pytest.raises(SnapshotError, match="large constants are missing"):
        load_hlo_text(path)


def test_hlo_text_that_does_not_parse_says_where(tmp_path: Path) -> None:
    path = tmp_path / "module.txt"
    path.write_text("HloModule m\n\nENTRY e {\n  ROOT p = f32[3]{0} add(q, q)\n}\n")
    with pytest.raises(SnapshotError, match="line 4, column 26: "):
        load_hlo_text(path)


def test_a_module_from_a_gpu_takes_the_unoptimized_one_beside_it(
    tmp_path: Path, module: bytes, snapshot: proto.XlaMessage
) -> None:
    entry = snapshot.hlo.hlo_module.computations[-1]
    (product,) = (one for one in entry.instructions if one.opcode == "dot")
    product.opcode, product.custom_call_target = "custom-call", "__cublas$gemm"
    path = written(tmp_path, proto.serialize(snapshot))
    assert "__cublas$gemm" in load_hlo_snapshot(path).notes[0]
    before = proto.HloProto()
    before.hlo_module.ParseFromString(module)
    beside = tmp_path / "module_0001.jit_f.before_optimizations.hlo.pb"
    beside.write_bytes(proto.serialize(before))
    loaded = load_hlo_snapshot(path)
    assert beside.name in loaded.notes[0]
    assert b"__cublas" not in loaded.stablehlo


@pytest.mark.parametrize(("number", "said"), [(14, "opaque, has no NumPy"), (99, "number 99")])
def test_a_value_of_a_type_that_no_array_has_is_named_with_its_place(
    number: int, said: str, tmp_path: Path, snapshot: proto.XlaMessage
) -> None:
    snapshot.arguments[0].shape.element_type = number
    with pytest.raises(SnapshotError, match=f"argument 0: its XLA element type, {said}") as caught:
        load_hlo_snapshot(written(tmp_path, proto.serialize(snapshot)))
    assert caught.value.hint


def test_values_that_xla_could_not_read_back_are_missing_and_no_damage(
    tmp_path: Path, snapshot: proto.XlaMessage
) -> None:
    snapshot.arguments[0].Clear()
    snapshot.arguments[0].shape.SetInParent()
    snapshot.result.Clear()
    snapshot.result.shape.SetInParent()
    loaded = load_hlo_snapshot(written(tmp_path, proto.serialize(snapshot)))
    assert (loaded.inputs, loaded.outputs) == (None, None)
    assert any("no value for argument 0" in note for note in loaded.notes)
