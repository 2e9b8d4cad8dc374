import re
from pathlib import Path

import jax.numpy as jnp
import pytest

import snaprt
from snaprt import autoload, settings, units
from snaprt.cli.environment import documented
from snaprt.errors import UsageError

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "environment.md"


@pytest.mark.parametrize("row", settings.SETTINGS, ids=lambda row: row.name)
def test_a_variable_that_is_not_set_or_empty_has_its_default(monkeypatch, row):
    monkeypatch.delenv(row.name, raising=False)
    assert settings.get(row.name) == row.default
    monkeypatch.setenv(row.name, " ")
    assert settings.get(row.name) == row.default


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("ON", True), ("yes", True), ("true ", True), ("0", False), ("off", False)],
)
def test_a_switch_understands_the_usual_words(monkeypatch, text, value):
    monkeypatch.setenv("SNAPRT_CACHE", text)
    assert settings.get("SNAPRT_CACHE") is value


def test_a_bad_value_is_an_error_that_names_variable_value_and_what_is_allowed(monkeypatch):
    monkeypatch.setenv("SNAPRT_LAZY", "perhaps")
    with pytest.raises(UsageError) as caught:
        settings.get("SNAPRT_LAZY")
    assert "SNAPRT_LAZY" in caught.value.message
    assert "'perhaps'" in caught.value.message
    assert "on, off" in caught.value.hint


def test_a_path_may_begin_with_the_home_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SNAPRT_CACHE_DIR", "~/cache")
    assert settings.get("SNAPRT_CACHE_DIR") == tmp_path / "cache"


def test_a_path_that_begins_with_an_unknown_users_home_is_a_name_like_others(monkeypatch):
    monkeypatch.setenv("SNAPRT_CACHE_DIR", "~nobody-of-this-name/cache")
    assert settings.get("SNAPRT_CACHE_DIR") == Path("~nobody-of-this-name/cache")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SNAPRT_SLOW_COMPILE", "1e30"),
        ("SNAPRT_CACHE_REMOTE_TIMEOUT", "1e30"),
        ("SNAPRT_WATCHDOG", "9" * 400),
    ],
)
def test_a_wait_is_no_longer_than_the_system_can_wait(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    assert settings.get(name) == units.MOST_SECONDS


@pytest.mark.parametrize(
    ("name", "text"),
    [("SNAPRT_RECORD_MAX_BYTES", "9" * 400), ("SNAPRT_CACHE_REMOTE", "http://[")],
)
def test_a_size_that_is_no_number_and_an_address_that_is_none_are_errors(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(UsageError, match=name):
        settings.get(name)


def test_a_setting_is_read_at_each_call(monkeypatch):
    monkeypatch.setenv("SNAPRT_CACHE", "off")
    assert settings.get("SNAPRT_CACHE") is False
    monkeypatch.setenv("SNAPRT_CACHE", "on")
    assert settings.get("SNAPRT_CACHE") is True


def test_a_variable_without_a_row_cannot_be_read():
    with pytest.raises(KeyError):
        settings.get("SNAPRT_UNDECLARED")


def test_the_document_is_the_one_that_the_table_gives():
    page = DOCUMENT.read_text(encoding="utf-8")
    assert documented(page) == page
    assert page.count("\n| `") == len(settings.SETTINGS)


def test_every_variable_of_ours_that_the_sources_name_has_a_row():
    root = Path(__file__).parents[2]
    named = set()
    for folder in ("snaprt", "cache", "replay"):
        for path in (root / folder).rglob("*.py"):
            named.update(re.findall(r"\bSNAPRT_[A-Z_]+\b", path.read_text(encoding="utf-8")))
    # What `snaprt launch` tells the processes that it starts is nobody's to set.
    users = {name for name in named if not name.startswith("SNAPRT_LAUNCH_")}
    assert users <= {row.name for row in settings.SETTINGS}


@pytest.mark.parametrize("row", settings.SETTINGS, ids=lambda row: row.name)
def test_every_row_is_read_by_something_beside_the_table(row):
    root = Path(__file__).parents[2]
    readers = [
        path
        for folder in ("snaprt", "cache", "replay")
        for path in (root / folder).rglob("*.py")
        if path.name != "settings.py" and row.name in path.read_text(encoding="utf-8")
    ]
    assert readers


def test_a_bad_value_that_a_compilation_meets_is_no_error_of_the_compiler(monkeypatch):
    monkeypatch.setenv("SNAPRT_CACHE_WAIT", "long")
    with snaprt.lazy():
        x = jnp.ones(17) * 2
        with pytest.raises(UsageError, match="SNAPRT_CACHE_WAIT is 'long'"):
            snaprt.mark_step()
        monkeypatch.delenv("SNAPRT_CACHE_WAIT")
        assert x.sum() == 34


def test_a_bad_value_is_told_where_jax_loads_its_plugins(monkeypatch, capsys):
    monkeypatch.setenv("SNAPRT_JAX_CACHE", "perhaps")
    autoload.initialize()
    assert "the environment variable SNAPRT_JAX_CACHE is 'perhaps'" in capsys.readouterr().err
