"""What a snapshot says of several devices: one file for each, and how they make up the whole."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from several_devices import of_executable, write_anew

from snaprt.errors import SnapshotError
from snaprt.snapshot.format import schema
from snaprt.snapshot.format.content import describe_sharding, index_of
from snaprt.snapshot.format.read import SnapshotFile, open_snapshot

OLD = Path(__file__).parents[1] / "support" / "snapshots" / "format-1.0.inputs.snap"


@pytest.fixture
def folder(recorded_on_8_devices: Path) -> Path:
    return recorded_on_8_devices


def files(folder: Path, executable: int, role: schema.Role = "inputs") -> list[SnapshotFile]:
    return [open_snapshot(path) for path in of_executable(folder, executable, role)]


def sharding_of(file: SnapshotFile, name: str) -> schema.ShardingRecord:
    return file.manifest.shardings[file.record(name).sharding_number]


def test_each_device_has_a_file_of_what_went_in_and_one_of_what_came_out(folder: Path) -> None:
    for role in schema.ROLES:
        found = files(folder, 0, role)
        assert [one.manifest.execution.device_index for one in found] == list(range(8))
        assert [one.manifest.execution.device.id for one in found] == list(range(8))
        assert all(len(one.manifest.execution.devices) == 8 for one in found)


def test_the_parts_make_up_the_whole_where_their_indices_say(folder: Path) -> None:
    whole = np.full((8, 8), np.nan, np.float32)
    for file in files(folder, 0):
        index = file.record("arg0").index
        assert index is not None
        whole[tuple(slice(*ends) for ends in index)] = file.array("arg0")
        assert file.record("arg0").global_shape == (8, 8)
    np.testing.assert_array_equal(whole, np.arange(64, dtype=np.float32).reshape(8, 8) / 9)


def test_the_mesh_and_the_spec_can_be_read_by_a_program(folder: Path) -> None:
    file = files(folder, 0)[5]
    both = sharding_of(file, "arg0")
    assert (both.kind, both.axis_names, both.axis_sizes) == (
        "NamedSharding",
        ("data", "model"),
        (4, 2),
    )
    assert both.devices == tuple(range(8))
    assert both.spec == (("data",), ("model",))
    assert both.axis_types == ("Auto", "Auto")
    assert sharding_of(file, "arg1").spec == ((), ("model",))
    assert sharding_of(file, "arg2").spec == ()


def test_copies_of_a_replicated_part_have_the_same_digest(folder: Path) -> None:
    found = files(folder, 0)
    digests = [one.record("arg1").digest for one in found]  # split in two, so copied four times
    assert digests == digests[:2] * 4
    assert len(set(digests)) == 2
    assert len({one.record("arg3").digest for one in found}) == 1
    assert found[0].record("arg3").key_impl


def test_a_mesh_of_three_of_eight_devices_leaves_three_files(folder: Path) -> None:
    found = files(folder, 3, "outputs")
    assert [one.record("out0").shape for one in found] == [(6, 3)] * 3
    assert [one.record("out0").index for one in found] == [
        ((0, 6), (0, 3)),
        ((6, 12), (0, 3)),
        ((12, 18), (0, 3)),
    ]


def test_shardings_that_are_not_named_are_written_as_xla_writes_them() -> None:
    (device,) = jax.devices()[:1]
    described = describe_sharding(jax.sharding.SingleDeviceSharding(device), 2)
    assert (described.kind, described.hlo) == ("SingleDeviceSharding", "{replicated}")
    assert (described.devices, described.axis_names) == ((device.id,), ())


def test_axes_that_share_a_dimension_stay_in_their_order() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("a", "b"))
    spec = jax.sharding.PartitionSpec(("b", "a"), None)
    described = describe_sharding(jax.sharding.NamedSharding(mesh, spec), 3)
    assert described.spec == (("b", "a"), ())


def test_an_index_leaves_out_the_dimensions_that_prng_keys_have_more() -> None:
    assert index_of((slice(2, 4), slice(None)), (8,)) == ((2, 4),)
    assert index_of((), (3, 5)) == ((0, 3), (0, 5))


def test_a_snapshot_of_format_1_0_is_still_read() -> None:
    file = open_snapshot(OLD)
    assert file.array_names == ("arg0", "arg1")
    assert file.array("arg0").shape == (3, 4)
    assert file.record("arg0").index is None
    assert file.manifest.shardings == ()
    assert file.manifest.proof == schema.Proof()
    assert file.manifest.trace_error is None
    assert file.manifest.execution.processor == ""


def test_a_manifest_that_says_nonsense_of_parts_is_damage(tmp_path: Path) -> None:
    wrong = schema.ShardingRecord("NamedSharding", (0,), spec=("data",))  # type: ignore[arg-type]
    path = write_anew(OLD, tmp_path / "x.inputs.snap", shardings=(wrong,))
    with pytest.raises(
        SnapshotError, match=r"Expected `array`, got `str` - at `\$.shardings\[0\].spec\[0\]"
    ):
        open_snapshot(path)
