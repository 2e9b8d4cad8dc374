"""Snapshot files: what is written is what is read, or an error that says what is wrong."""

from __future__ import annotations

import dataclasses
import io
import json
import random
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import run_program

from snaprt.errors import SnapshotError
from snaprt.host.whole_files import remove_leftovers
from snaprt.snapshot.format import schema
from snaprt.snapshot.format.arrays import DTYPE_NAMES, true_dtype
from snaprt.snapshot.format.places import is_snapshot
from snaprt.snapshot.format.read import (
    open_snapshot,
    read_manifest,
    sibling_inputs,
    sibling_outputs,
)
from snaprt.snapshot.format.repeated import Encoded, EncodedArrays, Form
from snaprt.snapshot.format.write import write_file, write_snapshot

DEVICE = schema.DeviceRecord("cpu", "cpu", 0, 0)
EXECUTION = schema.ExecutionRecord(
    role="inputs",
    name="train_step",
    graph_id="0123456789abcdef",
    process=0,
    executable=3,
    device_index=0,
    execution_count=496,
    step=7,
    time=1_795_265_970.25,
    device=DEVICE,
    devices=(DEVICE,),
    platform_version="cpu",
    versions={"jax": "0.10.2"},
    xla_flags="--xla_dump_to=dump",
    environment={"JAX_ENABLE_X64": "0"},
    jax_config={"jax_enable_x64": "False"},
    input_names=("x",),
    output_names=("y",),
    donated=(0,),
    source_locations=("train.py:12 (step)",),
)
MODULE = schema.ModuleBytes(b"ML\xefR" + bytes(5000), b"hlo", b"")


def contents(arrays: dict[str, np.ndarray]) -> schema.Contents:
    return schema.Contents(
        EXECUTION,
        MODULE,
        [schema.ArrayContent(n, lambda v=v: v, v.nbytes) for n, v in arrays.items()],
    )


def bits(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def assert_round_trip(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    path = folder / "a.inputs.snap"
    manifest = write_snapshot(path, contents(arrays))
    snapshot = open_snapshot(path)
    assert snapshot.manifest == manifest
    assert snapshot.array_names == tuple(arrays)
    for name, array in arrays.items():
        read = snapshot.array(name)
        assert read.dtype == array.dtype.newbyteorder("=")
        assert read.shape == array.shape == snapshot.record(name).shape
        assert bits(read) == bits(array.astype(read.dtype))


def sample(dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    generator = np.random.default_rng(5)
    if dtype.name.startswith(("int", "uint", "bool")):
        return generator.integers(0, 2, shape).astype(dtype)
    if dtype.kind == "c":
        return (generator.normal(size=shape) + 1j * generator.normal(size=shape)).astype(dtype)
    return generator.normal(size=shape).astype(dtype)


def test_a_file_that_cannot_be_written_is_an_error_with_another_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SnapshotError, match="cannot write") as caught:
        write_snapshot(tmp_path / "file" / "a.inputs.snap", contents({}), elsewhere="use -o")
    assert caught.value.hint == "use -o"


@pytest.mark.parametrize("name", DTYPE_NAMES)
def test_every_dtype_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    dtype = true_dtype(name)
    shapes = ((), (0,), (3, 0, 2), (5,), (2, 3, 4), (64, 300))
    assert_round_trip(tmp_path, {f"a{i}": sample(dtype, s) for i, s in enumerate(shapes)})


@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(0, 7), max_size=6),
    dtype=st.sampled_from(DTYPE_NAMES),
    transposed=st.booleans(),
)
def test_every_shape_and_order_comes_back(
    shape: list[int], dtype: str, transposed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    array = sample(true_dtype(dtype), tuple(shape))
    arrays = {"a": array.T if transposed else array}
    assert_round_trip(tmp_path_factory.mktemp("shapes"), arrays)


def test_nan_payloads_and_negative_zero_keep_their_bits(tmp_path: Path) -> None:
    words = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x7F800001], np.uint32)
    assert_round_trip(tmp_path, {"a": words.view(np.float32)})


