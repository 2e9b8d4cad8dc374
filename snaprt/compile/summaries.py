"""Writes a program down for `snaprt cache why`, reads that, and says how two programs differ.

A summary stands in the cache beside the executable: StableHLO as MLIR prints it, with shapes and
source lines. Reading one takes no JAX, so that a question is answered at once.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import functools
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import zstandard

_log = logging.getLogger("snaprt.compile")

#: A summary is at most so long.
LARGEST_SUMMARY: Final = 64 * 1024
# Values of constants with more elements than this are left out, and their digests stand instead.
_LARGEST_CONSTANT: Final = 16
_ATTEMPTS: Final = 8


def summarize(module: Any) -> str:
    """Return an MLIR module's operations as compressed text; empty where that cannot be done.

    The text is StableHLO as MLIR prints it, with locations, compressed with zstd, in base64. What
    is too long for ``LARGEST_SUMMARY`` loses its last operations.
    """
    from snaprt import jaxapi  # here alone: reading takes no JAX

    try:
        return _pack(jaxapi.stablehlo_with_locations(module, _LARGEST_CONSTANT))
    except Exception as error:  # nobody's program may fail for it
        _log.info("cannot summarize a program: %s", error)
        return ""


def _pack(text: str) -> str:
    packed = _compress(text)
    for _ in range(_ATTEMPTS):
        if len(packed) <= LARGEST_SUMMARY:
            return packed
        text = _shorten(text, 0.9 * LARGEST_SUMMARY / len(packed))
        packed = _compress(text)
    return ""


def _compress(text: str) -> str:
    return base64.b64encode(zstandard.compress(text.encode("utf-8", "replace"), 3)).decode("ascii")


def _shorten(text: str, share: float) -> str:
    """Return the first ``share`` of the operations and of the locations that stand below them."""
    lines = text.splitlines()
    table = [line for line in lines if line.startswith("#loc")]
    body = [line for line in lines if not line.startswith("#loc")]
    head = body[: int(len(body) * share)]
    used = {word for line in head for word in _locations(line)}
    by_name = {line.partition(" = ")[0]: line for line in table}
    # A location stands on others: all that the kept lines lead to.
    waiting = list(used)
    while waiting:
        more = _locations(by_name.get(waiting.pop(), "").partition(" = ")[2])
        waiting += [name for name in more if name not in used]
        used.update(more)
    return "\n".join([*head, "// cut", *(line for n, line in by_name.items() if n in used)])


def _locations(line: str) -> list[str]:
    return [f"#loc{rest.split(')')[0].split(' ')[0]}" for rest in line.split("#loc")[1:]]


# A summary has 64 kB; what claims to unpack to more than this is none.
_LARGEST_TEXT: Final = 1 << 26
# Longer lists of operations are compared by rarer lines alone, which is fast and nearly as good.
_CAREFULLY_COMPARED: Final = 1500

_MOST_LOCATIONS: Final = 1000
_MOST_SHOWN: Final = 3  # of each kind of difference

_VALUE: Final = re.compile(r"%[A-Za-z0-9_]+(?:#[0-9]+)?")
_RESULT: Final = re.compile(r"^((?:%[\w:]+(?:, )?)+) = ")
_LOCATION: Final = re.compile(r" loc\((#loc\d*|unknown|\"[^\"]*\"(?:\([^()]*\))?)\)")
_NAME: Final = re.compile(r'^(?:stablehlo\.|func\.)?"?([\w.]+)')
_CONSTANT: Final = re.compile(r"dense(?:_resource)?<[^>]*>")
_ELIDED: Final = "dense_resource<__elided__>"
_SHAPE: Final = re.compile(r"(?:tensor|vector)<[^<>]*>|\[[0-9:, x-]*\]|array<[^>]*>")
_ARGUMENT: Final = re.compile(r"%(arg\d+): ((?:tensor<[^<>]*>|[^ ,)]+))")
_SYMBOL: Final = re.compile(r"@([\w.]+|\"[^\"]*\")")
_QUOTED: Final = r'"(?:[^"\\]|\\.)*"'
# What stands in braces, in angle brackets or in quotes may hold any sign.
_NESTED: Final = rf"<(?:[^<>]|<[^<>]*>)*>|\[[^\]]*\]|\{{(?:[^{{}}\"]|{_QUOTED})*\}}|{_QUOTED}"
_PIECE: Final = re.compile(
    rf"%(?P<argument>arg\d+):|(?P<arrow>-> )|(?P<attributes>\{{(?:[^{{}}\"]|{_NESTED})*\}})"
    rf"|(?P<comma>,)|{_NESTED}"
)
_ATTRIBUTE: Final = re.compile(rf"(?:[^,{{}}\[\]<>\"]|{_NESTED})+")
_FILE: Final = re.compile(r'^"((?:[^"\\]|\\.)*)":(\d+):')
_CALL: Final = re.compile(r"^callsite\((#loc\d*) at (#loc\d*)\)")
_NAMED: Final = re.compile(r'^"((?:[^"\\]|\\.)*)"\((#loc\d*)\)')
_LIBRARY: Final = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python3\.\d+[/\\]")


@dataclass(frozen=True)
class SummarizedOperation:
    """One operation of a program."""

    # The operation with its shapes; operands are named after what made them, so that one operation
    # more does not change all that follow.
    text: str
    numbered: str  # the same with MLIR's own numbers of values
    source: str  # the user's line that it comes from, ``file.py:12 in step``; empty if unknown


@dataclass(frozen=True)
class SummarizedProgram:
    """A program as its summary tells it."""

    arguments: tuple[tuple[str, str], ...]  # the name and the type of each argument of ``main``
    # Its operations, those inside of loops and functions too, as printed.
    operations: tuple[SummarizedOperation, ...]
    # What is said of the module, of its functions, and of their arguments and results, such as the
    # result that takes an argument's memory.
    attributes: tuple[tuple[str, str], ...]
    is_cut: bool  # whether its last operations are missing


@dataclass(frozen=True)
class OperationDifference:
    """One place where two programs differ; an empty text stands for no operation."""

    position: int  # the number of the operation in the second program, from 1
    before: str
    after: str
    before_source: str
    after_source: str


@dataclass(frozen=True)
class ProgramDifference:
    """How two programs differ."""

    # ``shapes``, ``constants``, ``wiring`` (which results an operation takes), ``code``, or
    # ``nothing`` that a summary shows.
    kind: str
    # Name, type before and type after of each argument of ``main`` that differs.
    arguments: tuple[tuple[str, str, str], ...]
    # Where, before and after of each attribute that differs.
    attributes: tuple[tuple[str, str, str], ...]
    count: int
    operations: tuple[OperationDifference, ...]
    constants: tuple[OperationDifference, ...]
    is_partial: bool  # whether the summary of one program misses its last operations


def summary_text(summary: object) -> str:
    """Return the text in a summary; empty if it is none."""
    if not isinstance(summary, str) or not summary:
        return ""
    try:
        packed = base64.b64decode(summary, validate=True)
        if zstandard.frame_content_size(packed) > _LARGEST_TEXT:
            return ""
        unpacked = zstandard.ZstdDecompressor().decompress(packed, max_output_size=_LARGEST_TEXT)
    except (binascii.Error, ValueError, zstandard.ZstdError, MemoryError):
        return ""
    return unpacked.decode("utf-8", "replace")


def read_summary(text: str) -> SummarizedProgram:
    """Return the program in the text of a summary."""
    lines = text.splitlines()
    locations = dict(_definitions(lines))
    constant = "// constant "
    digests = iter([line.removeprefix(constant) for line in lines if line.startswith(constant)])
    sources: dict[str, str] = {}
    made_by: dict[str, str] = {}
    unused: dict[str, int] = {}
    arguments: tuple[tuple[str, str], ...] = ()
    operations: list[SummarizedOperation] = []
    attributes: dict[str, str] = {}
    for line in lines:
        stripped = line.strip()
        if stripped.startswith(("module", "func.func")):
            attributes.update(_attributes(_LOCATION.sub("", stripped)))
        if stripped.startswith("func.func"):
            made_by, unused = {}, {}
            if "@main(" in stripped:
                arguments = tuple(_ARGUMENT.findall(_LOCATION.sub("", stripped)))
        if not stripped.startswith(("%", '"', "stablehlo.", "call ", "return ", "sdy.")):
            continue
        reference = ["", *_LOCATION.findall(stripped)][-1]
        numbered = _LOCATION.sub("", stripped)
        if _ELIDED in numbered:
            numbered = numbered.replace(_ELIDED, f"dense<digest {next(digests, 'unknown')}>")
        results, numbered = _split_results(numbered)
        text_of = _VALUE.sub(functools.partial(_label, made_by), numbered)
        label = "%" + _name(numbered)
        made_by.update(dict.fromkeys(results, label))
        if reference not in sources:
            sources[reference] = _source(reference, locations)
        # A constant is made where the graph was cut; who uses it first is what a person wrote.
        for value in _VALUE.findall(numbered) if unused else ():
            if (at := unused.pop(value, None)) is not None:
                operations[at] = replace(operations[at], source=sources[reference])
        if label == "%constant":
            unused[results[0]] = len(operations)
        operations.append(SummarizedOperation(text_of, numbered, sources[reference]))
    is_cut = any(line == "// cut" for line in lines)
    return SummarizedProgram(arguments, tuple(operations), tuple(attributes.items()), is_cut)


def _attributes(header: str) -> Iterator[tuple[str, str]]:
    """Yield where each attribute stands in the first line of a module or function, and what it is.

    An argument is called by its name, a result by its number.
    """
    function = symbol[1] if (symbol := _SYMBOL.search(header)) else ""
    place, results = function, 0
    for piece in _PIECE.finditer(header):
        if piece["argument"]:
            place = f"{function} %{piece['argument']}"
        elif piece["arrow"]:
            place, results = f"{function} result 0", 0
        elif piece["comma"] and " result " in place:
            results += 1
            place = f"{function} result {results}"
        elif piece["attributes"]:
            for attribute in _ATTRIBUTE.finditer(piece["attributes"][1:-1]):
                name, _, value = attribute[0].strip().partition(" = ")
                yield f"{place} {name}", value or "set"


def _definitions(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        if line.startswith("#loc"):
            name, _, rest = line.partition(" = loc(")
            yield name, rest.removesuffix(")")


def _split_results(line: str) -> tuple[list[str], str]:
    match = _RESULT.match(line)
    if match is None:
        return [], line
    results = [result.partition(":")[0] for result in match[1].split(", ")]
    return results, line[match.end() :]


def _label(made_by: dict[str, str], match: re.Match[str]) -> str:
    name, mark, number = match[0].partition("#")
    label = made_by.get(name)
    if label is None:
        # An argument, or what a loop hands on: MLIR tells equal names apart by a number.
        return f"{re.sub(r'_[0-9]+$', '', name)}{mark}{number}"
    return f"{label}{mark}{number}"


def _name(text: str) -> str:
    match = _NAME.match(text)
    return match[1].rpartition(".")[2] if match else "value"


def _source(reference: str, locations: dict[str, str]) -> str:
    """Return the innermost frame that is the user's, else the innermost of all."""
    frames = list(_frames(reference, locations))
    own = [frame for frame in frames if not _LIBRARY.search(frame)]
    return (own or frames or [""])[0]


