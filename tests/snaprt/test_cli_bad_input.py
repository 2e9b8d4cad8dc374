"""Files that are cut, garbled, empty, huge or no files: words and status 2, no traceback."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import run_program
from snaprt_replay import batch

from snaprt.cli import main as cli
from snaprt.cli import output

SNAPSHOTS = Path(__file__).parents[1] / "support" / "snapshots"
GOOD = SNAPSHOTS / "format-1.0.inputs.snap"
TEN_GIGABYTES = 10 << 30


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Make one file, or something that is none, of each kind."""
    folder = tmp_path_factory.mktemp("bad")
    content = GOOD.read_bytes()
    chosen = random.Random(7)
    garbled = bytearray(content)
    for _ in range(20):
        garbled[chosen.randrange(len(garbled))] ^= 1 << chosen.randrange(8)
    contents = {
        "empty.snap": b"",
        "zeros.snap": bytes(5000),
        "cut.inputs.snap": content[: len(content) // 2],
        "garbled.inputs.snap": bytes(garbled),
        "text.json": b"hello\n",
        "latin.json": "é".encode("latin-1") * 50,
        "list.json": b"[1, 2, 3]",
        "wrong.json": b'{"schema": 1.5, "version": [], "format": {}}',
        "deep.json": b"[" * 100_000,
        "module.hlo.txt": b"HloModule m\n garbage",
        "arrays.npz": b"PK\3\4garbage",
    }
    for name, given in contents.items():
        (folder / name).write_bytes(given)
    for name in ("huge.snap", "huge.json"):
        (folder / name).touch()
        os.truncate(folder / name, TEN_GIGABYTES)
    (folder / "folder.snap").mkdir()
    (folder / "itself").symlink_to("itself")
    return [*folder.iterdir(), folder / "not there", Path("/" + "a" * 300), folder / "\udcff.snap"]


# `FILE` stands for the bad file, `OUT` for a name where something can be written.
COMMANDS = [
    "inspect FILE",
    "diff FILE GOOD",
    "export FILE --to python -o OUT",
    "pack FILE -o OUT",
    "unpack FILE -d OUT",
    "metrics FILE",
    "report FILE",
    "cache import FILE --dir OUT",
    "cache export FILE --dir OUT",
    "cache ls --dir FILE",
    "cache verify --dir FILE",
    "cache why FILE FILE --dir OUT",
    "export GOOD --to python -o FILE/x",
    "pack GOOD -o FILE/x",
    "unpack GOOD -d FILE/x",
]


@pytest.mark.parametrize("words", COMMANDS)
def test_a_bad_file_is_an_error_with_a_hint_and_no_traceback(
    bad: list[Path],
    tmp_path: Path,
    words: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SNAPRT_CACHE_DIR", str(tmp_path / "cache"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for file in bad:
        out = tmp_path / "out"
        names = {"FILE": str(file), "OUT": str(out), "GOOD": str(GOOD)}
        names["FILE/x"] = str(file / "x") if os.path.isfile(file) else str(file)
        status = cli.main([names.get(word, word) for word in words.split()])
        shown = capfd.readouterr().err
        assert status in (output.EXIT_OK, output.EXIT_MISMATCH, output.EXIT_FAILURE)
        assert "Traceback" not in shown, f"{file}: {shown}"
        assert "bug in snaprt" not in shown
        if status == output.EXIT_FAILURE and "report" not in words:
            assert "error: " in shown, file
            assert "\nhint: " in shown, f"{file}: {shown}"
        for left in (out, file / "x"):
            if file.parent != SNAPSHOTS and os.path.exists(left):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert used < 1 << 20  # KiB: nothing is read whole because it is there


@pytest.mark.parametrize(
    "words",
    [
        "inspect PIPE",
        "diff GOOD PIPE",
        "export PIPE --to python -o OUT",
        "pack PIPE -o OUT",
        "unpack PIPE -d OUT",
        "ls PIPE",
        "report PIPE",
        "report PIPE.json",
        "replay GOOD --inputs PIPE",
        "replay FOLDER",
        "cache import PIPE --dir OUT",
        "cache warm PIPE --target cpu --dir OUT",
        "metrics PIPE",
        "profile PROFILE",
        "report GOOD --localized PIPE",
    ],
)
def test_a_pipe_in_place_of_a_file_is_not_waited_for(
    tmp_path: Path, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "a.inputs.snap"
    os.mkfifo(pipe)
    os.mkfifo(result := tmp_path / "a.inputs.snap.json")
    (profile := tmp_path / "profile").mkdir()
    os.mkfifo(profile / "a.inputs.snap.xplane.pb")
    names = {
        "PIPE": pipe,
        "PIPE.json": result,
        "FOLDER": tmp_path,
        "PROFILE": profile,
        "OUT": tmp_path / "out",
        "GOOD": GOOD,
    }
    status = cli.main([str(names.get(word, word)) for word in words.split()])
    assert status == output.EXIT_FAILURE
    shown = capfd.readouterr()
    assert "a.inputs.snap" in shown.out + shown.err
    assert "pipe" in shown.err or "not a packed file" in shown.err or "FAILED" in shown.out


def test_a_loop_of_links_beside_recorded_executions_harms_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(GOOD, file := tmp_path / GOOD.name)
    (loop := tmp_path / "loop.inputs.snap").symlink_to("loop.inputs.snap")
    assert cli.main(["pack", str(file), "-o", str(tmp_path / "out.pack")]) == output.EXIT_OK
    assert cli.main(["ls", str(tmp_path)]) == output.EXIT_MISMATCH
    shown = capfd.readouterr()
    assert "lazy_graph" in shown.out
    assert f"{loop} is a symbolic link that leads nowhere" in shown.err


@pytest.mark.parametrize(
    ("role", "words", "status"),
    [
        ("outputs", "replay FILE", 2),
        ("outputs", "export FILE --to npz -o OUT", 2),
        ("outputs", "pack FILE -o OUT", 2),
        ("outputs", "pack FOLDER -o OUT", 2),
        ("outputs", "ls FOLDER --check", 1),
        ("inputs", "replay FOLDER", 2),
        ("inputs", "pack FOLDER -o OUT", 2),
        ("inputs", "ls FOLDER", 1),
    ],
)
def test_a_folder_in_place_of_a_recording_is_an_error_that_names_it(
    tmp_path: Path, role: str, words: str, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "dump").mkdir()
    for file in GOOD.parent.glob(GOOD.name.replace(".inputs.", ".*.")):
        shutil.copy(file, folder)
    path = folder / GOOD.name
    wrong = path.with_name(path.name.replace(".inputs.", f".{role}."))
    wrong.unlink(missing_ok=True)
    wrong.mkdir()
    names = {"FILE": path, "FOLDER": folder, "OUT": tmp_path / "out"}
    assert cli.main([str(names.get(word, word)) for word in words.split()]) == status
    assert f"{wrong} is a directory" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_vanishes_while_recordings_are_searched_for_harms_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        shutil.copy(GOOD, tmp_path / name)
    scan = os.scandir

    def vanishing(path: Path | str) -> Any:
        if Path(path) != tmp_path and (tmp_path / "b").exists():
            (tmp_path / "b" / GOOD.name).unlink()
            (tmp_path / "b").rmdir()
        return scan(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    found = batch.executions([tmp_path])
    assert [path.parent.name for path in found] == ["a", "c"]


def test_a_folder_that_cannot_be_read_is_replayed_as_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("a", "private"):
        (tmp_path / name).mkdir()
        shutil.copy(GOOD, tmp_path / name / GOOD.name)
    scandir = os.scandir

    def refusing(path):
        if Path(path).name == "private":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    found = batch.executions([tmp_path])
    assert found == [tmp_path / "a" / GOOD.name, tmp_path / "private"]


_LIMITED = """
import resource, sys
from snaprt.cli.main import main
good, pack, out = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
for words in (
    ("pack", good, "-o", f"{out}/out.pack"),
    ("export", good, "--to", "npz", "-o", f"{out}/out.npz"),
    ("inspect", good, "--array", "arg0", "--save", f"{out}/out.npy"),
    ("replay", good, "--junit", f"{out}/out.xml"),
    ("unpack", pack, "-d", out),
):
    print(words[0], main(list(words)), file=sys.stderr)
"""


def test_a_limit_on_the_size_of_files_is_an_error_with_a_hint_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    # Python would cut short the bytecode that the next program reads.
    pack = SNAPSHOTS / "format-2.1.pack"
    errors = run_program(_LIMITED, GOOD, pack, tmp_path, PYTHONDONTWRITEBYTECODE=1).stderr
    assert errors.count("error: cannot ") == 5, errors
    assert errors.count("aise the file size limit (ulimit -f), or ") == 5, errors
    assert "or unpack into another folder" in errors
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


def _no_space() -> None:
    raise OSError(28, "No space left on device", "/full/file")


def _no_memory() -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("fail", "words"),
    [
        (_no_space, "error: No space left on device: /full/file\n\nhint: Free some space"),
        (_no_memory, "error: out of memory\n\nhint: "),
    ],
)
def test_what_the_system_refuses_is_said_in_its_words_and_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fail: Callable[[], None],
    words: str,
) -> None:
    monkeypatch.setattr("snaprt.metrics.load", lambda file: fail())
    assert cli.main(["metrics", "m.json"]) == output.EXIT_FAILURE
    assert capsys.readouterr().err.startswith(words)
