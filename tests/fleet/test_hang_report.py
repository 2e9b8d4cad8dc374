"""What is concluded from the dumps of a hang."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from programs import SNAPRT, run_program

from snaprt.errors import UsageError
from snaprt.fleet.hang import (
    Collective,
    Dump,
    DumpedExecution,
    DumpedFrame,
    DumpedThread,
    conclude,
    is_hang,
    read_dumps,
)
from snaprt.snapshot.recorder.ranks.states import RankState, read_states


def execution(number: int, *, ended: bool = True, graph_id: str = "1" * 16) -> DumpedExecution:
    return DumpedExecution(
        "train_step", graph_id, number, number, 90.0, "ended" if ended else "called"
    )


def waiting(rank: int, number: int, *, count: int = 4, graph_id: str = "1" * 16) -> Dump:
    under_way = execution(number, ended=False, graph_id=graph_id)
    return Dump(
        rank=rank,
        process=rank,
        processes=count,
        host="node0",
        pid=100 + rank,
        run="0" * 8,
        cause="nothing has ended for 5.00 s",
        limit=5.0,
        time=100.0,
        quiet=5.0,
        state="waiting",
        compiling="",
        since=90.0,
        steps=number,
        where=DumpedFrame("<module>", "/job/train.py", 30),
        executions=(execution(number - 1), under_way),
        waits_for=under_way,
        threads=(DumpedThread((DumpedFrame("<module>", "/job/train.py", 30),), "MainThread"),),
        collectives=(Collective("all-reduce.3", "all-reduce"),),
    )


def in_python(rank: int, number: int, *, count: int = 4) -> Dump:
    return dataclasses.replace(
        waiting(rank, number, count=count),
        state="python",
        since=0.0,
        where=DumpedFrame("load", "/job/data.py", 88),
        executions=(execution(number),),
        waits_for=None,
        collectives=(),
    )


def state(rank: int, *, ended: str = "") -> RankState:
    return RankState(
        rank, rank, 4, "node0", 1, "0" * 8, 5, "train_step", "1" * 16, 5, 88.0,
        "/job/data.py:88 (load)", ended,
    )  # fmt: skip


def test_one_rank_is_behind_and_the_others_wait():
    found = conclude([waiting(0, 6), in_python(1, 5), waiting(2, 6), waiting(3, 6)])
    assert found.headline == (
        "rank 1 is at step 5 of train_step, in Python at data.py:88, "
        "the others wait at step 6 in train_step (all-reduce.3) at train.py:30"
    )
    assert [group.ranks for group in found.groups] == [(1,), (0, 2, 3)]
    assert [(row.state, row.step, row.seconds) for row in found.rows][:2] == [
        ("waiting", 6, 10.0),
        ("python", 5, 5.0),
    ]


def test_where_no_step_is_marked_executions_count():
    dumps = [dataclasses.replace(dump, steps=0) for dump in (waiting(0, 6), in_python(1, 5))]
    found = conclude(dumps)
    assert "rank 1 is at execution 5 of train_step" in found.headline
    assert found.rows[0].step == -1


def test_a_rank_that_wrote_nothing_is_named_with_what_it_told_last():
    found = conclude([waiting(0, 6), waiting(1, 6), waiting(3, 6)], [state(2)])
    assert found.headline.startswith("rank 2 wrote nothing, the others wait at step 6")
    assert found.missing[0].last_seen == "12.00 s before, it was at step 5 of train_step, " + (
        "data.py:88 (load)"
    )
    unseen = conclude([waiting(0, 6), waiting(1, 6), waiting(3, 6)])
    assert unseen.missing[0].last_seen == ""


def test_a_rank_that_has_ended_is_said_to_have():
    dumps = [waiting(rank, 6) for rank in (0, 1, 3)]
    finished = conclude(dumps, [state(2, ended="finished")])
    assert finished.headline.startswith("rank 2 has ended its program, the others wait")
    failed = conclude(dumps, [state(2, ended="ValueError: no data")])
    assert failed.missing[0].last_seen == "its program has ended with ValueError: no data"


def test_all_in_one_execution_means_that_no_rank_is_behind():
    found = conclude([waiting(rank, 6) for rank in range(4)])
    assert found.headline.startswith("all 4 ranks wait at step 6 in train_step (all-reduce.3)")
    assert found.advice.startswith("no rank is behind")


def test_ranks_that_went_different_ways_are_told_apart():
    found = conclude([waiting(0, 6, count=2), waiting(1, 7, count=2)])
    assert found.headline.startswith("rank 0 waits at step 6")
    assert "the other waits at step 7" in found.headline
    assert "different ways" in found.advice


def test_different_programs_of_one_name_are_named():
    found = conclude([waiting(0, 6, count=2), waiting(1, 6, count=2, graph_id="2" * 16)])
    assert found.advice == "the ranks run different programs under the name train_step"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"state": "compiling", "compiling": "train_step"}, "rank 0 compiles train_step at"),
        ({"state": "stuck"}, "rank 0 is stuck in native code that keeps Python from running at"),
        ({"state": "died"}, "rank 0 died at data.py:88, after step 5 of train_step"),
        ({"executions": ()}, "rank 0 is in Python at data.py:88 and has run nothing yet"),
        ({"executions": (), "where": None}, "rank 0 is in Python and has run nothing yet"),
    ],
)
def test_each_state_has_its_words(changes: dict[str, object], said: str):
    dump = dataclasses.replace(in_python(0, 5, count=1), **changes)
    assert conclude([dump]).headline.startswith(said)


def written(folder: Path, *dumps: Dump) -> Path:
    folder.mkdir(parents=True)
    for dump in dumps:
        content = {"schema": "snaprt.hang", "version": 1, **dataclasses.asdict(dump)}
        (folder / f"rank-{dump.rank:06d}.json").write_text(json.dumps(content))
    return folder


def test_the_report_prints_the_conclusion_and_a_table_and_leaves_with_1(tmp_path: Path):
    hang = written(tmp_path / "hang-001", waiting(0, 6, count=2), in_python(1, 5, count=2))
    assert is_hang(hang)
    assert len(read_dumps(hang)) == 2
    shown = run_program((*SNAPRT, "report"), hang, status=1, COLUMNS=200).stdout
    assert "rank 1 is at step 5 of train_step, in Python at data.py:88, the other waits" in shown
    assert "/job/data.py:88 (load)" in shown
    plain = json.loads(run_program((*SNAPRT, "report", "--json"), hang, status=1).stdout)
    assert (plain["schema"], plain["version"]) == ("snaprt.hang-report", 1)
    assert plain["groups"][0]["ranks"] == [1]


def test_a_damaged_dump_is_named(tmp_path: Path):
    hang = written(tmp_path / "hang-001", waiting(0, 6, count=2))
    (hang / "rank-000001.json").write_text('{"schema": "snaprt.hang", "version": 1}')
    with pytest.raises(UsageError, match=r"rank-000001\.json cannot be read"):
        read_dumps(hang)
    (hang / "rank-000001.json").write_text('{"schema": "snaprt.hang", "version": 99}')
    assert "no dump of a hang that this version reads" in (
        run_program((*SNAPRT, "report"), hang, status=2).stderr
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_whatever_is_in_the_place_of_a_dump_is_named_and_not_waited_for(tmp_path: Path, rank: int):
    hang = written(tmp_path / "hang-001", waiting(0, 6, count=2), waiting(1, 6, count=2))
    damaged = hang / f"rank-{rank:06d}.json"
    content = damaged.read_text()
    contents = ["", "[]", content[:300], '{"a": ' + "[" * 100_000]
    contents.append(content.replace('"processes": 2', '"processes": 1000000000000'))
    contents.append(content.replace(f'"rank": {rank}', '"rank": -1'))
    for wrong in contents:
        damaged.write_text(wrong)
        assert_is_named(hang, damaged)
    damaged.write_bytes(content.replace("train", "tr\xe4in").encode("latin-1"))
    assert_is_named(hang, damaged)
    damaged.unlink()
    os.mkfifo(damaged)
    assert_is_named(hang, damaged)
    damaged.unlink()
    damaged.mkdir()
    assert_is_named(hang, damaged)


def assert_is_named(hang: Path, damaged: Path) -> None:
    assert is_hang(hang)
    with pytest.raises(UsageError) as caught:
        read_dumps(hang)
    assert str(damaged) in caught.value.message
    assert caught.value.hint


def test_a_hang_of_which_nothing_could_be_written_is_said_to_be_empty(tmp_path: Path):
    (tmp_path / "hang-001").mkdir()
    done = run_program((*SNAPRT, "report"), tmp_path / "hang-001", status=2)
    assert f"no rank has written its stacks into {tmp_path / 'hang-001'}" in done.stderr


def test_a_dump_without_a_schema_is_refused(tmp_path: Path):
    hang = written(tmp_path / "hang-001", waiting(0, 6, count=1))
    dump = dataclasses.asdict(waiting(1, 6, count=2))
    (hang / "rank-000001.json").write_text(json.dumps(dump))
    with pytest.raises(UsageError, match=r"rank-000001\.json is no dump of a hang"):
        read_dumps(hang)


def test_a_folder_without_dumps_is_no_hang_and_states_are_read(tmp_path: Path):
    assert not is_hang(tmp_path)
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    (ranks / "rank-000001.json").write_text(json.dumps(dataclasses.asdict(state(1))))
    assert not is_hang(ranks)
    assert read_states(tmp_path) == (state(1),)
    (ranks / "rank-000002.json").write_text("{")
    with pytest.raises(UsageError, match=r"rank-000002\.json is no state of a rank"):
        read_states(tmp_path)
