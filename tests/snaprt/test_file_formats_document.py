"""docs/reference/file-formats.md names every format that snaprt writes, with its version."""

import ast
import re
from pathlib import Path

import pytest
import snaprt_cache.bundle
import snaprt_cache.file_digests
import snaprt_cache.frame
import snaprt_cache.index
import snaprt_cache.reports
import snaprt_replay.localize.findings
import snaprt_replay.report.model

from snaprt.cli.cache import stats
from snaprt.compile.ahead import collect
from snaprt.explain import trace_folder
from snaprt.fleet import hang
from snaprt.graph import digest
from snaprt.metrics import report as metrics_report
from snaprt.snapshot.format import schema
from snaprt.snapshot.recorder.ranks import states
from snaprt.snapshot.share import pack

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "file-formats.md").read_text(encoding="utf-8")
ROWS = [line.strip("| \n").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
SOURCES = [
    path
    for package in ("snaprt", "cache/snaprt_cache", "replay/snaprt_replay")
    for path in sorted((ROOT / package).rglob("*.py"))
]


def _schemas():
    """Return what the source names a schema: in a constant, or in a call of emit_json."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            value = None
            if isinstance(node, ast.AnnAssign | ast.Assign):
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                if isinstance(target, ast.Name) and target.id.endswith("SCHEMA"):
                    value = node.value
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("emit_json"):
                value = node.args[0]
            if isinstance(value, ast.Constant) and str(value.value).startswith("snaprt."):
                yield value.value


def test_every_schema_of_the_source_has_a_row():
    of_the_cache = re.search(r"`snaprt\.cache\.clear`, (.*?) \|", PAGE)
    assert of_the_cache is not None
    named = set(re.findall(r"`(snaprt\.[\w.-]+)`", PAGE))
    named |= {f"snaprt.cache{one}" for one in re.findall(r"`(\.\w+)`", of_the_cache[1])}
    written = set(_schemas())
    assert len(written) > 20
    assert sorted(written - named) == []


@pytest.mark.parametrize(
    ("start", "version"),
    [
        ("snapshot,", f"1.{schema.FORMAT_MINOR}; {schema.FORMAT_MAJOR}.{schema.FORMAT_MINOR} "),
        ("pack,", pack.COMMENT.decode().split()[1]),
        (
            "entry of",
            f"{snaprt_cache.frame.UNSIGNED_VERSION}, {snaprt_cache.frame.SIGNED_VERSION} ",
        ),
        ("index of", str(snaprt_cache.index.SCHEMA_VERSION)),
        (
            "reasons for",
            f"{snaprt_cache.reports.MISSES_VERSION}, {snaprt_cache.file_digests._VERSION}",
        ),
        ("identity of", str(digest.VERSION)),
        ("exported cache", str(snaprt_cache.bundle.FORMAT_VERSION)),
        ("collected", str(collect.VERSION)),
        ("metrics,", str(metrics_report.VERSION)),
        ("graphs of", str(trace_folder.VERSION)),
        ("saved results", str(snaprt_replay.report.model.SCHEMA_VERSION)),
        ("saved results", str(snaprt_replay.localize.findings.SCHEMA_VERSION)),
        ("dump of", str(hang.VERSION)),
        ("state of", str(states.VERSION)),
        ("`snaprt.cache.stats`", str(stats._VERSION)),
    ],
)
def test_a_version_is_that_of_the_source(start, version):
    (row,) = [row for row in ROWS if row[0].startswith(start)]
    assert any(cell.startswith(version) for cell in row[1:3])
