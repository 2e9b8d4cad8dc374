"""Say in a bug report what a minified program shows; it must not know how it was found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from snaprt import jaxapi
from snaprt_replay.load.case import Case
from snaprt_replay.minify.candidate import Candidate
from snaprt_replay.minify.checks import Check
from snaprt_replay.minify.work import Shrunk

_LONGEST_MODULE: Final = 20_000  # characters: a reader of an issue looks at no more

_TITLES: Final[Mapping[str, str]] = {
    "mismatch": "XLA: wrong values from {opcodes}",
    "nan": "XLA: {failure} from {opcodes} on inputs without one",
    "crash": "XLA: {failure} on {opcodes}",
    "slow-compile": "XLA: {failure} for {opcodes}",
    "command": "XLA: {opcodes}: {failure}",
}


def issue(
    case: Case, shrunk: Shrunk, check: Check, surrounding: Mapping[str, Any], fails: bool | None
) -> str:
    """Return the text of a bug report, in Markdown."""
    candidate = shrunk.candidate
    failure = str(shrunk.signature)
    opcodes = ", ".join(f"`{one}`" for one in opcodes_of(candidate)[:4])
    title = _TITLES[check.name].format(opcodes=opcodes or "a program", failure=failure)
    sides = [str(one) for one in surrounding["sides"]]
    other = "the program below on " if len(candidate.modules) > 1 else ""
    against = f", compared with {other}`{sides[1]}`" if len(sides) > 1 else ""
    parts = [
        f"# {title}",
        f"A program of {_count(candidate.instructions)} fails on `{sides[0]}`{against}: {failure}.",
        _how_to_see(fails),
        "## The program",
        _fenced(_text(candidate, 0)),
        _against(candidate),
        "## What it is like",
        _neighbor(shrunk),
        f"It was made smaller from `{Path(case.path).name}` with "
        f"{_count(shrunk.original.instructions)}, where the failure was: {shrunk.first}.",
        "## Versions and flags",
        _fenced("\n".join(f"{name}: {value}" for name, value in _versions(surrounding))),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def opcodes_of(candidate: Candidate) -> list[str]:
    """Return the operations of a program's entry, none twice."""
    silent = ("parameter", "constant", "tuple", "get-tuple-element")
    entry = candidate.modules[0].computations[-1]
    return list(dict.fromkeys(one.opcode for one in entry.instructions if one.opcode not in silent))


def _count(instructions: int) -> str:
    return f"{instructions:,} instruction{'' if instructions == 1 else 's'}"


def _how_to_see(fails: bool | None) -> str:
    if fails:
        return "`python repro.py`, attached, fails with an AssertionError; it needs jax and numpy."
    if fails is None:
        return "`python repro.py`, attached, runs it; it needs jax and numpy."
    return (
        "`python repro.py`, attached, runs it on jax and numpy alone. It did not fail where this "
        "was written: the failure needs what the snapshot's variant sets up."
    )


def _against(candidate: Candidate) -> str:
    if len(candidate.modules) < 2:
        return ""
    return "The program that it is compared with:\n\n" + _fenced(_text(candidate, 1))


def _text(candidate: Candidate, side: int) -> str:
    hlo = candidate.content(side)
    return jaxapi.stablehlo_text(jaxapi.parse_module(jaxapi.hlo_to_stablehlo(hlo)))


def _neighbor(shrunk: Shrunk) -> str:
    if shrunk.neighbor is None:
        return ""
    return f"It passes with one thing changed: {shrunk.neighbor.change}."


def _versions(surrounding: Mapping[str, Any]) -> list[tuple[str, Any]]:
    flags = [("XLA_FLAGS", surrounding["xla_flags"])] if surrounding["xla_flags"] else []
    recorded = [
        (f"recorded with {name}", value) for name, value in surrounding["recorded"].items() if value
    ]
    return [*surrounding["versions"].items(), *flags, *recorded]


def _fenced(text: str) -> str:
    text = text.strip()
    if len(text) > _LONGEST_MODULE:
        text = text[:_LONGEST_MODULE] + "\n... (the rest is in the attached file)"
    fence = "```"
    while fence in text:  # names inside a file are not to be trusted
        fence += "`"
    return f"{fence}\n{text}\n{fence}"
