"""Replaying a program of several devices on host devices, from the files that each device left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import finish
from several_devices import (
    TWO_PROCESSES,
    free_port,
    of_executable,
    record,
    write_anew,
)
from snaprt_replay.compare.results import IDENTICAL
from snaprt_replay.load.case import Case, NamedArray, ShardedArray, on_one_device, sharded
from snaprt_replay.load.load import load
from snaprt_replay.run import devices
from snaprt_replay.run.rerun import replay

from snaprt.cli.main import main
from snaprt.errors import DeviceError, SnapshotError, UsageError
from snaprt.snapshot.format.read import open_snapshot


@pytest.fixture
def recorded(recorded_on_8_devices: Path) -> Path:
    return recorded_on_8_devices


@pytest.fixture
def copied(recorded: Path, tmp_path: Path) -> Path:
    for role in ("inputs", "outputs"):
        for path in of_executable(recorded, 0, role):  # type: ignore[arg-type]
            shutil.copy(path, tmp_path)
    return tmp_path


def test_a_program_of_8_devices_replays_to_the_same_bits_on_each(recorded: Path) -> None:
    result = replay(of_executable(recorded, 0)[0])
    assert result.comparison is not None
    assert result.comparison.verdict == IDENTICAL
    assert [one.verdict for one in result.by_device] == [IDENTICAL] * 8
    assert [output.shape for output in result.comparison.outputs] == [(8, 8), (8,)]
    assert (result.played.device, result.played.isolated) == ("cpu:0-7", True)
    assert result.case.notes == ("joined from 16 files: 8 devices",)
    assert result.warnings == ()


def test_each_device_gets_its_own_copy_where_copies_differ(recorded: Path) -> None:
    result = replay(of_executable(recorded, 2)[0], repeat=2)
    assert [one.verdict for one in result.by_device] == [IDENTICAL] * 8
    parts = result.case.input_parts["arg0"]
    assert not np.array_equal(parts[0], parts[7])
    assert "each device gets its own: arg0" in result.case.notes[1]
    assert result.played.agrees_with_itself


def run_json(capfd: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, Any]:
    status = main(["replay", "--json", *map(str, words)])
    return status, json.loads(capfd.readouterr().out)


def test_a_folder_of_files_is_replayed_once_for_each_execution(
    recorded: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, told = run_json(
        capfd, *of_executable(recorded, 3), *of_executable(recorded, 3, "outputs")
    )
    assert status == 0
    (file,) = told["reports"]
    assert file["runs"]["replay"]["device"] == "cpu:0-2"
    assert len(file["files"]) == 6
    assert [one["verdict"] for one in file["by_device"]] == ["identical"] * 3


def test_a_page_shows_one_replay_on_all_devices_of_an_execution(
    copied: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = map(str, of_executable(copied, 0))
    options = ("--max-ulp", "0", "--html", str(tmp_path / "page.html"), "--json")
    assert main(["replay", *files, *options]) == 0
    (report,) = json.loads(capfd.readouterr().out)["reports"]
    assert report["device"].startswith("cpu:0-7")
    assert report["comparison"]["verdict"] == IDENTICAL
    assert report["warnings"] == []


def test_a_folder_that_lacks_a_file_of_a_device_is_a_failure_that_names_it(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    missing = of_executable(copied, 0)[5]
    missing.unlink()
    assert main(["replay", str(copied), "--json"]) == 2
    (report,) = json.loads(capfd.readouterr().out)["reports"]  # not one for each device
    assert missing.name in report["headline"]["sentence"]


def test_what_runs_on_one_device_takes_the_copies_of_the_file_that_is_named(
    recorded: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for role in ("inputs", "outputs"):
        for number, path in enumerate(of_executable(recorded, 2, role)):  # type: ignore[arg-type]
            nan = np.float32(np.nan if role == "outputs" and number == 5 else 0)
            write_anew(path, tmp_path / path.name, lambda _, value, nan=nan: value + nan)
    files = of_executable(tmp_path, 2)
    for number in (0, 5):
        case = load(files[number])
        assert case.inputs is not None
        assert np.array_equal(case.inputs[0].value, case.input_parts["arg0"][number])
    assert main(["localize", str(tmp_path)]) == 0
    told = capfd.readouterr().out
    assert "the copies of arg0 differ between devices: using those of device 0" in told
    assert "the recorded outputs of device 5 have NaN or infinity" in told
    assert "name a file of device 5" in told
    assert main(["localize", str(files[5])]) == 0
    told = capfd.readouterr().out
    assert "using those of device 5" in told
    assert "name a file" not in told
    assert main(["replay", str(files[5]), "--b", "cpu"]) == 2
    assert "come from copies of arg0 that differ between devices" in capfd.readouterr().err


@pytest.mark.parametrize("words", [("localize",), ("minify",), ("replay", "--b", "cpu")])
def test_what_runs_on_one_device_refuses_a_program_that_says_what_each_device_does(
    recorded: Path, words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, str(of_executable(recorded, 1)[0])]) == 2
    told = capfd.readouterr().err
    assert "is written per device for 8 devices (jax.shard_map)" in told


def test_a_copy_that_one_device_got_wrong_is_found_there(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = of_executable(copied, 0, "outputs")[6]

    def change(name: str, value: np.ndarray) -> np.ndarray:
        if name == "out1":  # in two parts, of which devices 0, 2, 4 and 6 hold the first
            value = value.copy()
            value[1] += 8
        return value

    write_anew(path, path, change)
    assert main(["replay", str(of_executable(copied, 0)[0])]) == 1
    told = capfd.readouterr().out
    assert "devices 0-5, each: all 2 outputs are identical" in told
    assert "device 6: 1 of 2 outputs differ; first: out1" in told
    verdict = "MISMATCH: the whole arrays match, but the parts on these devices do not: 6"
    assert verdict in told
    assert main(["report", str(of_executable(copied, 0)[0]), "--no-localize"]) == 1
    assert verdict in capfd.readouterr().out


def test_a_missing_file_is_named(copied: Path) -> None:
    gone = of_executable(copied, 0)[5]
    gone.unlink()
    with pytest.raises(SnapshotError, match=r"device 5 .* is missing") as caught:
        load(of_executable(copied, 0)[0])
    assert gone.name in caught.value.message


def test_a_damaged_file_is_named(copied: Path) -> None:
    path = of_executable(copied, 0)[3]
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(SnapshotError, match=r"-device000003-.* is truncated"):
        load(of_executable(copied, 0)[0])


def test_a_file_of_another_execution_is_named(copied: Path) -> None:
    path = of_executable(copied, 0)[4]
    write_anew(path, path, execution={"step": 77})
    with pytest.raises(SnapshotError, match=r"-device000004-.* has step 77, not 0"):
        load(of_executable(copied, 0)[0])


def test_parts_that_do_not_make_up_the_whole_are_refused(copied: Path) -> None:
    path = of_executable(copied, 0)[2]
    write_anew(path, path, change=lambda name, value: value[:1] if name == "arg0" else value)
    with pytest.raises(SnapshotError, match="parts of arg0 do not form the whole"):
        load(of_executable(copied, 0)[0])


def test_other_inputs_are_spread_as_the_recorded_ones_were(recorded: Path) -> None:
    case = load(of_executable(recorded, 3)[0], random_seed=1)
    assert case.inputs is not None
    assert case.inputs[0].shape == (9, 3)
    result = replay(of_executable(recorded, 3)[0], random_seed=1)
    expected = np.concatenate([case.inputs[0].value] * 2) * np.int8(2)
    np.testing.assert_array_equal(result.played.outputs[0].value, expected)
    assert result.comparison is None


def test_processes_are_joined_whatever_they_call_their_runs_and_executables(
    copied: Path,
) -> None:
    for role in ("inputs", "outputs"):
        for path in of_executable(copied, 0, role):  # type: ignore[arg-type]
            second = open_snapshot(path).manifest.execution
            described = [{**vars(one), "process": one.id // 4} for one in second.devices]
            records = tuple(type(second.device)(**one) for one in described)
            mine = records[second.device.id]
            write_anew(
                path,
                copied
                / path.name.replace("process000000", f"process00000{mine.process}")
                .replace(f"-device00000{mine.id}", f"-device00000{mine.id % 4}")
                .replace("executable000000", f"executable00000{mine.process * 9}")
                .replace(f"run{second.run}", f"run{second.run}" if mine.id < 4 else "run0000beef"),
                execution={
                    "process": mine.process,
                    "device": mine,
                    "devices": records,
                    "device_index": mine.id % 4,
                    "executable": mine.process * 9,
                    "run": second.run if mine.id < 4 else "0000beef",
                    "time": second.time + mine.process,
                },
            )
            if mine.id >= 4:
                path.unlink()
    case = load(next(copied.glob("*run0000beef*-device000001-*.inputs.snap")))
    assert case.notes[0].startswith("joined from 16 files: 8 devices of 2 processes")
    assert case.inputs is not None
    whole = np.arange(64, dtype=np.float32).reshape(8, 8) / 9
    np.testing.assert_array_equal(case.inputs[0].value, whole)


@pytest.mark.full
def test_two_processes_that_ran_together_are_replayed_in_one(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    both = [record(TWO_PROCESSES, tmp_path, 4, address, str(number)) for number in (0, 1)]
    for process in both:
        finish(process)
    result = replay(sorted(tmp_path.glob("*process000001*.inputs.snap"))[0])
    assert not result.mismatch
    assert len(result.by_device) == 8


def test_a_number_of_a_device_is_refused_where_several_are_needed() -> None:
    with pytest.raises(UsageError, match="runs on 3 devices, but cpu:0 is a single device"):
        devices.find_devices("cpu:0", 3)
    with pytest.raises(DeviceError, match="runs on 99 devices"):
        devices.find_devices("cpu", 99)


@pytest.mark.parametrize(
    ("indices", "fills"),
    [
        ([((0, 2), (0, 4)), ((2, 4), (0, 4))], True),
        ([((0, 2), (0, 4))] * 2, False),
        ([((0, 2), (0, 4)), ((1, 3), (0, 4))], False),
        ([((0, 2), (0, 4)), ((3, 5), (0, 4))], False),
        ([((0, 2), (0, 4)), ((2, 4), (0, 3))], False),
    ],
)
def test_parts_fill_the_whole_or_are_told_apart(indices: Any, fills: bool) -> None:
    parts = [np.zeros((2, 4, 3))] * 2  # as of PRNG keys, with a dimension that no index has
    assert sharded("a", (4, 4, 3), parts, indices).fills_whole() == fills


@pytest.mark.parametrize("dtype", [np.float64, np.complex128, np.int8])
def test_equal_copies_are_held_once(dtype: Callable[..., Any]) -> None:
    one, other = np.arange(4, dtype=dtype), np.arange(4, dtype=dtype)
    array = sharded("a", (4,), [one, other, other + 1], [((0, 4),)] * 3)
    assert array.parts[1] is array.parts[0]
    assert array.copies_differ
    assert array.whole().value is array.parts[0]


def test_devices_with_wrong_outputs_are_told_in_the_order_of_their_numbers() -> None:
    parts = tuple(np.full(1, np.nan if number in (2, 10) else 0.0) for number in range(12))
    output = ShardedArray("out0", (1,), parts, (((0, 1),),) * 12)
    case = Case(
        path=Path("step.inputs.snap"),
        format="",
        name="step",
        stablehlo=b"",
        inputs=(),
        outputs=(NamedArray("out0", parts[0]),),
        input_parts={"x": parts},
        output_parts=(output,),
    )
    alone, notes = on_one_device(case)
    assert alone.outputs is None
    assert "outputs of device 2, 10 have NaN or infinity" in notes[1]
    assert notes[1].endswith("name a file of device 2")
