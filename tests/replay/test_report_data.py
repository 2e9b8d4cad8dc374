"""Reports as saved data, and as lines of text."""

import dataclasses
import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from sample_reports import HOSTILE, sample_report
from snaprt_replay import gather
from snaprt_replay.load.load import load
from snaprt_replay.report import model, saved, text
from snaprt_replay.report.surroundings import source_excerpts
from snaprt_replay.run.rerun import replay

from snaprt import shown
from snaprt.errors import UsageError

SAVED = Path(__file__).parents[1] / "support" / "saved"


def test_a_saved_report_is_read_back_as_it_was():
    report = sample_report()
    again = model.from_json(json.loads(json.dumps(model.to_json(report), allow_nan=False)))
    assert model.to_json(again) == model.to_json(report)
    assert again.localization == report.localization


@pytest.mark.parametrize(
    "damage",
    [
        {"headline": {"status": "javascript:", "word": "", "sentence": ""}},
        {"headline": None},
        {"grids": [{"rows": 9, "columns": 9}]},
        {"neighborhood": {"nodes": [], "edges": [[0, 7]], "hidden": 0}},
        {"comparison": {"schema": "another"}},
        {"runs": {"replay": {"execute_seconds": "soon"}}},
    ],
)
def test_a_damaged_report_is_refused_with_words(damage):
    saved = json.loads(json.dumps(model.to_json(sample_report())))
    with pytest.raises(UsageError):
        model.from_json({**saved, **damage})


def test_the_text_ends_with_the_verdict_and_shows_where_the_error_sits():
    lines = list(text.lines(sample_report()))
    assert lines[-1] == "MISMATCH: 1 of 2 outputs differ: loss"
    assert any("░" in line or "█" in line for line in lines)
    assert any(line.endswith("NaN on the actual side only") for line in lines)


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: repr(name[:12]))
def test_the_text_holds_nothing_that_a_terminal_would_obey(name):
    lines = list(text.lines(sample_report(name)))
    assert all(line.isprintable() for line in lines)
    assert max(map(len, lines)) < 5_000


def test_a_count_is_seen_however_small():
    assert text.bars((10**12, 0, 1)) == "█ ▁"


@pytest.mark.parametrize(
    "name", ["a b", "it's", "\x1b[2J\n", "caf\u00e9", "$(touch owned)", "\u202e"]
)
def test_a_command_is_taken_by_a_shell_as_it_was_meant(name):
    word = shown.shell_word(name)
    assert shown.visible(word) == word
    told = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True)
    assert told.stdout.decode() == name
    assert word.startswith("$'") or shlex.split(word) == [name]


def commands_in(report: model.Report) -> dict[str, str]:
    """Return the options of each of a report's commands, as they are written."""
    words = (command.text.split(maxsplit=3) for command in report.commands)
    return {name: " ".join(options) for _, name, _, *options in words}


@pytest.mark.parametrize(
    ("words", "search"),
    [
        (["--repeat", "2"], ""),
        (["--random", "3"], "--random 3"),
        (["--device", "cpu:0", "--inputs", "in.npz"], "--a cpu:0 --inputs in.npz"),
        (
            ["--device", "cpu", "--xla-flag", "xla_a=True", "--disable-hlo-pass", "fusion"],
            "--a 'cpu,xla-flags=--xla_a=true --xla_disable_hlo_passes=fusion'",
        ),
        (["--b", "cpu,fast-math", "--reference", "f64"], "--a cpu,fast-math"),
        (["--a", "cpu", "--b", "interpreter"], "--a cpu --b interpreter"),
        (["--a", "cpu,fast-math", "--b", "recorded"], "--a cpu,fast-math"),
        (["--device", "metal"], ""),
    ],
)
def test_the_commands_search_what_was_replayed(recorded: Path, words: list[str], search: str):
    report = gather.of_replay(replay(recorded), words)
    replaying = " ".join(map(shown.shell_word, words))
    assert commands_in(report) == {
        "replay": replaying,
        "inspect": "",
        "localize": search,
        "minify": search,
    }


def test_the_commands_search_again_what_was_searched(recorded: Path):
    found = sample_report().localization
    assert found is not None
    inputs = ["--random", "3"]
    sides = dataclasses.replace(found, suspect="cpu", reference="f64", instructions=())
    report = gather.of_localization(load(recorded), sides, Path(), inputs)
    both = "--a cpu --b f64 --random 3"
    assert commands_in(report) == {
        "replay": both,
        "inspect": "",
        "localize": both,
        "minify": both,
    }
    files = dataclasses.replace(sides, suspect="cpu of a.snap", reference="cpu of b.snap")
    words = ["--against", "old/b.snap", "--budget", "9", *inputs]
    report = gather.of_localization(load(recorded), files, Path(), words)
    assert commands_in(report) == {
        "replay": "--random 3",
        "inspect": "",
        "localize": "--against old/b.snap --random 3",
        "minify": "--against old/b.snap --random 3",
    }