def test_big_endian_arrays_come_back_in_native_order_with_the_same_values(tmp_path: Path) -> None:
    assert_round_trip(tmp_path, {"a": np.arange(5, dtype=">f4"), "b": np.arange(5, dtype=">i8")})


def test_narrow_integers_are_stored_as_plain_integers_of_the_same_value(tmp_path: Path) -> None:
    path = tmp_path / "a.inputs.snap"
    write_snapshot(path, contents({"a": np.array([-8, 7, -1], ml_dtypes.int4)}))
    with zipfile.ZipFile(path) as archive:
        stored = np.load(io.BytesIO(archive.read("arrays/0000.npy")))
    assert stored.dtype == np.int8
    assert stored.tolist() == [-8, 7, -1]


def test_a_dtype_that_no_snapshot_can_hold_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="dtype datetime64"):
        write_snapshot(tmp_path / "a.inputs.snap", contents({"a": np.array([0], "datetime64[s]")}))
    assert list(tmp_path.iterdir()) == []


def test_ordinary_tools_open_a_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "a.inputs.snap"
    noise = np.random.default_rng(0).normal(size=(50, 50))
    write_snapshot(path, contents({"noise": noise, "zeros": np.zeros((1000, 100))}))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.namelist()[0] == "mimetype"
        assert all(one.compress_type == zipfile.ZIP_STORED for one in archive.infolist())
        manifest = json.loads(archive.read("manifest.json"))
        assert [one["member"] for one in manifest["arrays"]] == [
            "arrays/0000.npy",
            "arrays/0001.npy.zst",
        ]
        assert np.array_equal(np.load(io.BytesIO(archive.read("arrays/0000.npy"))), noise)
        zeros = zstandard.ZstdDecompressor().decompress(archive.read("arrays/0001.npy.zst"))
        assert np.array_equal(np.load(io.BytesIO(zeros)), np.zeros((1000, 100)))
        module = zstandard.ZstdDecompressor().decompress(archive.read("module.stablehlo.zst"))
        assert module == MODULE.stablehlo


def test_a_small_file_is_the_zip_that_a_large_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = {"empty": np.ones(0), "x": np.arange(10.0), "zeros": np.zeros(5000)}
    small, large = tmp_path / "small.inputs.snap", tmp_path / "large.inputs.snap"
    write_snapshot(small, contents(arrays))
    monkeypatch.setattr("snaprt.snapshot.format.write.SMALL_FILE", -1)
    write_snapshot(large, contents(arrays))

    def described(path: Path) -> list[object]:
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
            traits = ("filename", "date_time", "CRC", "file_size", "external_attr", "create_system")
            return [
                [[getattr(info, trait) for trait in traits] for info in archive.infolist()],
                [archive.read(name) for name in archive.namelist()],
                archive.comment,
            ]

    assert described(small) == described(large)


def arrays_of(seed: int) -> dict[str, np.ndarray]:
    """Return arrays, as large and as compressible with each seed."""
    random = np.random.default_rng(seed)
    return {
        "scalar": np.array(random.normal(), np.float32),
        "empty": np.ones((0, 3)),
        "the same": np.arange(3),
        "the same again": np.arange(3),
        "bits": random.normal(size=5).astype(ml_dtypes.bfloat16),
        "narrow": random.integers(0, 7, 9).astype(ml_dtypes.int4),
        "columns": np.asfortranarray(random.normal(size=(4, 5))),
        "noise": random.normal(size=3000),
        "ramp": np.arange(5000) + seed * 100_000,
    }


def test_a_file_of_a_form_has_the_bytes_of_one_that_is_written_by_itself(tmp_path: Path) -> None:
    lately = EncodedArrays()
    form = write_file(tmp_path / "first.inputs.snap", contents(arrays_of(0)), None).form
    assert form is not None
    for seed, when in ((1, 1_795_265_971.0), (2, 12345678.123), (3, -1.5)):
        count = 10 ** (3 * seed)
        arrays = arrays_of(seed)
        alone = tmp_path / f"{seed}.inputs.snap"
        itself = contents(arrays)
        execution = dataclasses.replace(EXECUTION, execution_count=count, step=seed - 2, time=when)
        write_file(alone, dataclasses.replace(itself, execution=execution), None)
        assert form.file_name(count) == schema.file_name(execution)
        sources = list(arrays.values())
        for _ in range(2):  # encoded, then known
            parts = form.parts(count, seed - 2, when, sources, sources.__getitem__, lately)
            assert b"".join(parts) == alone.read_bytes()


