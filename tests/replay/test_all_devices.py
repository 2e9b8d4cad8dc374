"""``snaprt replay --all-devices``: the device that gives other bits is named."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from programs import finish, run_program
from recordings import record
from several_devices import PROGRAM
from several_devices import record as record_on_devices

from snaprt.cli.main import main

SUPPORT = Path(__file__).parents[1] / "support"

REPLAY = """
import sys
sys.path.insert(0, sys.argv[1])
from broken_chips import permanent
from snaprt.cli.main import main
for device in map(int, sys.argv[2].split(",")):
    permanent(device, "2.500000e-01", f"2.50000{device + 1}e-01")
sys.exit(main(["replay", *sys.argv[3:]]))
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def quarter(x: jax.Array) -> jax.Array:
        return jnp.tanh(x) * 0.25

    return record(tmp_path_factory.mktemp("recorded"), quarter, {"x": jnp.arange(4.0)})


def replay(broken: str, file: Path, *words: object, status: int) -> str:
    program = (SUPPORT, broken, file, "--all-devices", *words)
    return run_program(REPLAY, *program, devices=4, status=status, SNAPRT_CACHE=0).stdout


def test_the_device_that_computes_wrong_is_named_in_every_form(recorded: Path, tmp_path: Path):
    page, note = tmp_path / "replay.html", tmp_path / "replay.md"
    said = replay(
        "2",
        recorded,
        *("--repeat", 3, "--no-isolate", "--json", "--html", page, "--markdown", note),
        status=1,
    )
    (report,) = json.loads(said)["reports"]
    assert report["headline"]["word"] == "DEVICES DIFFER"
    assert report["headline"]["sentence"] == "cpu:2 gives different bits than the other 3"
    rows = [(row["device"], row["result"], row["verdict"]) for row in report["all_devices"]]
    right, wrong = (1, "identical"), (2, report["all_devices"][2]["verdict"])
    assert rows == [("cpu:0", *right), ("cpu:1", *right), ("cpu:2", *wrong), ("cpu:3", *right)]
    assert wrong[1] != "identical"
    assert all(row["agrees_with_itself"] for row in report["all_devices"])
    assert all(len(row["execute_seconds"]) == 3 for row in report["all_devices"])
    for file in (page, note):
        assert "cpu:2" in file.read_text()
        assert "3 runs agree" in file.read_text()


def test_the_terminal_shows_a_table_of_devices(recorded: Path):
    lines = replay("2", recorded, status=1).splitlines()
    heads = next(number for number, line in enumerate(lines) if line.startswith("device  kind"))
    table = [line.split()[:3] for line in lines[heads + 1 : heads + 5]]
    assert table == [[f"cpu:{n}", "cpu", "B" if n == 2 else "A"] for n in range(4)]


def test_where_no_result_is_that_of_most_no_device_is_named(recorded: Path):
    said = replay("0,1", recorded, status=1)
    assert "DEVICES DIFFER: 3 results on 4 devices, none of them on a majority" in said


def test_devices_that_agree_are_no_finding(recorded: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["replay", str(recorded), "--all-devices", "--repeat", "2"]) == 0
    said = capsys.readouterr().out
    assert "2 runs agree" in said
    assert said.splitlines()[-1].startswith("MATCH")


def test_a_program_of_several_devices_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    finish(record_on_devices(PROGRAM, tmp_path, 8))
    file = next(tmp_path.glob("*.inputs.snap"))
    assert main(["replay", str(file), "--all-devices"]) == 2
    assert "--all-devices takes programs of one device" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--device", "cpu:0"), "--all-devices cannot be combined with --device cpu:0"),
        (("--b", "cpu"), "--all-devices cannot be combined with --a"),
        (("--compile-only",), "--all-devices cannot be combined with --a"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    recorded: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], complaint: str
):
    assert main(["replay", str(recorded), "--all-devices", *words]) == 2
    assert complaint in capsys.readouterr().err
