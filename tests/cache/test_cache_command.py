"""``snaprt cache``: what it prints, as text and as JSON, and how it leaves."""

from __future__ import annotations

import importlib
import json
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from programs import SNAPRT, run_program
from snaprt_cache import Cache, CacheError, Key, KeyPart

import snaprt.cache
from snaprt import metrics
from snaprt.cli import main
from snaprt.cli.main import CACHE_COMMANDS, cache_group


def _key(name: str) -> Key:
    return Key((KeyPart("module", name), KeyPart("flags", "--xla_a=1")))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    cache = Cache.open(tmp_path / "cache")
    for number, name in enumerate(["forward", "backward", "update"]):
        cache.put(
            _key(name),
            bytes(1000 * (number + 1)),
            {"name": name, "kind": "compiled", "platform": "cpu", "compile_seconds": 90.0},
        )
    for _ in range(3):
        cache.get(_key("backward"))
    cache.get(_key("absent"))
    return cache


def _invoke(cache: Cache, *words: str, answer: str | None = None) -> Result:
    cache.close()
    return CliRunner().invoke(cache_group, [*words, "--dir", str(cache.path)], input=answer)


def _json(cache: Cache, *words: str) -> dict:
    result = _invoke(cache, *words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_stats_count_entries_hits_and_seconds(cache: Cache) -> None:
    numbers = _json(cache, "stats")
    assert (numbers["schema"], numbers["version"]) == ("snaprt.cache.stats", 2)
    assert numbers["entries"] == 3
    assert numbers["payload_bytes"] == 6000
    assert (numbers["hits"], numbers["misses"], numbers["puts"]) == (3, 1, 3)
    assert numbers["saved_seconds"] == pytest.approx(270, abs=1)


def test_stats_of_a_directory_that_is_not_there_are_zero_and_make_nothing(tmp_path: Path) -> None:
    path = tmp_path / "absent"
    result = CliRunner().invoke(cache_group, ["stats", "--dir", str(path), "--json"])
    assert json.loads(result.stdout)["entries"] == 0
    assert not path.exists()


def test_ls_lists_the_newest_first_or_in_the_order_asked_for(cache: Cache) -> None:
    assert [row["name"] for row in _json(cache, "ls")["entries"]] == [
        "update",
        "backward",
        "forward",
    ]
    assert _json(cache, "ls", "--sort", "hits")["entries"][0]["name"] == "backward"
    assert _json(cache, "ls", "--sort", "name")["entries"][0]["name"] == "backward"


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--name", "WARD"], ["backward", "forward"]),
        (["--name", "for*"], ["forward"]),
        (["--platform", "gpu"], []),
        (["--kind", "compiled", "--sort", "saved", "--limit", "1"], ["backward"]),
        (["--kind", "other"], []),
        (["--since", "1h", "--sort", "name"], ["backward", "forward", "update"]),
        (["--since", "2999-01-01"], []),
        (["--sort", "name", "--reverse", "--limit", "2"], ["update", "forward"]),
    ],
)
def test_ls_filters_sorts_and_limits(cache: Cache, words: list[str], names: list[str]) -> None:
    assert [row["name"] for row in _json(cache, "ls", *words)["entries"]] == names


def test_ls_refuses_a_time_that_is_none(cache: Cache) -> None:
    result = _invoke(cache, "ls", "--since", "yesterday")
    assert result.exit_code == 2
    assert "neither a date" in result.output


def test_du_adds_up_to_what_the_files_take(cache: Cache) -> None:
    used = _json(cache, "du")
    files = [path for path in cache.folder.rglob("*") if path.is_file()]
    assert used["bytes"] == sum(path.stat().st_size for path in files)
    assert {place["what"] for place in used["places"]} >= {"entries cpu compiled", "index"}


def test_stats_are_told_by_program_and_by_day(cache: Cache) -> None:
    numbers = _json(cache, "stats")
    first = numbers["programs"][0]
    assert (first["name"], first["hits"], first["entries"]) == ("backward", 3, 1)
    today = time.strftime("%Y-%m-%d", time.gmtime())
    assert [day["day"] for day in numbers["days"]] == [today]
    assert (numbers["days"][0]["hits"], numbers["days"][0]["misses"]) == (3, 1)


