"""Use the ordinary types, float32 and int32, in place of others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from snaprt.hlo.literals import ELEMENT_TYPES, array_to_literal, literal_to_array
from snaprt.hlo.proto import XlaMessage
from snaprt_replay.hlo.hlo_module import instructions
from snaprt_replay.minify.candidate import Candidate, changed, copy_module
from snaprt_replay.minify.cutting import Base

_NAME = "dtypes"
_NUMBERS: Final = {row.name: row.number for row in ELEMENT_TYPES.values()}
_TO: Final = {
    **dict.fromkeys(("f16", "bf16", "f64"), "f32"),
    **dict.fromkeys(("s8", "s16", "s64"), "s32"),
    **dict.fromkeys(("u8", "u16", "u64"), "u32"),
    "c128": "c64",
}


def candidates(base: Base, grain: int) -> Iterator[Candidate]:
    """Yield the program with one of its types replaced everywhere."""
    if base.candidate.expected is not None:
        return
    used = {
        leaf.element_type
        for module in base.candidate.modules
        for one in instructions(module)
        for leaf in _arrays(one.shape)
    }
    for name, simpler in _TO.items():
        if _NUMBERS[name] in used:
            modules = [_replaced(one, name, simpler) for one in base.candidate.modules]
            before, now = (ELEMENT_TYPES[_NUMBERS[one]].dtype for one in (name, simpler))
            inputs = [
                one.astype(now) if one.dtype == before else one for one in base.candidate.inputs
            ]
            what = f"{simpler} in place of {name}"
            yield changed(base.candidate, _NAME, what, modules=modules, inputs=inputs)


def _replaced(module: XlaMessage, name: str, simpler: str) -> XlaMessage:
    copy = copy_module(module)
    before, now = _NUMBERS[name], _NUMBERS[simpler]
    for one in instructions(copy):
        _replace_in(one.shape, before, now)
        if one.HasField("literal") and one.literal.shape.element_type == before:
            array = literal_to_array(one.literal)
            one.literal.CopyFrom(array_to_literal(array.astype(ELEMENT_TYPES[now].dtype)))
    signatures = [one.program_shape for one in copy.computations]
    for signature in (*signatures, copy.host_program_shape):
        for shape in (*signature.parameters, signature.result):
            _replace_in(shape, before, now)
    return copy


def _replace_in(shape: XlaMessage, before: int, now: int) -> None:
    for leaf in _arrays(shape):
        if leaf.element_type == before:
            leaf.element_type = now


def _arrays(shape: XlaMessage) -> Iterator[XlaMessage]:
    if shape.tuple_shapes:
        for one in shape.tuple_shapes:
            yield from _arrays(one)
    else:
        yield shape
