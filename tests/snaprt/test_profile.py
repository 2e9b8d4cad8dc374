"""What a profile shows of snaprt, and the names of PyTorch/XLA's profiler."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import snaprt
from snaprt.snapshot.recorder.record import process_recorder


def _events(folder: Path) -> list[Any]:
    (file,) = folder.rglob("*.xplane.pb")
    profile = jax.profiler.ProfileData.from_file(str(file))
    return [event for plane in profile.planes for line in plane.lines for event in line.events]


def test_a_profile_shows_what_snaprt_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPRT_CACHE_DIR", str(tmp_path / "cache"))
    x = jnp.arange(7.0)
    with (
        jax.profiler.trace(tmp_path / "profile"),
        snaprt.record(folder=tmp_path / "dump"),
        snaprt.lazy(),
    ):
        for step in range(2):
            with snaprt.StepTrace("train", step_num=step), snaprt.Trace("mine"):
                x = jnp.cos(x) * 3
        assert process_recorder().flush(30)
    events: dict[str, list[dict[str, Any]]] = {}
    for event in _events(tmp_path / "profile"):
        events.setdefault(event.name, []).append(dict(event.stats))
    ours = {name.partition(":")[2] for name in events if name.startswith("snaprt:")}
    assert {"trace", "key", "cache", "lower", "compile", "execute", "record"} <= ours
    assert [step["step_num"] for step in events["train"]] == [0, 1]
    assert len(events["mine"]) == len(events["snaprt:execute"]) == 2
    graph = events["snaprt:execute"][0]["graph"]
    assert all(graph in record["file"] for record in events["snaprt:record"])
    first, second = (event["step"] for event in events["snaprt:execute"])  # of all of this process
    assert second == first + 1


def test_the_end_of_a_step_marks_it() -> None:
    with snaprt.lazy():
        before = snaprt.metrics.counter_value("MarkStep") or 0
        with snaprt.StepTrace("train", step_num=3):
            x = jnp.arange(5.0) + 1
        assert snaprt.metrics.counter_value("MarkStep") == before + 1
        np.testing.assert_array_equal(x, np.arange(5.0) + 1)


def test_a_step_that_fails_is_not_marked() -> None:
    with snaprt.lazy():
        before = snaprt.metrics.counter_value("MarkStep")
        with pytest.raises(ZeroDivisionError), snaprt.StepTrace("train"):
            raise ZeroDivisionError
        assert snaprt.metrics.counter_value("MarkStep") == before


def test_only_the_first_process_starts_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr("snaprt.runtime.profile.is_master_ordinal", lambda: False)
    assert snaprt.start_server(port) is None
    server = snaprt.start_server(port, only_on_master=False)
    assert server is not None
    del server
    jax.profiler.stop_server()
