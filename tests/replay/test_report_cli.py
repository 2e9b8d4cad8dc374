"""``snaprt report``, and the pages and JUnit files of ``snaprt replay``."""

import dataclasses
import datetime
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from sample_reports import HOSTILE, sample_report
from snaprt_replay.localize import findings
from snaprt_replay.report import model, model_explorer, text
from snaprt_replay.report.model import Headline, Report

from snaprt import record
from snaprt.cli.replay import formats
from snaprt.snapshot.recorder.record import process_recorder

Run = Callable[..., tuple[int, str, str]]
WHEN = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


# --- from a file ---


def test_a_page_of_a_mismatch_says_what_and_where_it_starts(
    snaprt: Run, spoiled: Path, tmp_path: Path
) -> None:
    page, saved, folder = tmp_path / "page.html", tmp_path / "saved.json", tmp_path / "explorer"
    status, out, err = snaprt(
        "report", spoiled, "--html", page, "--save", saved, "--model-explorer", folder
    )
    assert status == 1
    assert "MISMATCH: 1 of 3 outputs differ" in out
    assert f"wrote {page}" in err
    text = page.read_text()
    assert "Where it starts" in text  # the sides agree with each other: recorded is what is off
    assert "agree within tolerance" in text
    assert json.loads((folder / model_explorer.GRAPHS).read_text())["graphs"]
    again, out_again, _ = snaprt("report", saved)
    assert (again, out_again) == (status, out)


def test_a_match_is_not_localized(snaprt: Run, recorded: Path) -> None:
    status, out, err = snaprt("report", recorded)
    assert status == 0
    assert out.rstrip().endswith("MATCH: all 3 outputs are identical, bit for bit")
    assert "regions" not in err


def test_a_nan_that_is_replayed_as_it_was_recorded_is_a_finding(
    snaprt: Run, tmp_path: Path
) -> None:
    with record(folder=tmp_path / "dump"):
        jax.jit(lambda x: jnp.log(x - 1) * 2)(jnp.zeros(4))
    assert process_recorder().flush(30)
    (file,) = (tmp_path / "dump").glob("*.inputs.snap")
    status, out, _ = snaprt("report", file, "--html", tmp_path / "page.html")
    assert status == 1
    assert "FOUND: log" in out.splitlines()[-1]
    assert f"snaprt minify {file} --a cpu --check nan" in (tmp_path / "page.html").read_text()
    (file.parent / "again.inputs.snap").write_bytes(file.read_bytes())
    outputs = file.name.replace(".inputs.", ".outputs.")
    (file.parent / "again.outputs.snap").write_bytes((file.parent / outputs).read_bytes())
    for files in ([file.parent], [file, file.parent / "again.inputs.snap"]):
        status, out, _ = snaprt("replay", *files)
        assert status == 0
        told = "4 of 4 elements of result are NaN or infinite on both sides"
        assert " ".join(out.split()).count(told) >= 2  # a line of each in the sum


@pytest.mark.parametrize("options", [[], ["--a", "recorded", "--b", "cpu"]])
def test_what_replay_printed_as_json_is_reported_without_running_anything(
    options: list[str], snaprt: Run, spoiled: Path, tmp_path: Path
) -> None:
    status, out, _ = snaprt("replay", spoiled, *options, "--json")
    saved = tmp_path / "result.json"
    saved.write_text(out)
    page = tmp_path / "page.md"
    shown, text, _ = snaprt("report", saved, "--html", page)
    assert shown == status
    assert text.strip()
    assert page.read_text().startswith("<!doctype html>")


def test_what_localize_printed_as_json_is_reported_alone_or_with_a_replay(
    snaprt: Run, tmp_path: Path
) -> None:
    found, saved = tmp_path / "found.json", tmp_path / "saved.json"
    report = sample_report()
    found.write_text(json.dumps(findings.to_json(report.localization)))
    status, out, _ = snaprt("report", found)
    assert status == 1
    assert out.rstrip().endswith("FOUND: loss goes wrong")
    formats.save([dataclasses.replace(report, localization=None)], saved)
    status, out, _ = snaprt("report", saved, "--localized", found)
    assert "starts: loss goes wrong" in out
    assert out.rstrip().endswith("MISMATCH: 1 of 2 outputs differ: loss")


@pytest.mark.parametrize(
    ("command", "option", "verdict"),
    [
        ("replay", "--html", "MATCH"),
        ("report", "--save", "MATCH"),
        ("report", "--model-explorer", "MATCH"),
        ("localize", "--html", "NOTHING FOUND"),
    ],
)
def test_what_was_found_is_printed_though_its_file_cannot_be_written(
    snaprt: Run, recorded: Path, tmp_path: Path, command: str, option: str, verdict: str
) -> None:
    page = tmp_path / "page.md"
    files = ("--junit", "/dev/full", "--markdown", page, option, "/dev/full")
    status, out, err = snaprt(command, recorded, *files)
    assert status == 2
    assert out.rstrip().splitlines()[-1].startswith(verdict)
    assert "cannot write /dev/full: No space left on device" in err
    reason = "into /dev/full: File exists" if "explorer" in option else "/dev/full: No space left"
    assert f"cannot write {reason}" in err.split("error:")[-1]
    assert page.exists()


