"""``snaprt.MpDeviceLoader``: batches lie on the devices before the step that takes them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import snaprt
from snaprt import metrics


def batches(count: int, loaded: list[int] | None = None) -> Iterator[dict[str, Any]]:
    for number in range(count):
        if loaded is not None:
            loaded.append(number)
        yield {"x": np.full((2, 3), number, np.float32), "y": [number], "name": f"batch {number}"}


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "snaprt-loader"]


def test_arrays_and_numbers_become_arrays_and_all_else_stays():
    (first, second) = snaprt.MpDeviceLoader(list(batches(2)))
    assert isinstance(first["x"], jax.Array)
    assert isinstance(first["y"][0], jax.Array)
    assert second["name"] == "batch 1"
    np.testing.assert_array_equal(second["x"], np.full((2, 3), 1, np.float32))


def test_each_batch_is_a_step_of_its_own():
    loader = snaprt.MpDeviceLoader(list(batches(4)))
    assert len(loader) == 4
    total = jnp.float32(0)
    with snaprt.lazy():
        for batch in loader:
            total = total + batch["x"].sum()
    assert metrics.counter_value("MarkStep") == 4
    assert float(total) == 36.0


def test_it_loads_no_more_ahead_than_it_may():
    loaded: list[int] = []
    taken = iter(snaprt.MpDeviceLoader(batches(50, loaded), prefetch=3))
    next(taken)
    assert len(loaded) <= 5  # one taken, three that wait, one in the thread's hands
    del taken
    assert not loader_threads()


def test_an_error_of_the_loader_comes_in_the_place_of_its_batch():
    def failing() -> Iterator[dict[str, Any]]:
        yield from batches(2)
        raise OSError("the disk is gone")

    taken = iter(snaprt.MpDeviceLoader(failing()))
    assert [next(taken)["name"], next(taken)["name"]] == ["batch 0", "batch 1"]
    with pytest.raises(OSError, match="the disk is gone"):
        next(taken)
    assert not loader_threads()


def test_shardings_may_be_given_for_parts_of_a_batch():
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    sharding = {"x": device, "y": device, "name": device}
    (batch,) = snaprt.MpDeviceLoader(list(batches(1)), sharding)
    assert batch["x"].sharding == device


def test_grain_loads_for_it():
    grain = pytest.importorskip("grain.python")
    data = grain.MapDataset.source(np.arange(12, dtype=np.float32)).batch(4)
    sums = [float(batch.sum()) for batch in snaprt.MpDeviceLoader(data.to_iter_dataset())]
    assert sums == [6.0, 22.0, 38.0]


def test_a_loader_that_loads_nothing_ahead_is_refused():
    with pytest.raises(ValueError, match="prefetch is 0"):
        snaprt.MpDeviceLoader([], prefetch=0)


LEFT_OPEN = """
import itertools, numpy as np, snaprt
loader = snaprt.MpDeviceLoader({"x": np.ones(9, np.float32)} for _ in itertools.count())
batches = iter(loader)
print(next(batches)["x"].sum())
"""


def test_a_process_ends_while_its_batches_are_still_being_loaded():
    ran = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN], capture_output=True, text=True, timeout=300
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "9.0\n", "")
