"""Which steps a profile has, what the user is told of it, and where its files are."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from snaprt.runtime.profile_session import ProfileSession, Steps


class Profiler:
    """Stands in for `jax.profiler`: what was called, and what stopping does."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.may_stop = threading.Event()
        self.may_stop.set()
        self.refuses = ""
        self.folder = Path()

    def start(self, folder: Path, **_: Any) -> None:
        if self.refuses:
            raise RuntimeError(self.refuses)
        self.calls.append("start")
        self.folder = folder

    def stop(self) -> None:
        self.may_stop.wait(60)
        self.calls.append("stop")
        run = self.folder / "plugins" / "profile" / "now"
        run.mkdir(parents=True)
        (run / "some.host.xplane.pb").write_bytes(b"profile")
        (run / "some.host.trace.json.gz").write_bytes(b"for Perfetto")


@pytest.fixture
def profiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Profiler]:
    profiler = Profiler()
    monkeypatch.setattr(jax.profiler, "start_trace", profiler.start)
    monkeypatch.setattr(jax.profiler, "stop_trace", profiler.stop)
    yield profiler
    profiler.may_stop.set()


class Run:
    """A session, without a program, and what it told."""

    def __init__(self, folder: Path, steps: Steps | None, seconds: float = 60) -> None:
        self.told: list[str] = []
        self.session = ProfileSession(folder, steps, seconds, self.told.append)

    def execute(self, number: int, times: int, before: int = 0) -> None:
        executable: Any = SimpleNamespace(number=number, name=f"program_{number}")
        for count in range(before, before + times):
            self.session._executing(executable, count)

    def mark(self, *steps: int) -> None:
        for step in steps:
            self.session.step_ended(step)

    def compile(self) -> None:
        none: Any = None
        self.session.compiling(none, none, frozenset())


def test_marked_steps_are_profiled_from_the_first_to_the_end_of_the_last(
    tmp_path: Path, profiler: Profiler
) -> None:
    run = Run(tmp_path, Steps(2, 3))
    run.compile()
    run.mark(1)
    assert profiler.calls == []
    run.mark(2)
    assert profiler.calls == ["start"]
    run.mark(3)
    assert profiler.calls == ["start"]
    run.mark(4)
    assert profiler.calls == ["start", "stop"]
    run.mark(5, 6)
    run.session.end()
    assert profiler.calls == ["start", "stop"]


def test_executions_count_while_no_step_is_marked(tmp_path: Path, profiler: Profiler) -> None:
    run = Run(tmp_path, Steps(2, 3))
    run.execute(1, 2)
    run.execute(2, 1)
    assert profiler.calls == []
    run.execute(1, 1, before=2)
    assert profiler.calls == ["start"]
    assert "executions of program_1" in run.told[0]
    run.execute(2, 9, before=1)  # another program: it does not decide
    assert profiler.calls == ["start"]
    run.execute(1, 2, before=3)
    assert profiler.calls == ["start", "stop"]


def test_executions_do_not_count_where_steps_are_marked(tmp_path: Path, profiler: Profiler) -> None:
    run = Run(tmp_path, Steps(2, 2))
    run.mark(1)
    run.execute(1, 50)
    assert profiler.calls == []


def test_the_first_step_begins_with_the_first_program(tmp_path: Path, profiler: Profiler) -> None:
    run = Run(tmp_path, Steps(0, 0))
    assert profiler.calls == []
    run.compile()
    assert profiler.calls == ["start"]
    run.mark(1)
    assert profiler.calls == ["start", "stop"]


def test_a_step_that_never_came_is_told(tmp_path: Path, profiler: Profiler) -> None:
    run = Run(tmp_path, Steps(10, 14))
    run.mark(1, 2)
    run.session.end()
    assert run.told == ["there is no profile of steps 10-14: the program ended in step 2"]
    assert profiler.calls == []


def test_the_files_of_the_processes_of_a_job_do_not_replace_each_other(
    tmp_path: Path, profiler: Profiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        run = Run(tmp_path, None)
        run.compile()
        run.session.end()
    names = {file.name for file in tmp_path.glob("plugins/profile/*/*")}
    assert names == {
        *("some.host-0.xplane.pb", "some.host-0.trace.json.gz"),
        *("some.host-1.xplane.pb", "some.host-1.trace.json.gz"),
    }
    assert list(tmp_path.glob(".*")) == []


def test_a_profile_that_does_not_stop_holds_the_program_up_no_longer_than_allowed(
    tmp_path: Path, profiler: Profiler
) -> None:
    profiler.may_stop.clear()
    run = Run(tmp_path, Steps(1, 1), seconds=0.05)
    run.mark(1, 2)
    assert profiler.calls == ["start"]
    assert "has not stopped within 0.05 s" in run.told[0]
    run.mark(3)
    run.session.end()
    assert len(run.told) == 1


def test_the_programs_own_profile_is_left_alone(tmp_path: Path, profiler: Profiler) -> None:
    profiler.refuses = "Only one profile may be run at a time."
    run = Run(tmp_path, None)
    run.compile()
    run.session.end()
    assert run.told == ["warning: there is no profile: Only one profile may be run at a time."]
    assert profiler.calls == []
