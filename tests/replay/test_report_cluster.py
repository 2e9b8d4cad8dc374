"""Replay on a real Dask cluster, a scheduler and two workers, one of which is lost."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import start_program
from snaprt_replay import batch
from snaprt_replay.batch import ReplayRequest
from snaprt_replay.run.variants.variants import parse_variant

from snaprt.errors import UsageError

distributed = pytest.importorskip("distributed", reason="Dask (snaprt[cluster]) is not installed")

FILES = 4


def start_worker(address: str) -> subprocess.Popen[str]:
    """Start a worker that nothing starts again."""
    options = ("--nthreads", "1", "--no-nanny", "--no-dashboard")
    path = os.pathsep.join(filter(None, sys.path))
    return start_program(("-m", "distributed.cli.dask_worker", address, *options), PYTHONPATH=path)


@pytest.fixture
def address() -> Iterator[str]:
    with distributed.LocalCluster(n_workers=0, dashboard_address=None) as scheduler:
        yield scheduler.scheduler_address


@pytest.fixture
def workers(address: str) -> Iterator[list[subprocess.Popen[str]]]:
    started = [start_worker(address) for _ in range(2)]
    with distributed.Client(address, set_as_default=False) as client:
        client.wait_for_workers(2, timeout=60)
    yield started
    for worker in started:
        worker.kill()
        worker.wait()


@pytest.mark.slow
def test_every_file_is_replayed_though_a_worker_is_lost(
    address: str, workers: list[subprocess.Popen[str]], recorded: Path, tmp_path: Path
) -> None:
    paths = []
    for number in range(FILES):
        for path in recorded.parent.glob(recorded.name.replace(".inputs.", ".*.")):
            shutil.copy(path, tmp_path / f"{number}-{path.name}")
        paths.append(tmp_path / f"{number}-{recorded.name}")
    broken = tmp_path / "broken.inputs.snap"
    broken.write_bytes(paths[0].read_bytes()[:-50])
    request = ReplayRequest(parse_variant("cpu"))
    reports = {}
    for number, report in batch.replay_on_cluster([*paths, broken], request, address):
        if not reports:
            workers[0].send_signal(signal.SIGKILL)
        reports[number] = report
    assert [reports[number].headline.word for number in range(FILES)] == ["MATCH"] * FILES
    assert reports[FILES].headline.word == "FAILED"
    assert [reports[number].path for number in range(FILES)] == [str(path) for path in paths]
    assert workers[0].wait(timeout=60) == -signal.SIGKILL


def test_a_scheduler_that_is_not_there_is_told_in_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(batch, "_CONNECT_SECONDS", 1)
    with pytest.raises(UsageError, match="there is no Dask scheduler at tcp:"):
        list(batch.replay_on_cluster([], ReplayRequest(parse_variant("cpu")), "tcp://127.0.0.1:9"))
    with pytest.raises(UsageError, match="there is no scheduler file"):
        list(batch.replay_on_cluster([], ReplayRequest(parse_variant("cpu")), "gone.json"))
    with pytest.raises(UsageError, match="'host' is not the address"):
        list(batch.replay_on_cluster([], ReplayRequest(parse_variant("cpu")), "host"))
    (tmp_path / "a.json").write_text('{"id": 1}')
    with pytest.raises(UsageError, match=r"a\.json is not a scheduler file"):
        list(batch.replay_on_cluster([], ReplayRequest(parse_variant("cpu")), f"{tmp_path}/a.json"))