def _frames(reference: str, locations: dict[str, str]) -> Iterator[str]:
    """Yield the frames of a location, innermost first."""
    waiting = [(reference, "")]
    for _ in range(_MOST_LOCATIONS):  # a damaged table may lead in a circle
        if not waiting:
            return
        at, function = waiting.pop()
        definition = locations.get(at, "")
        if call := _CALL.match(definition):
            waiting += [(call[2], ""), (call[1], function)]
        elif match := _NAMED.match(definition):
            waiting.append((match[2], match[1]))
        elif file := _FILE.match(definition):
            inside = f" in {function}" if function and function != "<module>" else ""
            yield f"{file[1]}:{file[2]}{inside}"


def compare(
    before: SummarizedProgram, after: SummarizedProgram, *, most: int = 5
) -> ProgramDifference:
    """Return how two programs differ."""
    places = list(_differences(before.operations, after.operations))
    kind = _kind(places)
    if not places and before.operations != after.operations:
        places = list(_wiring(before.operations, after.operations))
        kind = "wiring" if places else "nothing"
    arguments = _changes(dict(before.arguments), dict(after.arguments))
    attributes = _changes(dict(before.attributes), dict(after.attributes))
    if arguments and kind in ("nothing", "wiring"):
        kind = "shapes"
    constants = [place for place in places if _is_constant(place)]
    return ProgramDifference(
        kind=kind,
        arguments=arguments,
        attributes=attributes,
        count=len(places),
        operations=tuple(places[:most]),
        constants=tuple(constants[:most]),
        is_partial=before.is_cut or after.is_cut,
    )