def test_a_file_is_sound_though_the_program_has_written_to_an_array(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(size=3000)
    form = write_file(tmp_path / "first.inputs.snap", contents({"noise": noise}), None).form
    assert form is not None
    lately = EncodedArrays()
    for number in range(1, 4):
        if number == 3:
            noise[7] = 0.5
        parts = form.parts(number, 0, 0.0, [noise], lambda _: noise, lately)
        (tmp_path / "next.inputs.snap").write_bytes(b"".join(parts))
        snapshot = open_snapshot(tmp_path / "next.inputs.snap")
        np.testing.assert_array_equal(snapshot.array("noise"), noise)


class _Source:
    """What can be referred to weakly."""


def test_an_array_is_encoded_again_once_it_is_another_or_was_not_asked_for_lately() -> None:
    lately, made = EncodedArrays(), []

    def of(source: object, compression: str = "zstd") -> Encoded:
        encoded = lately.get(source, compression)
        if encoded is None:
            encoded = Encoded(bytes(1 << 20), len(made), "", is_result=True)
            made.append(encoded)
            lately.add(source, compression, encoded)
        return encoded

    weights = _Source()
    first = of(weights)
    assert of(weights, "none") is not first
    first = of(weights)
    results = [_Source() for _ in range(100)]
    for result in results:
        of(result)
        assert of(weights) is first  # asked for all the time
    assert len(made) == 103
    of(results[0])
    assert len(made) == 104  # let go: so many are not kept
    for number in range(100):  # many of them with the identity of one before
        assert of(_Source()).checksum == 104 + number


def test_what_is_kept_in_a_store_or_made_anew_has_no_form() -> None:
    record = schema.ArrayRecord(
        name="x", shape=(2,), dtype="float32", member="arrays/0000.npy", compression="none",
        stored_dtype="<f4", stored_shape=(2,), stored_bytes=136, raw_bytes=8, digest="ab",
    )  # fmt: skip
    for other in ({"in_store": True}, {"seeded": {"seed": 1.0}}, {"compression": "zstd-shuffled"}):
        manifest = schema.Manifest(EXECUTION, {}, (dataclasses.replace(record, **other),))
        assert Form.of(manifest, ()) is None


def test_incompressible_arrays_are_stored_raw_and_compressible_ones_are_not(tmp_path: Path) -> None:
    noise = np.frombuffer(random.Random(0).randbytes(1 << 20), np.uint8)
    manifest = write_snapshot(
        tmp_path / "a.inputs.snap", contents({"noise": noise, "ramp": np.arange(1 << 17)})
    )
    assert [array.compression for array in manifest.arrays] == ["none", "zstd"]
    assert manifest.arrays[1].stored_bytes < manifest.arrays[1].raw_bytes / 2


def test_arrays_are_fetched_one_by_one_while_the_file_is_written(tmp_path: Path) -> None:
    held: list[int] = []
    most = 0

    class Watched(np.ndarray):
        def __del__(self) -> None:
            held.pop()

    def fetch() -> np.ndarray:
        nonlocal most
        held.append(1)
        most = max(most, len(held))
        return np.zeros(9).view(Watched)

    arrays = [schema.ArrayContent(f"a{i}", fetch, 72) for i in range(4)]
    write_snapshot(tmp_path / "a.inputs.snap", schema.Contents(EXECUTION, MODULE, arrays))
    assert most <= 2


def test_the_module_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "a.inputs.snap"
    write_snapshot(path, contents({}))
    assert open_snapshot(path).module == MODULE
    assert open_snapshot(path).array_names == ()


def test_siblings_are_found_by_name(tmp_path: Path) -> None:
    inputs, outputs = tmp_path / "a.inputs.snap", tmp_path / "a.outputs.snap"
    write_snapshot(inputs, contents({}))
    assert sibling_outputs(inputs) is None
    write_snapshot(outputs, contents({}))
    assert sibling_outputs(inputs) == outputs
    assert sibling_inputs(outputs) == inputs
    assert sibling_outputs(outputs) is None


def test_file_names_are_safe_and_hold_what_tells_executions_apart() -> None:
    name = schema.file_name(EXECUTION)
    assert name == (
        "train_step.0123456789abcdef-process000000-executable000003-device000000"
        "-execution000496.inputs.snap"
    )
    odd = dataclasses.replace(EXECUTION, name="../a b/\0<lambda>" + "é" * 300)
    assert len(schema.file_name(odd)) < 255
    assert not set(schema.file_name(odd)) & set("/\\\0<> ")
    assert not schema.file_name(odd).startswith(".")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("graph_id", "x/../../escaped"),
        ("graph_id", "0123456789ABCDEF"),
        ("graph_id", "0123456789abcdef\n"),
        ("run", "../../escaped"),
        ("run", "1a2b3c4"),
        ("time", 1e300),
        ("time", -1e11),
        ("process", -1),
        ("executable", 1 << 80),
        ("device_index", -1),
        ("execution_count", 10**300),
        ("run_number", -1),
    ],
)
def test_what_no_recorder_writes_leads_to_no_other_folder_and_is_refused(
    field: str, value: float | str, tmp_path: Path
) -> None:
    execution = dataclasses.replace(EXECUTION, **{field: value})
    assert "/" not in schema.file_name(execution)
    assert "\\" not in schema.file_name(execution)
    path = tmp_path / "a.inputs.snap"
    write_snapshot(path, dataclasses.replace(contents({}), execution=execution))
    for read in (open_snapshot, read_manifest):
        with pytest.raises(SnapshotError, match=f"damaged: its manifest has an invalid {field}: "):
            read(path)


