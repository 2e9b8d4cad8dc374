"""An execution of several devices in one file: packed, redacted, replayed, exported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from programs import finish
from several_devices import PROGRAM, of_executable, record
from snaprt_replay.compare.results import IDENTICAL
from snaprt_replay.export import export
from snaprt_replay.load.load import load
from snaprt_replay.run.rerun import replay

from snaprt.errors import UsageError
from snaprt.snapshot.share.pack import pack


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first file of a program of 8 devices."""
    folder = tmp_path_factory.mktemp("devices")
    finish(record(PROGRAM, folder, 8))
    return of_executable(folder, 0)[0]


def test_the_files_of_all_devices_are_packed_and_replayed(recorded: Path, tmp_path: Path) -> None:
    packed = pack([recorded], tmp_path / "all.pack")
    assert len(packed.snapshots) == 16
    result = replay(packed.path)
    assert result.comparison is not None
    assert result.comparison.verdict == IDENTICAL
    assert [one.verdict for one in result.by_device] == [IDENTICAL] * 8


def test_names_and_values_are_redacted_alike_on_all_devices(recorded: Path, tmp_path: Path) -> None:
    packed = pack([recorded], tmp_path / "all.pack", ["values", "names", "paths"])
    result = replay(packed.path)
    assert result.comparison is None
    assert result.case.inputs is not None
    assert not result.case.input_parts  # copies of one array on several devices agree
    shapes = [one.shape for one in load(recorded).inputs or ()]
    assert [one.shape for one in result.case.inputs] == shapes


def test_arrays_are_exported_whole_and_forms_of_one_device_refused(
    recorded: Path, tmp_path: Path
) -> None:
    case = export(recorded, "npz", tmp_path / "step.npz")
    with np.load(tmp_path / "step.npz") as arrays:
        shapes = [arrays[f"inputs/{one.name}"].shape for one in case.inputs or ()]
    assert shapes == [one.shape for one in case.inputs or ()]
    for form in ("hlo-snapshot", "python"):
        with pytest.raises(UsageError, match="is part of a program on 8 devices"):
            export(recorded, form, tmp_path / form)
