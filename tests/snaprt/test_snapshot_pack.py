"""Packed files: everything of an execution in one file, and the same files out of it again."""

from __future__ import annotations

import os
import random
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import run_program
from recordings import record

from snaprt.cli.main import main
from snaprt.errors import SnapshotError, UsageError
from snaprt.host.whole_files import ring_name, temporary_name
from snaprt.snapshot.format import places, schema
from snaprt.snapshot.format.read import open_snapshot, sibling_inputs, sibling_outputs
from snaprt.snapshot.format.store import ArrayStore
from snaprt.snapshot.share.executions import executions_in
from snaprt.snapshot.share.pack import pack, unpack

WEIGHTS = jax.random.normal(jax.random.key(0), (64, 256), jnp.bfloat16)
NOISE = jax.random.bits(jax.random.key(1), (3000,), jnp.uint32)


def model(weights: jax.Array, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
    return weights.sum(axis=0), noise[:10]


ARGUMENTS = {"weights": WEIGHTS, "noise": NOISE}


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """A folder with two executions that share stored arrays."""
    store = ArrayStore(tmp_path / "dump")
    for number in range(2):
        record(tmp_path / "dump", model, ARGUMENTS, store=store, execution_count=number)
    return tmp_path / "dump"


def first_of(dump: Path) -> Path:
    return next(dump.glob("*execution000000.inputs.snap"))


def test_a_packed_execution_comes_out_bit_for_bit(dump: Path, tmp_path: Path) -> None:
    packed = pack([first_of(dump)], tmp_path / "one.pack")
    assert len(packed.snapshots) == 2
    assert packed.arrays == 2
    unpack(tmp_path / "one.pack", tmp_path / "out")
    before, after = files_in(dump), files_in(tmp_path / "out")
    assert len(after) == 4
    assert after == {name: before[name] for name in after}


def test_a_packed_file_is_read_where_it_is(dump: Path, tmp_path: Path) -> None:
    pack([first_of(dump)], tmp_path / "one.pack")
    for path in dump.rglob("*.*"):
        path.unlink()
    (path,) = executions_in(tmp_path / "one.pack")
    assert path.parent == tmp_path / "one.pack"
    inputs = open_snapshot(path)
    assert np.array_equal(inputs.array("weights"), WEIGHTS)
    assert np.array_equal(inputs.array("noise"), NOISE)
    outputs = sibling_outputs(path)
    assert outputs is not None
    assert sibling_inputs(outputs) == path
    assert np.array_equal(open_snapshot(outputs).array("out1"), NOISE[:10])


def test_several_executions_share_their_stored_arrays_in_the_packed_file(
    dump: Path, tmp_path: Path
) -> None:
    packed = pack(sorted(dump.glob("*.inputs.snap")), tmp_path / "both.pack")
    assert (len(packed.snapshots), packed.arrays) == (4, 2)
    assert len(executions_in(tmp_path / "both.pack")) == 2
    again = pack([tmp_path / "both.pack"], tmp_path / "again.pack")
    assert again.snapshots == packed.snapshots


def test_the_files_of_all_devices_and_no_others_are_taken_along(tmp_path: Path) -> None:
    devices = tuple(schema.DeviceRecord("cpu", "cpu", number, number // 2) for number in range(4))
    paths = [
        record(
            tmp_path,
            model,
            ARGUMENTS,
            devices=devices,
            device=device,
            device_index=number % 2,
            process=device.process,
            executable=5 + device.process,
            run=f"{device.process}aaaaaaa",
        )
        for number, device in enumerate(devices)
    ]
    record(tmp_path, model, ARGUMENTS, devices=devices, executable=9, run="0aaaaaaa")
    record(tmp_path, model, ARGUMENTS, devices=devices, executable=5, run="bbbbbbbb")
    record(tmp_path, model, ARGUMENTS, devices=devices, executable=5, step=3, run="0aaaaaaa",
           execution_count=1)  # fmt: skip
    packed = pack([paths[0]], tmp_path / "out" / "all.pack")
    expected = {path.name for path in paths}
    expected |= {name.replace(".inputs.", ".outputs.") for name in expected}
    assert set(packed.snapshots) == expected
    assert executions_in(tmp_path / "out" / "all.pack") == [packed.path / paths[0].name]


def test_a_file_that_is_there_is_not_written_over_unasked(dump: Path, tmp_path: Path) -> None:
    out = tmp_path / "one.pack"
    out.write_text("precious")
    with pytest.raises(UsageError, match="already exists"):
        pack([first_of(dump)], out)
    assert out.read_text() == "precious"
    pack([first_of(dump)], out, replace=True)
    assert places.is_pack_file(out)


def test_a_hostile_snapshot_writes_nothing_outside_of_the_folder(tmp_path: Path) -> None:
    hostile = record(tmp_path / "from", model, ARGUMENTS, graph_id="x/../../../escaped")
    assert hostile.parent == tmp_path / "from"
    before = files_in(tmp_path)
    with pytest.raises(SnapshotError, match="invalid graph_id: 'x/"):
        pack([hostile], tmp_path / "to" / "a" / "hostile.pack", ["paths"])
    assert files_in(tmp_path) == before


def test_a_pipe_or_a_device_is_neither_replaced_nor_written_to(dump: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for replace in (False, True):
        with pytest.raises(UsageError, match="pipe: it is a pipe or a device"):
            pack([first_of(dump)], pipe, replace=replace)
    assert pipe.is_fifo()


def test_an_error_leaves_no_packed_file(dump: Path, tmp_path: Path) -> None:
    stored = next((dump / "arrays").rglob("*.npy*"))
    stored.unlink()
    with pytest.raises(SnapshotError, match="which does not exist") as raised:
        pack([first_of(dump)], tmp_path / "one.pack")
    assert str(stored) in raised.value.message
    assert [path.name for path in tmp_path.iterdir()] == ["dump"]


def test_unpacking_twice_is_well_but_another_content_stays(dump: Path, tmp_path: Path) -> None:
    pack([first_of(dump)], tmp_path / "one.pack")
    unpack(tmp_path / "one.pack", tmp_path / "out")
    unpack(tmp_path / "one.pack", tmp_path / "out")
    mine = tmp_path / "out" / first_of(dump).name
    mine.write_bytes(b"mine")
    with pytest.raises(UsageError, match="with different content"):
        unpack(tmp_path / "one.pack", tmp_path / "out")
    assert mine.read_bytes() == b"mine"
    assert list((tmp_path / "out").glob(".*")) == []


def read_all(pack_file: Path) -> list[bytes]:
    found = []
    for path in places.snapshots_in(pack_file):
        file = open_snapshot(path)
        found += [file.array(name).tobytes() for name in file.array_names]
        found += [file.module.stablehlo]
    return found


def test_a_damaged_packed_file_is_an_error_or_gives_what_was_packed(
    dump: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "one.pack"
    pack([first_of(dump)], whole)
    good, content = read_all(whole), whole.read_bytes()
    before = files_in(dump)
    broken = tmp_path / "broken.pack"
    generator = random.Random(0)
    refused = 0
    for number in range(60):
        damaged = bytearray(content)
        damaged[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        broken.write_bytes(damaged if number % 3 else content[: generator.randrange(len(content))])
        try:
            assert read_all(broken) in (good, [])
        except SnapshotError:
            refused += 1
        try:
            unpack(broken, tmp_path / f"out{number}")
        except SnapshotError:
            continue
        after = files_in(tmp_path / f"out{number}")
        assert all(before[name] == content for name, content in after.items() if name in before)
    assert refused > 20


def test_a_wrong_bit_in_the_directory_of_a_packed_file_never_gives_other_content(
    dump: Path, tmp_path: Path
) -> None:
    whole, broken = tmp_path / "one.pack", tmp_path / "broken.pack"
    pack([first_of(dump)], whole)
    good, content = read_all(whole), whole.read_bytes()
    with zipfile.ZipFile(whole) as archive:
        directory = archive.start_dir
    refused = 0
    for place in range(directory, len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        broken.write_bytes(damaged)
        try:
            found = read_all(broken)
        except SnapshotError:
            found = []
        assert found in (good, [])
        refused += not found
    assert refused > 60


def test_a_member_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    for name in ("../evil.snap", "/evil.snap", "a/evil.snap", "evil.txt", "arrays/ab/evil.npy"):
        path = tmp_path / "evil.pack"
        with zipfile.ZipFile(path, "w") as archive:
            archive.comment = b"snaprt-pack 1.0"
            archive.writestr(zipfile.ZipInfo("mimetype"), places.PACK_MARK)
            archive.writestr(name, b"x")
        with pytest.raises(SnapshotError, match="is damaged: it holds a member"):
            unpack(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_no_packed_file_or_a_newer_one_is_refused(dump: Path, tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="is not a packed file"):
        unpack(first_of(dump), tmp_path / "out")
    with pytest.raises(SnapshotError, match="there is no file"):
        unpack(tmp_path / "none.pack", tmp_path / "out")
    path = tmp_path / "one.pack"
    pack([first_of(dump)], path)
    path.write_bytes(path.read_bytes().replace(b"snaprt-pack 1.0", b"snaprt-pack 7.0"))
    with pytest.raises(SnapshotError, match="packed by a newer snaprt, format 7"):
        unpack(path, tmp_path / "out")
    with pytest.raises(SnapshotError, match="there is no file"):
        open_snapshot(path / "none.inputs.snap")


def test_what_killed_processes_left_goes_with_the_next_pack(dump: Path, tmp_path: Path) -> None:
    killed = run_program("import os; print(os.getpid())").stdout.strip()
    out = tmp_path / "one.pack"
    name = temporary_name(out.name).replace(f"-{os.getpid()}.tmp", f"-{killed}.tmp")
    ring = ring_name("0123abcd").replace(f"-{os.getpid()}", f"-{killed}")
    (tmp_path / name).write_bytes(b"half")
    (tmp_path / f".redacted{name}").mkdir()
    (tmp_path / ring).mkdir()
    (tmp_path / ring / "a.inputs.snap").write_bytes(b"held")
    (tmp_path / temporary_name("mine")).write_bytes(b"being written by this process")
    pack(sorted(dump.glob("*.snap")), out)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {dump.name, out.name, temporary_name("mine")}


def test_a_name_that_is_too_long_is_no_bug_of_ours(
    dump: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (snapshot, *_) = map(str, dump.glob("*.snap"))
    assert main(["pack", snapshot, "-o", str(tmp_path / ("x" * 300))]) == 2
    told = capfd.readouterr().err
    assert "File name too long" in told
    assert "Traceback" not in told