def difference_lines(before: str, after: str, first: str, second: str) -> Iterator[str]:
    """Yield how two programs differ, given their summaries' texts, and whose they are."""
    difference = compare(read_summary(before), read_summary(after), most=_MOST_SHOWN)
    for name, old, new in difference.arguments[:_MOST_SHOWN]:
        yield f"argument {name}: {first}: {old or 'none'}; {second}: {new or 'none'}"
    for where, old, new in difference.attributes[:_MOST_SHOWN]:
        yield f"{where}: {first}: {old or 'none'}; {second}: {new or 'none'}"
    width = max(len(first), len(second)) + 1
    places = dict.fromkeys((*difference.operations, *difference.constants))
    for place in list(places)[:_MOST_SHOWN]:
        source = place.after_source or place.before_source or "an unknown line"
        yield f"operation {place.position}, {source}"
        for who, text in ((first, place.before), (second, place.after)):
            yield f"  {who + ':':<{width}} {text.replace('stablehlo.', '') or 'no such operation'}"
    if difference.kind == "nothing" and not difference.attributes:
        yield "their operations are the same: compile options (XLA_FLAGS) or devices differ"


def _differences(
    before: Sequence[SummarizedOperation], after: Sequence[SummarizedOperation]
) -> Iterator[OperationDifference]:
    old, new = [operation.text for operation in before], [operation.text for operation in after]
    start = _common(old, new)
    end = _common(old[start:][::-1], new[start:][::-1])
    old_middle, new_middle = old[start : len(old) - end], new[start : len(new) - end]
    blocks: Sequence[tuple[str, int, int, int, int]]
    if [_SHAPE.sub("", line) for line in old_middle] == [
        _SHAPE.sub("", line) for line in new_middle
    ]:
        blocks = [("replace", 0, len(old_middle), 0, len(new_middle))]
    else:
        quick = len(old_middle) + len(new_middle) > 2 * _CAREFULLY_COMPARED
        matcher = difflib.SequenceMatcher(None, old_middle, new_middle, autojunk=quick)
        blocks = matcher.get_opcodes()
    nothing = SummarizedOperation("", "", "")
    for tag, old_from, old_to, new_from, new_to in blocks:
        if tag == "equal":
            continue
        for offset in range(max(old_to - old_from, new_to - new_from)):
            old_at, new_at = start + old_from + offset, start + new_from + offset
            old_operation = before[old_at] if offset < old_to - old_from else nothing
            new_operation = after[new_at] if offset < new_to - new_from else nothing
            if old_operation.text != new_operation.text:
                yield _place(new_at, old_operation, new_operation)