@pytest.mark.parametrize("time", [b"NaN", b"Infinity", b"-1e999"])
def test_a_time_that_is_no_number_is_refused(time: bytes) -> None:
    text = schema.to_json(schema.Manifest(EXECUTION, {}, ()))
    assert schema.from_json(text).execution == EXECUTION
    with pytest.raises(ValueError, match="its manifest has an invalid time: "):
        schema.from_json(text.replace(str(EXECUTION.time).encode(), time))


def test_an_array_that_is_not_there_is_an_error_that_lists_those_that_are(tmp_path: Path) -> None:
    path = tmp_path / "a.inputs.snap"
    write_snapshot(path, contents({"w": np.zeros(1), "b": np.zeros(1)}))
    with pytest.raises(SnapshotError, match=r"no array named v\nhint: it holds: w, b"):
        open_snapshot(path).array("v")


def read_all(path: Path) -> tuple[object, ...]:
    snapshot = open_snapshot(path)
    arrays = [(name, bits(snapshot.array(name))) for name in snapshot.array_names]
    return (snapshot.manifest, snapshot.module, arrays)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "whole.inputs.snap"
    arrays = {
        "noise": np.random.default_rng(0).normal(size=300),
        "zeros": np.zeros((64, 64), ml_dtypes.bfloat16),
        "scalar": np.float32(3).reshape(()),
    }
    write_snapshot(path, contents(arrays))
    return path


