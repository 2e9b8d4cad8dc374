"""Leave out compiler options and other additions of a variant."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from snaprt_replay.load.case import CompilerOption
from snaprt_replay.minify.candidate import Candidate, changed
from snaprt_replay.minify.cutting import Base
from snaprt_replay.run.variants.variants import Variant

_NAME = "flags"


def candidates(base: Base, grain: int) -> Iterator[Candidate]:
    """Yield the program without one of its options, on one side or the other."""
    variants = base.candidate.variants
    for side, variant in enumerate(variants):
        for less, what in _less(variant):
            now = [less if index == side else one for index, one in enumerate(variants)]
            yield changed(base.candidate, _NAME, f"side {'AB'[side]} without {what}", variants=now)


def _less(variant: Variant) -> Iterator[tuple[Variant, str]]:
    for option in variant.options:
        left = tuple(one for one in variant.options if one != option)
        yield with_text(dataclasses.replace(variant, options=left)), flag_text(*option)
    if variant.matmul_precision is not None:
        what = f"matmul-precision={variant.matmul_precision}"
        yield with_text(dataclasses.replace(variant, matmul_precision=None)), what


def flag_text(name: str, value: CompilerOption) -> str:
    """Return an option as XLA_FLAGS have it."""
    return f"--{name}={str(value).lower() if isinstance(value, bool) else value}"


def with_text(variant: Variant) -> Variant:
    """Return a variant whose text says all that it is, so that a user can write it again."""
    named = {"tpu-precision": f"tpu-precision={variant.precision}"}
    first = named.get(variant.kind, variant.kind)
    if variant.kind == "device":
        first = variant.device or "default"
    parts = [first]
    if variant.options:
        parts.append("xla-flags=" + " ".join(flag_text(*one) for one in variant.options))
    if variant.matmul_precision is not None:
        parts.append(f"matmul-precision={variant.matmul_precision}")
    if variant.python is not None:
        parts.append(f"python={variant.python}")
    return dataclasses.replace(variant, text=",".join(parts))
