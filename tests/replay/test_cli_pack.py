"""Packed files at the command line: made, replayed, looked into, listed, unpacked, pruned."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from recordings import record

from snaprt.snapshot.format import schema
from snaprt.snapshot.format.store import ArrayStore

Run = Callable[..., tuple[int, str, str]]

WEIGHTS = jax.random.normal(jax.random.key(0), (64, 256), jnp.bfloat16)


def train_step(weights: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ weights)


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    store = ArrayStore(tmp_path / "dump")
    for number in range(3):
        arguments = {"weights": WEIGHTS, "x": jnp.full((2, 64), number, jnp.bfloat16)}
        record(
            tmp_path / "dump",
            train_step,
            arguments,
            store=store,
            execution_count=number,
            step=10 + number,
        )
    return tmp_path / "dump"


def inputs(dump: Path) -> list[Path]:
    return sorted(dump.glob("*.inputs.snap"))


def test_a_packed_file_is_replayed_looked_into_and_unpacked(
    snaprt: Run, dump: Path, tmp_path: Path
) -> None:
    pack = tmp_path / "all.pack"
    status, out, err = snaprt("pack", *inputs(dump), "-o", pack)
    assert (status, len(out.splitlines())) == (0, 6)
    assert "packed 6 snapshots and 1 stored array," in err
    status, out, _ = snaprt("replay", pack)
    assert status == 0
    assert "3 files: 3 MATCH" in out
    status, out, err = snaprt("inspect", pack)
    assert status == 2
    assert "holds 3 executions" in err
    one = pack / inputs(dump)[1].name
    status, out, _ = snaprt("inspect", one)
    assert status == 0
    assert "bfloat16[64,256]" in out
    status, out, _ = snaprt("unpack", pack, "-d", tmp_path / "out")
    assert (status, len(out.splitlines())) == (0, 6)
    status, out, _ = snaprt("replay", *inputs(tmp_path / "out"))
    assert status == 0


def test_a_directory_stands_for_all_that_was_recorded_into_it(
    snaprt: Run, dump: Path, tmp_path: Path
) -> None:
    status, out, _ = snaprt("pack", dump, "-o", tmp_path / "all.pack")
    assert (status, out.split()) == (0, sorted(path.name for path in dump.glob("*.snap")))
    status, _, err = snaprt("pack", tmp_path, "-o", tmp_path / "none.pack")
    assert (status, f"{tmp_path} holds no readable snapshot" in err) == (2, True)
    assert not (tmp_path / "none.pack").exists()


def test_one_execution_in_a_packed_file_is_shown_with_both_sides(
    snaprt: Run, dump: Path, tmp_path: Path
) -> None:
    snaprt("pack", inputs(dump)[0], "-o", tmp_path / "one.pack")
    status, out, _ = snaprt("inspect", tmp_path / "one.pack", "--json")
    told = json.loads(out)
    assert (status, told["format"]) == (0, "snaprt packed file")
    assert [array["role"] for array in told["arrays"]] == ["inputs", "inputs", "outputs"]
    status, out, _ = snaprt("inspect", tmp_path / "one.pack", "--stablehlo")
    assert "@main" in out


def test_a_redacted_file_is_replayed_on_seeded_values_and_says_so(
    snaprt: Run, dump: Path, tmp_path: Path
) -> None:
    pack = tmp_path / "shared.pack"
    words = [word for kind in ("values", "names", "paths") for word in ("--redact", kind)]
    assert snaprt("pack", inputs(dump)[2], "-o", pack, *words)[0] == 0
    status, out, _ = snaprt("replay", pack)
    assert status == 0
    assert "redacted before sharing: values, names, paths" in out
    assert "drawn from a seed" in out
    assert "NOTHING TO COMPARE WITH" in out
    again = snaprt("replay", pack, "--json", "--repeat", "2")[1]
    assert json.loads(again)["reports"][0]["comparison"] is None
    status, out, _ = snaprt("inspect", pack)
    assert "values, names, paths" in out
    assert "train_step" not in out


def test_what_was_recorded_is_listed_and_filtered(snaprt: Run, dump: Path) -> None:
    status, out, err = snaprt("ls", dump)
    assert status == 0
    assert [line.split()[:3] for line in out.splitlines()[1:]] == [
        ["train_step", str(10 + number), str(number)] for number in range(3)
    ]
    assert "1 stored array," in err
    for words, steps in (
        (("--step", "11"), [11]),
        (("--step", "11:"), [11, 12]),
        (("--execution", "0:1"), [10, 11]),
        (("--graph", "^train"), [10, 11, 12]),
        (("--graph", "^step"), []),
        (("--device", "1"), []),
        (("--failed",), []),
    ):
        told = json.loads(snaprt("ls", dump, "--json", *words)[1])
        assert (told["schema"], told["version"]) == ("snaprt.ls", 1)
        assert [row["step"] for row in told["rows"]] == steps
    (row,) = json.loads(snaprt("ls", dump, "--json", "--step", "12")[1])["rows"]
    assert row["inputs"] == ["bfloat16[64,256]", "bfloat16[2,64]"]
    assert row["outputs"] == ["bfloat16[2,256]"]
    assert row["stored_bytes"] > 20_000


def test_listing_names_the_folders_below_that_have_recordings(
    snaprt: Run, dump: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    status, _, err = snaprt("ls", tmp_path)
    assert status == 0
    assert "0 recorded executions" in err
    assert f"subfolders contain recordings: snaprt ls {dump}\n" in err
    assert "subfolders" not in snaprt("ls", dump)[2]
    assert "subfolders" not in snaprt("ls", tmp_path / "empty")[2]


def test_listing_names_damaged_files_and_goes_on(snaprt: Run, dump: Path, tmp_path: Path) -> None:
    bad = inputs(dump)[0]
    bad.write_bytes(bad.read_bytes()[:100])
    status, out, err = snaprt("ls", dump)
    assert status == 1
    assert f"{bad} is truncated" in err
    assert len(out.splitlines()) == 4
    assert snaprt("ls", tmp_path / "none")[0] == 2
    assert snaprt("ls", dump, "--graph", "(")[0] == 2
    assert snaprt("ls", dump, "--step", "x")[0] == 2


def test_what_is_no_file_in_place_of_a_snapshot_is_listed_as_damaged(
    snaprt: Run, dump: Path
) -> None:
    link, pipe = dump / "a.inputs.snap", dump / "b.outputs.snap"
    link.symlink_to("nowhere")
    os.mkfifo(pipe)
    status, out, err = snaprt("ls", dump)
    assert status == 1
    assert len(out.splitlines()) == 4
    assert f"{link} is a symbolic link that leads nowhere" in err
    assert f"cannot read {pipe}: it is a pipe" in err


def put_folder(path: Path) -> None:
    path.mkdir()


def put_link(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize(
    ("put", "said"),
    [
        (put_folder, "which is a directory"),
        (put_link, "which does not exist"),
        (os.mkfifo, "it is a pipe"),
    ],
)
def test_what_is_no_file_in_place_of_a_stored_array_is_named(
    snaprt: Run, dump: Path, put: Callable[[Path], None], said: str
) -> None:
    (stored,) = (dump / "arrays").rglob("*.npy*")
    stored.unlink()
    put(stored)
    status, _, err = snaprt("replay", inputs(dump)[0])
    assert status == 2
    assert str(stored) in err
    assert said in err
    status, out, err = snaprt("ls", dump)
    assert status == 1
    assert len(out.splitlines()) == 4
    assert f"needs: {stored}: " in err
    assert snaprt("prune", dump, "--older-than", "0")[0] == 0
    assert os.path.lexists(stored)


def test_a_packed_file_whose_directory_is_damaged_is_not_listed_as_empty(
    snaprt: Run, dump: Path, tmp_path: Path
) -> None:
    pack = tmp_path / "one.pack"
    assert snaprt("pack", inputs(dump)[0], "-o", pack)[0] == 0
    with zipfile.ZipFile(pack) as archive:
        directory = archive.start_dir
    content = bytearray(pack.read_bytes())
    place = content.index(b"train_step", directory)
    content[place] ^= 1
    pack.write_bytes(content)
    for words in (("ls", pack), ("unpack", pack, "-d", tmp_path / "out")):
        status, _, err = snaprt(*words)
        assert status
        assert f"{pack} is damaged" in err


def test_outputs_that_a_damaged_packed_file_may_hold_are_not_taken_for_absent(
    snaprt: Run, dump: Path, tmp_path: Path
) -> None:
    pack = tmp_path / "all.pack"
    first = inputs(dump)[0].name
    snaprt("pack", dump, "-o", pack)
    content = pack.read_bytes()
    outputs = first.replace(".inputs.", ".outputs.").encode()
    pack.write_bytes(outputs.replace(b".outputs.", b".outpvts.").join(content.rsplit(outputs, 1)))
    status, out, err = snaprt("replay", pack / first)
    assert (status, "NOTHING TO COMPARE" in out, "damaged" in err) == (2, False, True)


def test_a_failed_execution_is_listed_with_its_error(snaprt: Run, tmp_path: Path) -> None:
    arguments = {"weights": WEIGHTS, "x": jnp.ones((2, 64), jnp.bfloat16)}
    record(tmp_path, train_step, arguments, error="ValueError: too bad\n  File ...", reason="error")
    status, out, _ = snaprt("ls", tmp_path, "--failed")
    assert status == 0
    assert "ValueError: too bad" in out


def test_another_device_is_told_in_words(snaprt: Run, tmp_path: Path) -> None:
    gpu = schema.DeviceRecord("gpu", "NVIDIA H200", 3, 0)
    arguments = {"weights": WEIGHTS, "x": jnp.ones((2, 64), jnp.bfloat16)}
    path = record(tmp_path, train_step, arguments)
    other = record(tmp_path / "other", train_step, arguments, devices=(gpu,))
    name = path.name.replace(".inputs.", ".outputs.")
    (other.parent / name).rename(tmp_path / name)
    status, _, err = snaprt("replay", path)
    assert status == 2
    assert "devices gpu 3 (NVIDIA H200) of process 0, not cpu 0 (cpu) of process 0" in err


def test_pruning_says_what_it_would_remove_and_removes_it(snaprt: Run, dump: Path) -> None:
    for path in dump.glob("*.snap"):
        path.unlink()
    status, out, err = snaprt("prune", dump, "--older-than", "0", "--dry-run")
    assert (status, len(out.splitlines())) == (0, 1)
    assert "would be removed" in err
    told = json.loads(snaprt("prune", dump, "--older-than", "0", "--json")[1])
    assert (told["schema"], told["removed"], len(told["arrays"])) == ("snaprt.prune", True, 1)
    assert list((dump / "arrays").rglob("*.npy*")) == []


def test_export_writes_and_says_where(snaprt: Run, dump: Path, tmp_path: Path) -> None:
    out = tmp_path / "step.npz"
    status, told, _ = snaprt("export", inputs(dump)[0], "--to", "npz", "-o", out)
    assert (status, told.strip()) == (0, str(out))
    assert snaprt("export", inputs(dump)[0], "--to", "npz", "-o", out)[0] == 2
    status, told, _ = snaprt("export", inputs(dump)[0], "--to", "npz", "-o", out, "--replace",
                             "--json")  # fmt: skip
    assert json.loads(told)["schema"] == "snaprt.export"
