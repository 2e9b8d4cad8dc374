"""Notes that are whole and valid JSON, and do not fit, are forgotten and written anew."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from programs import run_program
from snaprt_cache import Cache

LAZY = """
import jax.numpy as jnp
import snaprt

with snaprt.lazy():
    for size in range(1, 25):
        x = jnp.arange(size) + 0
        snaprt.mark_step()
        x = x * 2 + size
        snaprt.mark_step()
        print(x.sum())
print(snaprt.metrics.counter_value("LoweringSkipped") or 0)
"""
JITTED = """
import time

import jax
import numpy as np
import snaprt

snaprt.cache.install()


def product(x, y):
    time.sleep(0.03)  # a call that takes less is not worth it
    return (x @ x * y).sum()


for size in range(1, 25):
    x = jax.device_put(np.ones((size, size), np.float32))
    print(jax.jit(product)(x, 2.0))
used = snaprt.metrics.counter_value("SpeculationUsed") or 0
print(used + (snaprt.metrics.counter_value("SpeculationUnused") or 0))
"""
WRONG = (None, -1, 10**9, 1e999, 1.5, "text", True, [], [[0]], {}, [7, -3, "x"], {"a": 1}, [64])


def _mutated(content: Any, chosen: random.Random) -> Any:
    """Return the content with another thing in the place of a part of it."""
    content = json.loads(json.dumps(content))
    part = content
    while True:
        place = chosen.choice(list(part) if isinstance(part, dict) else range(len(part)))
        if not isinstance(part[place], dict | list) or not part[place] or chosen.random() < 0.5:
            part[place] = chosen.choice([one for one in WRONG if one != part[place]])
            return content
        part = part[place]


def _run(folder: Path, script: str) -> tuple[list[str], int]:
    (folder / "program.py").write_text(script)
    *printed, count = run_program(
        folder / "program.py", SNAPRT_CACHE_DIR=folder / "cache", SNAPRT_SPECULATE=1
    ).stdout.splitlines()
    return printed, int(count)


def test_notes_that_do_not_fit_are_forgotten_and_written_anew(tmp_path: Path) -> None:
    expected, skipped = _run(tmp_path, LAZY)
    assert skipped == 0
    skipped = _run(tmp_path, LAZY)[1]
    assert skipped >= 24
    chosen = random.Random(0)
    cache = Cache.open(tmp_path / "cache")
    notes = [row.key for row in cache.entries() if row.kind == "note"]
    for key in cache.keys(notes).values():
        entry = cache.get(key)
        assert entry is not None
        mutated = _mutated(json.loads(entry.payload), chosen)
        cache.put(key, json.dumps(mutated).encode(), entry.metadata)
    cache.close()
    assert _run(tmp_path, LAZY)[0] == expected
    assert _run(tmp_path, LAZY) == (expected, skipped)


def test_first_calls_that_do_not_fit_are_forgotten_and_written_anew(tmp_path: Path) -> None:
    expected, _ = _run(tmp_path, JITTED)
    _, ahead = _run(tmp_path, JITTED)
    assert ahead == 24
    chosen = random.Random(0)
    cache = Cache.open(tmp_path / "cache")
    lists = cache.keys([row.key for row in cache.entries()]).values()
    entries = [(key, cache.get(key)) for key in lists]
    (key, entry), *others = [
        (k, e) for k, e in entries if e is not None and e.metadata["name"] == "first calls"
    ]
    assert not others
    calls = json.loads(entry.payload)
    mutated = {name: _mutated(call, chosen) for name, call in calls.items()}
    donating = {name: [*call[:2], [64, "x"], *call[3:]] for name, call in calls.items()}
    for content in (mutated, donating):
        cache.put(key, json.dumps(content).encode(), entry.metadata)
        assert _run(tmp_path, JITTED)[0] == expected
        assert _run(tmp_path, JITTED) == (expected, ahead)
