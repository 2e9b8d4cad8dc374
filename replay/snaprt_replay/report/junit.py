"""Write reports as JUnit XML, for CI.

The form is the one that Jenkins, GitLab and GitHub's actions read: ``testsuites``, ``testsuite``,
``testcase`` with ``failure``, ``error`` or ``skipped``. Source: the Jenkins xUnit plugin's
``junit-10.xsd``.
"""

from __future__ import annotations

import datetime
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import PurePath
from typing import Final

from snaprt import shown
from snaprt_replay.report import text
from snaprt_replay.report.model import Report

_SUITE: Final = "snaprt replay"
_KINDS: Final = ("failure", "error", "skipped")


def junit_xml(reports: Sequence[Report], when: datetime.datetime) -> bytes:
    """Return one test case for each file.

    A file where something was found is a failure, one that could not be replayed an error, and one
    with nothing to compare with is skipped.

    Args:
        reports: In any order.
        when: When they were made.
    """
    outcomes = [_outcome(report) for report in reports]
    totals = {
        "tests": str(len(reports)),
        "failures": str(outcomes.count("failure")),
        "errors": str(outcomes.count("error")),
        "skipped": str(outcomes.count("skipped")),
        "time": f"{sum(sum(report.seconds) for report in reports):.6f}",
    }
    root = ElementTree.Element("testsuites", {"name": _SUITE, **totals})
    stamp = when.replace(tzinfo=None).isoformat(timespec="seconds")
    suite = ElementTree.SubElement(
        root, "testsuite", {"name": _SUITE, "timestamp": stamp, **totals}
    )
    for report, outcome in zip(reports, outcomes, strict=True):
        _add_case(suite, report, outcome)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)


def _outcome(report: Report) -> str:
    if report.headline.status == "bad":
        return "failure"
    if report.headline.status == "failed":
        return "error"
    nothing = report.headline.status == "caution" and report.comparison is None
    return "skipped" if nothing else ""


def _add_case(suite: ElementTree.Element, report: Report, outcome: str) -> None:
    path = PurePath(report.path)
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=shown.name(str(path.parent), 400),
        name=shown.name(path.name, 400),
        time=f"{sum(report.seconds):.6f}",
    )
    told = "\n".join(text.lines(report))
    if outcome in _KINDS:
        message = shown.sentence(report.headline.sentence)
        found = ElementTree.SubElement(case, outcome, message=message)
        if outcome != "skipped":
            found.set("type", report.headline.word)
            found.text = told
            return
    ElementTree.SubElement(case, "system-out").text = told