def test_what_is_no_result_is_refused(snaprt: Run, tmp_path: Path) -> None:
    damaged = ['{"schema": "another"}', "{", "[]", '{"schema": "snaprt.replay"}']
    for number, content in enumerate(damaged):
        path = tmp_path / f"{number}.json"
        path.write_text(content)
        status, _, err = snaprt("report", path)
        assert status == 2
        assert err.startswith("error:")
    status, _, err = snaprt("report", tmp_path / "gone.json")
    assert status == 2
    assert "gone.json" in err


def test_a_file_that_cannot_be_replayed_has_a_report_too(snaprt: Run, tmp_path: Path) -> None:
    path = tmp_path / "noise.snap"
    path.write_bytes(bytes(range(256)))
    status, out, err = snaprt("report", path, "--html", tmp_path / "page.html")
    assert (status, out) == (2, "")
    assert f"error: {path} is not a file that snaprt can replay" in err
    assert "FAILED" in (tmp_path / "page.html").read_text()


# --- many files ---


@pytest.fixture(scope="module")
def folder(recorded: Path, xla_snapshot: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a match of snaprt's, one of XLA's and a damaged file."""
    made = tmp_path_factory.mktemp("many")
    (made / "below").mkdir()
    for path in (recorded, recorded.with_name(recorded.name.replace(".inputs.", ".outputs."))):
        (made / "below" / path.name).write_bytes(path.read_bytes())
    (made / xla_snapshot.name).write_bytes(xla_snapshot.read_bytes())
    (made / "broken.inputs.snap").write_bytes(recorded.read_bytes()[:-100])
    return made


def test_a_folder_is_replayed_and_summed_up(snaprt: Run, folder: Path, tmp_path: Path) -> None:
    xml, page = tmp_path / "junit.xml", tmp_path / "page.html"
    status, out, err = snaprt("replay", folder, "-j", "2", "--junit", xml, "--html", page)
    assert status == 2
    assert "3 files: 1 FAILED, 2 MATCH" in out
    assert "[3/3]" in err
    suite = ElementTree.parse(xml).getroot()[0]
    counted = [suite.get(name) for name in ("tests", "failures", "errors", "skipped")]
    assert counted == ["3", "0", "1", "0"]
    (failed,) = suite.iter("error")
    assert "broken" in str(failed.text)
    assert page.read_text().count("<article") == 3


def test_a_folder_without_recorded_executions_is_misuse(snaprt: Run, tmp_path: Path) -> None:
    status, _, err = snaprt("replay", tmp_path)
    assert status == 2
    assert "contains no recorded executions" in err


@pytest.mark.parametrize(
    "words",
    [
        ["--cluster", "x", "--save", "a.npz"],
        ["--save", "a.npz", "--a", "cpu"],
        ["-j", "1", "--cluster", "x"],
    ],
)
def test_options_that_do_not_go_together_are_misuse(
    words: list[str], snaprt: Run, recorded: Path
) -> None:
    status, _, err = snaprt("replay", recorded, *words)
    assert status == 2
    assert "cannot be combined with" in err


# --- JUnit ---

#: What a reader of junit-10.xsd takes: the attributes and children of each element.
SCHEMA = {
    "testsuites": ({"name", "time", "tests", "failures", "errors", "skipped"}, {"testsuite"}),
    "testsuite": (
        {"name", "tests", "failures", "errors", "skipped", "time", "timestamp"},
        {"testcase"},
    ),
    "testcase": (
        {"name", "classname", "time"},
        {"failure", "error", "skipped", "system-out"},
    ),
    "failure": ({"message", "type"}, set()),
    "error": ({"message", "type"}, set()),
    "skipped": ({"message"}, set()),
    "system-out": (set(), set()),
}


def test_junit_xml_follows_the_schema_whatever_names_there_are() -> None:
    reports = [
        *map(sample_report, HOSTILE),
        Report("a/b.snap", Headline("ok", "MATCH", "identical")),
        Report("a/c.snap", Headline("failed", "FAILED", "no\x00such ]]> file")),
        Report("a/d.snap", Headline("caution", "NOTHING TO COMPARE WITH", "nothing")),
    ]
    root = ElementTree.fromstring(text.junit_xml(reports, WHEN))
    for element in root.iter():
        attributes, children = SCHEMA[element.tag]
        assert set(element.keys()) == attributes
        assert {child.tag for child in element} <= children
    (suite,) = root
    assert suite.get("timestamp") == "2026-01-02T03:04:05"
    kinds = [case[0].tag for case in suite]
    assert kinds == ["failure"] * len(HOSTILE) + ["system-out", "error", "skipped"]
    counted = {kind: int(suite.attrib[f"{kind}s"]) for kind in ("failure", "error")}
    assert counted == {"failure": len(HOSTILE), "error": 1}


def test_the_saved_form_of_a_report_has_a_schema_with_a_version(
    snaprt: Run, recorded: Path
) -> None:
    _, out, _ = snaprt("report", recorded, "--json")
    said = json.loads(out)
    assert (said["schema"], said["version"]) == (model.SCHEMA, model.SCHEMA_VERSION)
    assert model.from_json(said["reports"][0]).headline.word == "MATCH"
