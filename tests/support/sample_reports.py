"""Reports with everything in them, made without running a program, some with hostile names."""

from __future__ import annotations

import dataclasses

import numpy as np
from snaprt_replay.compare.compare import compare
from snaprt_replay.load.case import NamedArray
from snaprt_replay.localize.findings import (
    InstructionPlace,
    Localization,
    PassEffect,
    RegionError,
    ValueDifference,
)
from snaprt_replay.report.grid import error_grid
from snaprt_replay.report.model import (
    Command,
    Fact,
    GraphNode,
    Headline,
    Neighborhood,
    Report,
    RunRecord,
    SourceExcerpt,
    TrialSide,
)

#: Each breaks out of something: an element, an attribute, a script, a template, a line, a terminal.
HOSTILE = (
    "</script><script>document.title='owned'</script>",
    '"><img src=x onerror="document.title=\'owned\'">',
    "'onmouseover='document.title=1' x='",
    "</style></svg></title><h1>owned</h1>",
    "{{ 7 * 191 }}{% raw %}{{ x.__class__ }}",
    "\x1b[31mred\x07\x00\r\n\x85\u2028next",
    "\u202egnp.exe\u2066\u200b\ufeff",
    "\ud800 lone",
    "]]><!--",
    "n" * 100_000,
)


def sample_report(name: str = "loss") -> Report:
    """Return a report of a mismatch; ``name`` stands wherever a file can bring a name."""
    rng = np.random.default_rng(0)
    expected = rng.normal(size=(40, 70)).astype(np.float32)
    actual = expected.copy()
    actual[3:9, 20] += np.float32(0.5)
    actual[30, 60:] = np.nan
    actual[31, 0] = np.inf
    sides = [
        [NamedArray(f"same {name}", expected), NamedArray(name, expected)],
        [NamedArray(f"same {name}", expected), NamedArray(name, actual)],
    ]
    comparison = compare(*sides, expected_name=name, actual_name="replayed")
    grids = tuple(error_grid(one.value, two.value) for one, two in zip(*sides, strict=True))
    source = f"{name}.py:12 ({name})"
    place = InstructionPlace(
        name, "dot", "f32[40,70]", (f"{name} f32[4]",), f"jit/{name}", source, (name,), (name,)
    )
    region = RegionError(place, place, 3, 0, 250.0, 0.0, 300.0, chosen=True)
    found = Localization(
        "instruction",
        f"{name} goes wrong",
        name,
        "f64",
        (place,),
        (ValueDifference(name, float("inf"), name),),
        (),
        (region, dataclasses.replace(region, made=float("inf"), depth=1, instructions=1)),
        (1.0, 2.0),
        (0.5, 0.25),
        (PassEffect(name, 0.5), PassEffect("b", 1.0, name)),
        notes=(name,),
    )
    nodes = (
        GraphNode("x", "parameter", "f32[4]", "", 0),
        GraphNode(name, name, name, source, 1, at_fault=True),
        GraphNode("after", "add", "f32[4]", "", 2),
    )
    return Report(
        path=f"dump/{name}.snap",
        headline=Headline("bad", "MISMATCH", f"1 of 2 outputs differ: {name}"),
        format="snaprt snapshot",
        module=name,
        runs={"replay": RunRecord(name, name, 0.5, (0.01,))},
        environment=(Fact(name, name, "1"), Fact("python", "3.11", "3.12"), Fact("jax", "1", "1")),
        warnings=(name,),
        notes=(name,),
        sides=(
            TrialSide("A", name, "ok", "within rounding", 0.5),
            TrialSide("B", name, "bad", "wrong", 9.0),
        ),
        comparison=comparison,
        grids=grids,
        localization=found,
        neighborhood=Neighborhood(nodes, ((0, 1), (1, 2), (0, 2)), 3),
        sources=(SourceExcerpt(source, 11, (12, 13), ("before", name, "after")),),
        commands=(Command("Replay it again", f"snaprt replay {name}"),),
    )