def test_source_lines_come_from_python_files_below_the_folder_alone(tmp_path: Path):
    work = tmp_path / "work"
    work.mkdir()
    (work / "model.py").write_text("\n".join(f"line {n}" for n in range(1, 21)))
    (work / "notes.txt").write_text("secret")
    (tmp_path / "outside.py").write_text("secret")
    (work / "link.py").symlink_to(tmp_path / "outside.py")
    asked = [
        f"{work}/model.py:10 (f)",
        "model.py:12 (g)",
        "model.py:999 (g)",
        "notes.txt:1",
        "../outside.py:1",
        "link.py:1",
        "/etc/passwd:1",
        "\x00.py:1",
        "model.py:٣",
        "nothing",
    ]
    (found,) = source_excerpts([asked[0], *asked[2:]], work)
    assert found.lines == tuple(f"line {n}" for n in range(7, 14))
    assert (found.first_line, found.marked) == (7, (10,))
    (both,) = source_excerpts([asked[1], "model.py:13 (h)"], work)
    assert both.marked == (12, 13)


def test_a_report_without_anything_but_a_verdict_is_shown_too():
    bare = dataclasses.replace(sample_report(), comparison=None, grids=(), localization=None)
    assert list(text.lines(bare))[-1].startswith("MISMATCH")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("replay-1", ["MISMATCH", "FAILED"]),
        ("verdict-1", ["WITHIN ROUNDING"]),
        ("report-1", ["MATCH"]),
    ],
)
def test_what_earlier_versions_printed_is_read(name: str, words: list[str]):
    file = SAVED / f"{name}.json"
    reports = saved.read(json.loads(file.read_text()), file.name)
    assert [report.headline.word for report in reports] == words
    first = reports[0]
    assert first.comparison is not None
    assert first.device.startswith("cpu:0")
    assert min(first.seconds) > 0
    assert {fact.name for fact in first.environment} >= {"jax", "jaxlib"}
    assert list(text.lines(first))[-1].startswith(words[0])
    assert model.from_json(json.loads(json.dumps(model.to_json(first)))) == first


def test_results_that_were_saved_under_british_names_are_read():
    report = sample_report()
    assert report.localization is not None
    old = json.loads(
        json.dumps(model.to_json(report))
        .replace('"localization"', '"localisation"')
        .replace('"neighborhood"', '"neighbourhood"')
        .replace("snaprt.localize", "snaprt.localise")
    )
    assert "localisation" in old
    reports = {"schema": model.SCHEMA, "version": 1, "reports": [old]}
    assert model.to_json(*saved.read(reports, "old.json")) == model.to_json(report)
    assert saved.read(old["localisation"], "old.json")[0].localization == report.localization


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ((), 5),
        (("judgement",), {}),
        (("judgement",), {"reference": 1, "amplification": None}),
        (("judgement",), {"reference": "f64", "amplification": "much"}),
        (("grids", 0, "errors", 0), "NaN"),
        (("grids", 0, "errors", 0), -1.0),
        (("grids", 0, "specials", 0), 2**70),
    ],
)
def test_an_edited_report_is_an_error_and_no_crash(where: tuple[str | int, ...], value: object):
    plain: Any = json.loads(json.dumps([model.to_json(sample_report())]))
    *path, last = (0, *where)
    place = plain
    for step in path:
        place = place[step]
    place[last] = value
    with pytest.raises(UsageError, match="cannot read"):
        saved.read({"schema": "snaprt.report", "version": 1, "reports": plain}, "edited.json")


def test_a_report_from_elsewhere_does_not_command_a_terminal():
    report = sample_report()
    assert report.comparison is not None
    output = dataclasses.replace(report.comparison.outputs[0], dtype="\x1b[2J")
    hostile = dataclasses.replace(
        report,
        format="\x1b[2J",
        headline=dataclasses.replace(report.headline, word="\x1b[2J"),
        sides=(model.TrialSide("\x1b[2J", "cpu", "ok", "\x1b[2J"),),
        comparison=dataclasses.replace(report.comparison, outputs=(output,)),
    )
    assert "\x1b" not in "\n".join(text.lines(hostile))
    assert "\x1b" not in shown.array_type(output.dtype, output.shape)