def test_stats_fit_80_columns_and_need_no_color(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.close()
    words = (*SNAPRT, "cache", "stats", "--dir", str(cache.path))
    done = run_program(words, COLUMNS=80, PYTHONIOENCODING="ascii")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80 + len(str(cache.path))
    assert any(line.startswith("backward") and "####" in line for line in lines)
    assert "\x1b" not in done.stdout


def test_ls_prints_a_row_for_each_entry_and_the_count_beside_it(cache: Cache) -> None:
    result = _invoke(cache, "ls")
    assert result.exit_code == 0
    for name in ("forward", "backward", "update"):
        assert name in result.output
    assert "4.5 min" in result.output


def test_show_finds_an_entry_by_the_start_of_its_key_and_prints_the_parts(cache: Cache) -> None:
    digest = _key("forward").digest
    shown = _json(cache, "show", digest[:20])
    assert shown["entry"]["key"] == digest
    assert shown["key_parts"] == [
        {"name": "module", "value": "forward"},
        {"name": "flags", "value": "--xla_a=1"},
    ]
    assert shown["metadata"]["compile_seconds"] == 90.0
    assert Path(shown["path"]).is_file()
    assert "--xla_a=1" in _invoke(cache, "show", digest[:20]).output


@pytest.mark.parametrize(("prefix", "message"), [("", "3 entries"), ("xyz", "no entry")])
def test_show_refuses_a_key_that_names_no_entry_or_several(
    cache: Cache, prefix: str, message: str
) -> None:
    result = _invoke(cache, "show", prefix)
    assert isinstance(result.exception, CacheError)
    assert message in result.exception.message
    assert result.exception.hint


def test_clear_asks_first_and_does_nothing_without_a_yes(cache: Cache) -> None:
    assert _invoke(cache, "clear", answer="n\n").exit_code != 0
    assert len(cache.entries()) == 3
    assert _invoke(cache, "clear", answer="y\n").exit_code == 0
    assert cache.entries() == []


def test_clear_does_not_ask_when_told_so(cache: Cache) -> None:
    assert _json(cache, "clear", "--yes")["removed"] == 3
    assert cache.stats().hits == 0


@pytest.mark.parametrize("words", [("verify",), ("gc",), ("clear", "--yes"), ("export", "x")])
def test_upkeep_of_a_directory_that_is_not_there_is_an_error(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    path = tmp_path / "none"
    done = run_program((*SNAPRT, "cache", *words, "--dir", str(path)), folder=tmp_path, status=2)
    assert f"there is no cache directory {path}" in done.stderr
    assert not path.exists()


def test_path_prints_the_directory_and_nothing_else(cache: Cache) -> None:
    assert _invoke(cache, "path").stdout == f"{cache.path}\n"


def test_a_directory_that_others_may_write_to_is_an_error_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    done = run_program((*SNAPRT, "cache", "ls", "--dir", str(tmp_path / "cache")), status=2)
    assert done.stdout == ""
    assert "error: other users can write" in done.stderr
    assert "hint: Run: chmod -R go-w" in done.stderr


@pytest.mark.parametrize("name", CACHE_COMMANDS)
def test_every_command_of_the_table_is_there_under_its_name_with_an_example(name: str) -> None:
    module, attribute = CACHE_COMMANDS[name][0].split(":")
    one = getattr(importlib.import_module(module), attribute)
    assert one.name == name
    assert "Example:" in one.help
    # What `collect` prints to stdout is the program's that it runs.
    assert name == "collect" or any("--json" in parameter.opts for parameter in one.params)


def test_the_table_of_commands_imports_none_of_them_and_no_jax() -> None:
    assert "cache" in main.COMMANDS
    code = (
        "import sys, snaprt.cli.main; snaprt.cli.main.main(['cache', '--help']); "
        "sys.exit(any(name == 'jax' or 'cache_' in name and name.startswith('snaprt.cli')"
        " for name in sys.modules))"
    )
    done = run_program(code)
    assert all(name in done.stdout for name in CACHE_COMMANDS)


def test_snaprt_cache_open_counts_in_the_metrics_and_is_then_used_by_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_CACHE_DIR", "elsewhere")
    cache = snaprt.cache.open(tmp_path / "cache")
    assert os.environ["SNAPRT_CACHE_DIR"] == str(tmp_path / "cache")
    cache.get(_key("a"))
    cache.put(_key("a"), b"payload", {"compile_seconds": 5})
    cache.get(_key("a"))
    assert metrics.counter_value("PersistentCacheMiss") == 1
    assert metrics.counter_value("PersistentCacheHit") == 1
    saved = metrics.metric_data("PersistentCacheSavedSeconds")
    assert saved is not None
    assert saved[1] == pytest.approx(5, abs=0.5)


def test_what_is_no_directory_is_no_cache(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="not a directory"):
        CliRunner().invoke(
            cache_group, ["ls", "--dir", str(tmp_path / "file")], catch_exceptions=False
        )


def test_what_is_known_about_programs_is_not_taken_for_programs(cache: Cache) -> None:
    cache.put(_key("list"), b"list", {"name": "prefetch list", "kind": "list"})
    assert [one["name"] for one in _json(cache, "stats")["programs"]].count("prefetch list") == 0
    assert "prefetch list" not in _invoke(cache, "ls").output
    assert "prefetch list" in _invoke(cache, "ls", "--kind", "list").output
