"""The schema that is shipped, and what the documentation says can be asked of it."""

from __future__ import annotations

import re
import sqlite3
from importlib import resources
from pathlib import Path

import pytest
import sqlite_utils
from snaprt_cache import Cache, Key, KeyPart
from snaprt_cache.index import SCHEMA_VERSION

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "cache-format.md"


def _schema() -> str:
    return resources.files("snaprt_cache").joinpath("schema.sql").read_text(encoding="utf-8")


def test_the_schema_is_shipped_and_has_a_line_of_history_for_each_version() -> None:
    history = re.findall(r"^--   (\d+)  ", _schema(), re.MULTILINE)
    assert history == [str(number) for number in range(1, SCHEMA_VERSION + 1)]


def test_every_column_of_the_entries_is_a_field_of_a_row(tmp_path: Path) -> None:
    from dataclasses import fields

    from snaprt_cache import EntryRow

    connection = sqlite3.connect(":memory:")
    connection.executescript(_schema())
    columns = [row[1] for row in connection.execute("PRAGMA table_info(entries)")]
    assert [*columns, "pinned"] == [field.name for field in fields(EntryRow)]


@pytest.mark.parametrize(
    "query", re.findall(r'--table "\s*(SELECT[^"]*)"', DOCUMENT.read_text(encoding="utf-8"))
)
def test_the_documented_queries_run_and_answer(tmp_path: Path, query: str) -> None:
    cache = Cache.open(tmp_path / "cache")
    for flags in ("", "--xla_a=1"):
        key = Key((KeyPart("module", "m"), KeyPart("flags", flags)))
        cache.put(key, b"payload", {"name": "train_step", "platform": "cpu"})
    rows = list(sqlite_utils.Database(cache.index_path).query(query))
    assert len(rows) == 1