def test_every_flipped_bit_is_found_or_changes_nothing(whole: Path) -> None:
    good, content = read_all(whole), whole.read_bytes()
    broken = whole.with_name("broken.inputs.snap")
    generator = random.Random(1)
    found = 0
    for _ in range(600):
        flipped = bytearray(content)
        flipped[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        broken.write_bytes(flipped)
        message = ""
        try:
            assert read_all(broken) == good
        except SnapshotError as error:
            message = error.message
        assert not message or str(broken) in message
        found += bool(message)
    assert found > 400


def test_every_truncation_is_an_error_that_names_the_file(whole: Path) -> None:
    content = whole.read_bytes()
    broken = whole.with_name("broken.inputs.snap")
    generator = random.Random(2)
    for length in [0, 1, 4, 50, 80, len(content) - 1, *generator.sample(range(len(content)), 100)]:
        broken.write_bytes(content[:length])
        with pytest.raises(SnapshotError, match=r"is truncated|is empty|is not a|damaged") as e:
            read_all(broken)
        assert str(broken) in e.value.message


def test_a_damaged_header_of_an_array_is_called_so(whole: Path) -> None:
    whole.write_bytes(whole.read_bytes().replace(b"'descr'", b"'descr "))
    with pytest.raises(SnapshotError, match=r"array noise: the \.npy header is damaged\n"):
        open_snapshot(whole).array("noise")


def test_a_file_cut_in_the_middle_is_called_cut_short(whole: Path) -> None:
    content = whole.read_bytes()
    whole.write_bytes(content[: len(content) // 2])
    with pytest.raises(SnapshotError, match="is truncated: it ends after"):
        open_snapshot(whole)


def test_a_file_that_lacks_bytes_in_the_middle_is_called_damaged(whole: Path) -> None:
    content = whole.read_bytes()
    for at in range(100, 2000, 100):
        whole.write_bytes(content[:at] + content[-1800:])
        with pytest.raises(SnapshotError, match="is damaged") as caught:
            read_all(whole)
        assert caught.value.hint


def test_bytes_overwritten_anywhere_are_found(whole: Path) -> None:
    good, content = read_all(whole), whole.read_bytes()
    generator = random.Random(3)
    for _ in range(150):
        at = generator.randrange(len(content) - 8)
        whole.write_bytes(content[:at] + generator.randbytes(8) + content[at + 8 :])
        try:
            assert read_all(whole) == good
        except SnapshotError:
            continue


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\x0a\x04jit_f", "is not a snaprt snapshot"),
        (b"PK\x03\x04" + bytes(200), "is not a snaprt snapshot"),
        (b"module {}", "is not a snaprt snapshot"),
    ],
)
def test_a_foreign_file_is_called_so(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.snap"
    path.write_bytes(content)
    with pytest.raises(SnapshotError, match=said):
        open_snapshot(path)
    assert not is_snapshot(content[:80])


def test_a_missing_file_and_a_directory_are_errors(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="there is no file"):
        open_snapshot(tmp_path / "none.snap")
    with pytest.raises(SnapshotError, match="is a directory"):
        open_snapshot(tmp_path)


def test_a_newer_format_is_refused_and_says_so(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "PLAIN_MAJOR", 7)
    write_snapshot(whole, contents({}))
    monkeypatch.undo()
    with pytest.raises(
        SnapshotError, match=r"written by a newer snaprt, format 7; this one reads up to 2"
    ):
        open_snapshot(whole)


def test_what_a_newer_minor_version_adds_is_ignored(tmp_path: Path) -> None:
    manifest = write_snapshot(tmp_path / "a.inputs.snap", contents({"a": np.zeros(3)}))
    body = json.loads(schema.to_json(manifest))
    body["new"] = body["execution"]["new"] = body["arrays"][0]["new"] = [1]
    assert schema.from_json(json.dumps(body).encode()) == manifest


def test_a_manifest_that_contradicts_itself_takes_no_memory(whole: Path) -> None:
    snapshot = open_snapshot(whole)
    for change in (
        {"stored_shape": (1 << 50,), "shape": (1 << 50,)},
        {"stored_shape": (1 << 40,), "shape": (1 << 40,), "raw_bytes": 1 << 43},
        {"stored_dtype": "|O"},
        {"dtype": "float1024"},
    ):
        changed = dataclasses.replace(snapshot.record("noise"), **change)
        snapshot._arrays["noise"] = changed
        with pytest.raises(SnapshotError):
            snapshot.array("noise")


def test_leftovers_of_dead_processes_are_removed_and_others_stay(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path\n"
        "from snaprt.host import whole_files\n"
        "name = f'.a.inputs.snap.{whole_files._process_mark()}-{os.getpid()}.tmp'\n"
        "Path(sys.argv[1], name).touch()"
    )
    run_program(program, tmp_path)
    foreign = tmp_path / ".a.inputs.snap.00000000-1.tmp"
    foreign.touch()
    assert len(list(tmp_path.iterdir())) == 2
    assert remove_leftovers(tmp_path) == 1
    assert list(tmp_path.iterdir()) == [foreign]
    assert remove_leftovers(tmp_path / "none") == 0