def _common(old: Sequence[str], new: Sequence[str]) -> int:
    """Return how many first lines are the same."""
    pairs = enumerate(zip(old, new, strict=False))
    return next(
        (at for at, (old_line, new_line) in pairs if old_line != new_line), min(len(old), len(new))
    )


def _wiring(
    before: Sequence[SummarizedOperation], after: Sequence[SummarizedOperation]
) -> Iterator[OperationDifference]:
    for at, (old_operation, new_operation) in enumerate(zip(before, after, strict=True)):
        if old_operation.numbered != new_operation.numbered:
            yield OperationDifference(
                at + 1,
                old_operation.numbered,
                new_operation.numbered,
                old_operation.source,
                new_operation.source,
            )


def _place(at: int, before: SummarizedOperation, after: SummarizedOperation) -> OperationDifference:
    return OperationDifference(at + 1, before.text, after.text, before.source, after.source)


def _kind(places: Sequence[OperationDifference]) -> str:
    if not places:
        return "nothing"
    if all(_SHAPE.sub("", place.before) == _SHAPE.sub("", place.after) for place in places):
        return "shapes"
    if all(_is_constant(place) for place in places):
        return "constants"
    return "code"


def _is_constant(place: OperationDifference) -> bool:
    """Return whether two constants differ in nothing but their values."""
    both = place.before, place.after
    return all(_CONSTANT.search(text) for text in both) and (
        _CONSTANT.sub("", place.before) == _CONSTANT.sub("", place.after)
    )


def _changes(old: Mapping[str, str], new: Mapping[str, str]) -> tuple[tuple[str, str, str], ...]:
    names = [*new, *(name for name in old if name not in new)]
    return tuple(
        (name, old.get(name, ""), new.get(name, ""))
        for name in names
        if old.get(name) != new.get(name)
    )


@dataclass(frozen=True)
class Profile:
    """What of a program is enough to find others like it."""

    kinds: tuple[str, ...]  # the names of its operations, in order
    lines: Counter[int]  # how often it has each operation with its shapes, by a number for it


def profile(text: str) -> Profile:
    """Return the profile of the program in the text of a summary."""
    matches = _ANY_OPERATION.findall(text)
    lines = Counter(hash((name, _VALUE.sub("", rest))) for name, rest in matches)
    return Profile(tuple(name for name, _ in matches), lines)


_ANY_OPERATION: Final = re.compile(
    r"= \"?((?:stablehlo|chlo|mhlo)\.\w+|call @\w+)(.*?)(?: loc\(.*)?$", re.M
)


def likeness(before: Profile, after: Profile) -> tuple[float, float]:
    """Return how many kinds of operations two programs share, and how many with the same shapes.

    Both are parts of the larger program, 0 to 1; neither knows the order.
    """
    return (
        _shared(Counter(before.kinds), Counter(after.kinds)),
        _shared(before.lines, after.lines),
    )


def _shared(before: Counter[Any], after: Counter[Any]) -> float:
    size = max(before.total(), after.total())
    return (before & after).total() / size if size else 0.0
