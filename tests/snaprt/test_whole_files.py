"""Files that appear whole or not at all, and what is written to because it is no file."""

from __future__ import annotations

import os
import signal
import textwrap
from pathlib import Path

import pytest
from programs import run_program

from snaprt.cli.replay import formats
from snaprt.host.whole_files import whole_file, write_whole


def test_a_link_stays_and_leads_to_the_new_content(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    (tmp_path / "link").symlink_to("old")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "old").read_text() == "new"


def test_what_was_there_stays_where_the_file_cannot_be_written(tmp_path: Path) -> None:
    def write_half() -> None:
        with whole_file(tmp_path / "name") as file:
            file.write(b"new")
            raise OSError("full")

    (tmp_path / "name").write_text("old")
    with pytest.raises(OSError, match="full"):
        write_half()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_name_may_be_as_long_as_the_file_system_takes(tmp_path: Path) -> None:
    write_whole(tmp_path / ("n" * 255), b"new")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["new"]


def test_what_a_killed_process_left_goes_with_the_next_file(tmp_path: Path) -> None:
    killed = """
        import os, pathlib, signal, sys
        from snaprt.host.whole_files import whole_file
        with whole_file(pathlib.Path(sys.argv[1])) as file:
            file.write(b"half of it")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    """
    report = tmp_path / "report.json"
    run_program(textwrap.dedent(killed), report, status=-signal.SIGKILL)
    (left,) = tmp_path.iterdir()
    assert left != report
    write_whole(report, b"whole")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["whole"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_reports_are_saved_into_a_pipe_and_do_not_take_its_place(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)
    formats.save([], pipe)
    assert b"snaprt.report" in os.read(reader, 1 << 16)
    os.close(reader)
    assert pipe.is_fifo()
