"""Arrays of the types that NumPy does not have: every file that they are saved in can be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from programs import run_program
from recordings import record
from snaprt_replay.load.load import load

from snaprt.hlo.literals import ELEMENT_TYPES

Run = Callable[..., tuple[int, str, str]]

ONE_BIT = ("int1", "uint1")  # XLA takes no arrays of them on the CPU
NARROW = [
    row.dtype
    for row in ELEMENT_TYPES.values()
    if hasattr(ml_dtypes, row.dtype.name) and row.dtype.name not in ONE_BIT
]


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a program that returns its inputs, an array and a scalar of each narrow type."""
    arguments = {}
    for kind in NARROW:
        ones = np.ones((2, 1), kind)
        arguments |= {f"{kind.name}-{x.ndim}": jnp.asarray(x) for x in (ones, ones[0, 0])}
    return record(tmp_path_factory.mktemp("narrow"), lambda *arrays: arrays, arguments)


def test_outputs_of_every_narrow_type_are_saved_and_read_back(
    snaprt: Run, narrow: Path, tmp_path: Path
) -> None:
    module, outputs = tmp_path / "step.mlirbc", tmp_path / "out.npz"
    assert snaprt("replay", narrow, "--save", outputs)[0] == 0
    expected = [array.value for array in load(narrow).inputs or ()]
    with np.load(outputs) as saved:
        assert len(saved.files) == len(expected)
        for name, array in zip(saved.files, expected, strict=True):
            raw = saved[name]
            assert raw.dtype == np.dtype(f"V{array.itemsize}"), array.dtype
            assert raw.shape == array.shape
            assert raw.tobytes() == array.tobytes()
    assert snaprt("export", narrow, "--to", "stablehlo", "-o", module)[0] == 0
    words = ("--inputs", outputs, "--outputs", outputs)
    status, out, err = snaprt("replay", module, *words, "--json")
    assert status == 0, err
    assert all(kind.name in out for kind in NARROW)


def test_one_array_of_every_narrow_type_is_saved_as_bits(
    snaprt: Run, narrow: Path, tmp_path: Path
) -> None:
    for array in load(narrow).inputs or ():
        words = ("inspect", narrow, "--array", array.name, "--save", tmp_path / "a.npy")
        assert snaprt(*words)[0] == 0, array.dtype
        bits = np.load(tmp_path / "a.npy")
        assert bits.dtype.kind == "u"
        assert bits.tobytes() == array.value.tobytes()


def test_exported_arrays_of_every_narrow_type_are_read_by_numpy_and_the_script(
    snaprt: Run, narrow: Path, tmp_path: Path
) -> None:
    assert snaprt("export", narrow, "--to", "npz", "-o", tmp_path / "step.npz")[0] == 0
    with np.load(tmp_path / "step.npz") as arrays:
        assert {arrays[name].dtype.kind for name in arrays.files} == {"u"}
    assert snaprt("export", narrow, "--to", "python", "-o", tmp_path / "step")[0] == 0
    told = run_program(tmp_path / "step" / "run.py", folder=tmp_path).stdout
    assert told.count("identical") == 2 * len(NARROW)
