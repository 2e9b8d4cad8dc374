"""How the differences of two keys are told, which entry is nearest, and the record of misses."""

from __future__ import annotations

from pathlib import Path

import pytest
from snaprt_cache import Cache, Key, KeyPart
from snaprt_cache.reports import KEPT_MISSES
from snaprt_cache.why import explain, nearest, reason


def _key(**parts: str) -> Key:
    return Key(tuple(KeyPart(name, value) for name, value in parts.items()))


def _words(part: str, before: str, after: str) -> tuple[str, ...]:
    (difference,) = explain(_key(**{part: before}), _key(**{part: after}))
    return difference.words


def test_flags_are_told_as_sets() -> None:
    before = "--xla_a=1 --xla_b=2 --xla_c"
    after = "--xla_b=3 --xla_c --xla_d='x y'"
    assert _words("flags", before, after) == (
        "added --xla_d=x y",
        "removed --xla_a=1",
        "changed --xla_b: 2 -> 3",
    )
    assert _words("flags", "--a=1 --b", "--b --a=1") == ("the same, in a different order",)


@pytest.mark.parametrize(
    ("part", "before", "after", "words"),
    [
        ("jaxlib", "0.10.2", "0.12.0", "0.10.2 -> 0.12.0"),
        ("settings", "jax_a=1 jax_b=2", "jax_a=1 jax_b=3", "changed jax_b: 2 -> 3"),
        ("topology", "devices=0 of 1", "devices=0,1 of 2", "changed devices: 0 -> 0,1"),
        ("topology", "0" * 64, "1" * 64, "000000000000 -> 111111111111"),
        ("module", "a" * 64, "b" * 64, "another program: aaaaaaaaaaaa -> bbbbbbbbbbbb"),
        ("binary x.so", "a" * 64, "b" * 64, "the contents of the file differ"),
        ("cpu_features", "x86_64-1", "arm-2", "different CPU features"),
    ],
)
def test_a_part_is_told_after_its_kind(part: str, before: str, after: str, words: str) -> None:
    assert any(line.startswith(words) for line in _words(part, before, after))


def test_parts_that_only_one_key_has_and_parts_of_one_name_are_told_apart() -> None:
    before = Key((KeyPart("plugin", "1"), KeyPart("plugin", "2"), KeyPart("old", "x")))
    after = Key((KeyPart("plugin", "1"), KeyPart("plugin", "3"), KeyPart("new", "y")))
    assert {one.part: (one.before, one.after) for one in explain(before, after)} == {
        "plugin (2)": ("2", "3"),
        "new": (None, "y"),
        "old": ("x", None),
    }
    assert explain(before, before) == []


def test_the_nearest_has_the_same_module_then_the_same_name_then_most_equal_parts() -> None:
    wanted = _key(module="m", kind="compiled", flags="f", jax="1")
    module = ("module", _key(module="m", kind="compiled", flags="g", jax="2"), "other")
    name = ("name", _key(module="n", kind="compiled", flags="g", jax="2"), "step")
    parts = ("parts", _key(module="n", kind="compiled", flags="f", jax="1"), "other")
    form = ("form", _key(module="m", kind="note", flags="f", jax="1"), "step")
    assert nearest(wanted, "step", [form, parts, name, module]) == ["module"]
    assert nearest(wanted, "step", [form, parts, name]) == ["name"]
    assert nearest(wanted, "step", [form, parts]) == ["parts"]
    assert nearest(wanted, "step", [form]) == []


def test_another_compiler_is_the_reason_before_another_module_and_that_before_flags() -> None:
    before = _key(module="m", flags="f", jaxlib="1")
    assert reason(explain(before, _key(module="n", flags="g", jaxlib="2"))) == "other jaxlib"
    assert reason(explain(before, _key(module="n", flags="g", jaxlib="1"))) == (
        "changed shape or code"
    )
    assert reason(explain(before, _key(module="m", flags="g", jaxlib="1"))) == "other flags"


def test_misses_are_recorded_with_their_key_and_read_back_in_order(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path)
    cache.record_miss(_key(module="none yet"), "no folder, no record")
    assert not cache.folder.exists()
    cache.put(_key(module="a"), b"payload", {})
    for name in ("b", "c"):
        cache.record_miss(_key(module=name), name)
    assert [(miss.name, miss.key) for miss in cache.misses()] == [
        ("b", _key(module="b")),
        ("c", _key(module="c")),
    ]
    cache.clear()
    assert cache.misses() == []


def test_the_record_of_misses_stays_small_and_keeps_the_last(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path)
    cache.put(_key(module="a"), b"payload", {})
    long = "x" * 9000
    for number in range(400):
        cache.record_miss(_key(module=str(number), flags=long), "step")
    kept = cache.misses()
    assert len(kept) <= KEPT_MISSES
    assert kept[-1].key == _key(module="399", flags=long)
    assert (cache.folder / "misses.jsonl").stat().st_size < 2 << 20
    assert sorted(path.name for path in cache.folder.glob(".misses*")) == []


def test_lines_that_are_damaged_or_foreign_are_left_out(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path)
    cache.put(_key(module="a"), b"payload", {})
    cache.record_miss(_key(module="b"), "b")
    path = cache.folder / "misses.jsonl"
    path.write_bytes(
        b'\xff\x00{"version": 2}\n[1]\n{"version": 1}\n' + path.read_bytes() + b'{"ver'
    )
    assert [miss.name for miss in cache.misses()] == ["b"]


def test_a_cache_that_may_not_be_written_gets_no_record(tmp_path: Path) -> None:
    Cache.open(tmp_path).put(_key(module="a"), b"payload", {})
    cache = Cache.open(tmp_path, mode="read-only")
    cache.record_miss(_key(module="b"), "b")
    assert cache.misses() == []
