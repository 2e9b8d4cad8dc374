"""Edit one operation in the StableHLO text of a program; it must know nothing of snaprt.

Every operation of the original text gets a location of its own, ``op17``, by which whoever names an
operation is judged. The edited text has no locations at all.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

_LOCATION = re.compile(r" loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")
_OPERATION = re.compile(r"^\s*(?:%[\w]+(?::\d+)? = |\"?stablehlo\.return|return|call )")
_RESULT = re.compile(r"^\s*(%\w+)(:\d+)? = \"?([\w.]+)\"?")
_REMOVABLE = re.compile(r"\s*(%\w+) = stablehlo\.\w+ (%[\w#]+)(?:, \S+ %?[\w#]+)? : (tensor<\S+>)$")
_ROUNDING = re.compile(
    r"stablehlo\.(?:floor|round_nearest_even|real|sign) (%[\w#]+) : (tensor\S+)$"
)
_NAME = re.compile(r"%\w+(?:#\d+)?")


@dataclasses.dataclass(frozen=True)
class Plant:
    """One edit.

    Args:
        kind: A key of `KINDS`.
        before: The edited line.
        after: What it became; empty where the operation was taken out.
        text: The module with it.
        accepted: The locations of the operations that differ by it.
    """

    kind: str
    before: str
    after: str
    text: str
    accepted: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Text:
    """A module's text.

    Args:
        lines: Without locations.
        owners: For each line the location of its operation and of those around it in a region
            that is no loop or branch.
    """

    lines: tuple[str, ...]
    owners: tuple[tuple[str, ...], ...]

    @property
    def located(self) -> str:
        """Return the text with a location for each operation."""
        lines = list(self.lines)
        for end, number in _ends(self.lines).items():
            lines[end] += f' loc("op{number}")'
        return "\n".join(lines)


def read(text: str) -> Text:
    """Return the text of a module that was printed with or without locations."""
    lines = tuple(
        _LOCATION.sub("", one) for one in text.splitlines() if one and not one.startswith("#loc")
    )
    ends = _ends(lines)
    spans = sorted((number, end) for end, number in ends.items())
    owners = []
    for index in range(len(lines)):
        around = [start for start, end in spans if start <= index <= end]
        if around and not any(
            "stablehlo.while" in lines[one] or "stablehlo.case" in lines[one] for one in around
        ):
            owners.append(tuple(f"op{one}" for one in around))
        else:
            owners.append(tuple(f"op{one}" for one in around[-1:]))
    return Text(lines, tuple(owners))


def _ends(lines: Sequence[str]) -> Mapping[int, int]:
    """Return the number of the operation that ends at a line: the number of its first line."""
    found: dict[int, int] = {}
    opened: list[int] = []  # first lines of operations with regions
    for index, line in enumerate(lines):
        starts = bool(_OPERATION.match(line))
        stripped = line.strip()
        if starts and (
            stripped.endswith("({") or "stablehlo.while" in line or _reducer(lines, index)
        ):
            opened.append(index)
        elif starts:
            found[index] = index
        elif opened and (stripped == "}" or (stripped.startswith("})") and "({" not in stripped)):
            found[index] = opened.pop()
    return found


def _reducer(lines: Sequence[str], index: int) -> bool:
    return index + 1 < len(lines) and lines[index + 1].strip().startswith("reducer(")


# --- the edits: a line, and others it may read, to what may stand in its place ---

_SWAPS = {
    "add": "subtract multiply maximum",
    "subtract": "add",
    "multiply": "add divide",
    "divide": "multiply subtract",
    "maximum": "minimum add",
    "minimum": "maximum",
    "and": "or",
    "or": "and xor",
    "xor": "or",
    "negate": "abs",
    "abs": "negate",
    "exponential": "exponential_minus_one tanh",
    "tanh": "sine logistic",
    "sine": "cosine",
    "cosine": "sine",
    "sqrt": "cbrt rsqrt",
    "rsqrt": "sqrt",
    "log": "log_plus_one",
    "log_plus_one": "log",
    "floor": "ceil",
    "round_nearest_even": "floor",
    "sign": "negate",
    "power": "multiply",
    "remainder": "divide",
    "shift_right_logical": "shift_left",
}


def _another_operation(line: str, _: _Scope) -> Iterator[str]:
    for name, others in _SWAPS.items():
        for form in (f"stablehlo.{name} %", f"applies stablehlo.{name} "):
            if form in line:
                yield from (line.replace(form, form.replace(name, one)) for one in others.split())


def _another_constant(line: str, _: _Scope) -> Iterator[str]:
    found = re.search(r"stablehlo\.constant dense<([^>\[\]]+)> : tensor<(?:\d+x)*(\w+)>", line)
    if not found:
        return
    value, dtype = found.groups()
    if value in ("true", "false"):
        new = ["false" if value == "true" else "true"]
    elif dtype.startswith(("i", "ui")):
        new = [str(int(value) + 1)] + ([str(int(value) - 1)] if int(value) > 0 else [])
    elif re.fullmatch(r"[-+.\deE]+", value) and dtype.startswith(("f", "bf")):
        new = [f"{float(value) * 1.5 + 0.25:e}", f"{-float(value) - 0.125:e}"]
    else:
        return
    yield from (line.replace(f"dense<{value}>", f"dense<{one}>", 1) for one in new)


def _another_element(line: str, _: _Scope) -> Iterator[str]:
    found = re.search(r"stablehlo\.constant dense<(\[.*\])> : tensor<[\dx]+x(?:i|f)\d+>", line)
    if found:
        numbers = list(re.finditer(r"-?\d[\d.eE+-]*", found[1]))
        for one in numbers[1:3]:
            new = str(int(one[0]) + 1) if one[0].lstrip("-").isdigit() else f"{float(one[0]) + 1:e}"
            changed = found[1][: one.start()] + new + found[1][one.end() :]
            yield line.replace(found[1], changed)


def _another_comparison(line: str, _: _Scope) -> Iterator[str]:
    found = re.search(r"stablehlo\.compare +(\w\w),", line)
    others = {"LT": "LE GE", "LE": "LT", "GT": "GE LT", "GE": "GT LT", "EQ": "NE", "NE": "EQ"}
    if found:
        for one in others[found[1]].split():
            yield line.replace(f" {found[1]},", f" {one},", 1)


def _swapped_operands(line: str, _: _Scope) -> Iterator[str]:
    for pattern in (
        r"(stablehlo\.(?:subtract|divide|power|compare \w\w, |dot_general) )(%[\w#]+), (%[\w#]+)",
        r"(stablehlo\.select %[\w#]+, )(%[\w#]+), (%[\w#]+)",
        r"(stablehlo\.concatenate )(%[\w#]+), (%[\w#]+)",
        r"(stablehlo\.return )(%[\w#]+), (%[\w#]+)",
        r"(stablehlo\.clamp %[\w#]+, )(%[\w#]+), (%[\w#]+)",
    ):
        found = re.search(pattern, line)
        if found and found[2] != found[3]:
            yield line.replace(found[0], f"{found[1]}{found[3]}, {found[2]}", 1)


def _another_operand(line: str, scope: _Scope) -> Iterator[str]:
    """Read an earlier value of the same type instead."""
    if "stablehlo." not in line or "stablehlo.constant" in line or "call @" in line:
        return
    left, _, right = line.partition(" = ")
    if not right:
        return
    operands = [one for one in _NAME.findall(right) if one in scope.types]
    scope.random.shuffle(operands)
    for operand in operands:
        same = [
            name
            for name, kind in scope.types.items()
            if kind == scope.types[operand] and name != operand
        ]
        if same:
            other = scope.random.choice(same)
            yield left + " = " + re.sub(re.escape(operand) + r"(?![\w#])", other, right, count=1)


def _another_slice(line: str, _: _Scope) -> Iterator[str]:
    found = re.search(r"stablehlo\.slice %[\w#]+ \[([^\]]*)\] : \(tensor<([\dx]+)x\w+>\)", line)
    if not found:
        return
    sizes = [int(one) for one in found[2].split("x")]
    bounds = found[1].split(", ")
    for axis, bound in enumerate(bounds):
        start, limit, *stride = (int(one) for one in bound.split(":"))
        for by in (1, -1):
            if start + by >= 0 and limit + by <= sizes[axis]:
                moved = ":".join(map(str, (start + by, limit + by, *stride)))
                new = [*bounds[:axis], moved, *bounds[axis + 1 :]]
                yield line.replace(found[1], ", ".join(new))


def _another_dimension(line: str, scope: _Scope) -> Iterator[str]:
    """Permute or move the dimensions of a transpose, broadcast, reduce, iota, reverse, sort."""
    for pattern in (
        r"dims = \[([\d, ]+)\]",
        r"across dimensions = \[([\d, ]+)\]",
        r"iota dim = (\d)",
        r"dimension = (\d) : i64",
        r"concatenate .*dim = (\d)",
        r"stablehlo\.reverse .*dims = \[([\d, ]+)\]",
        r"contracting_dims = \[([\d, ]+)\]",
        r"contracting_dims = \[[\d, ]+\] x \[([\d, ]+)\]",
        r"batching_dims = \[([\d, ]+)\]",
    ):
        found = re.search(pattern, line)
        if not found:
            continue
        dims = [int(one) for one in found[1].split(", ")]
        options = [dims[::-1], [one + 1 for one in dims], [one - 1 for one in dims]]
        if len(dims) > 2:
            options += [[dims[1], dims[0], *dims[2:]], [*dims[:-2], dims[-1], dims[-2]]]
        scope.random.shuffle(options)
        for new in options:
            if new != dims and min(new) >= 0:
                start, stop = found.span(1)
                yield line[:start] + ", ".join(map(str, new)) + line[stop:]


def _another_padding(line: str, _: _Scope) -> Iterator[str]:
    found = re.search(r"low = \[([\d, ]+)\], high = \[([\d, ]+)\]", line)
    if found and found[1] != found[2]:
        yield line.replace(found[0], f"low = [{found[2]}], high = [{found[1]}]")
    found = re.search(r"pad = \[\[(\d+), (\d+)\]", line)
    if found and int(found[1]) + int(found[2]):
        low = int(found[1]) + (1 if int(found[2]) else -1)
        total = int(found[1]) + int(found[2])
        yield line.replace(found[0], f"pad = [[{low}, {total - low}]")


def _another_attribute(line: str, _: _Scope) -> Iterator[str]:
    for old, new in (
        ("offset_dims = [1]", "offset_dims = [0]"),
        ("start_index_map = [0, 1]", "start_index_map = [1, 0]"),
        ("collapsed_slice_dims = [0]", "collapsed_slice_dims = [1]"),
        ("scatter_dims_to_operand_dims = [0]", "scatter_dims_to_operand_dims = [1]"),
        ("type = RFFT", "type = IRFFT"),
        ("reverse = [true, true]", "reverse = [false, false]"),
        ("reverse = [false, false]", "reverse = [true, true]"),
        ("rhs_dilate = [1, 1]", "rhs_dilate = [2, 2]"),
        ("[b, 0, 1, f]x[0, 1, i, o]", "[b, 0, 1, f]x[1, 0, i, o]"),
        ("[b, 0, 1, f]x[0, 1, i, o]", "[b, 0, 1, f]x[0, 1, o, i]"),
        ("k = 3", "k = 2"),
    ):
        if old in line:
            yield line.replace(old, new, 1)


def _rounded(line: str, scope: _Scope) -> Iterator[str]:
    """Drop a conversion's effect: an exact copy of the operand where both types are the same."""
    found = re.search(
        r"stablehlo\.(?:floor|round_nearest_even|real|sign) (%[\w#]+) : (tensor\S+)$", line
    )
    if found:
        yield line.replace(found[0], f"stablehlo.optimization_barrier {found[1]} : {found[2]}")


KINDS: Mapping[str, Callable[[str, _Scope], Iterator[str]]] = {
    "operation": _another_operation,
    "constant": _another_constant,
    "element of a constant": _another_element,
    "comparison": _another_comparison,
    "swapped operands": _swapped_operands,
    "other operand": _another_operand,
    "slice": _another_slice,
    "dimension": _another_dimension,
    "padding": _another_padding,
    "attribute": _another_attribute,
    "dropped rounding": _rounded,
}
REMOVED = "removed"


@dataclasses.dataclass(frozen=True)
class _Scope:
    """What can be read at a line: the types of the values, and a source of chance."""

    types: Mapping[str, str]
    random: random.Random


def draw(text: Text, kind: str, seed: int) -> Iterator[Plant]:
    """Yield edits of one kind, no line twice in a row, in random order; some are not valid."""
    generator = random.Random(f"{kind} {seed}")
    indices = list(range(len(text.lines)))
    generator.shuffle(indices)
    for index in indices:
        line = text.lines[index]
        if kind == REMOVED:
            yield from _removed(text, index)
            continue
        options = list(KINDS[kind](line, _Scope(_types(text.lines, index), generator)))
        generator.shuffle(options)
        for new in options[:2]:
            lines = [*text.lines[:index], new, *text.lines[index + 1 :]]
            yield Plant(kind, line.strip(), new.strip(), "\n".join(lines), _names(text, index))


def _names(text: Text, index: int) -> frozenset[str]:
    """Return the locations by which an operation is known: of a constant those of its readers.

    XLA's HLO keeps no location of a constant, and folds what is made of constants into one.
    """
    names = set(text.owners[index])
    line = text.lines[index]
    if "stablehlo.broadcast_in_dim" in line or _is_constant(text, index):
        for place in _users(text, index):
            names |= _names(text, place)
    if "return" in line:
        names.add("")  # a tuple of XLA's, which has no location
    return frozenset(names)


def _is_constant(text: Text, index: int) -> bool:
    line = text.lines[index]
    if "stablehlo.constant" in line:
        return True
    made = [_RESULT.match(one) for one in text.lines[:index]]
    names = {found[1]: place for place, found in enumerate(made) if found is not None}
    read = _NAME.findall(line.partition(" = ")[2])
    return bool(read) and all(one in names and _is_constant(text, names[one]) for one in read)


def _users(text: Text, index: int) -> list[int]:
    """Return the lines that read the result of one."""
    found = _RESULT.match(text.lines[index])
    if found is None:
        return []
    depth = _depth(text.lines[index])
    pattern = re.compile(re.escape(found[1]) + r"(?![\w])")
    last = next(i for i in range(index, len(text.lines)) if _depth(text.lines[i]) < depth)
    return [i for i in range(index + 1, last) if pattern.search(text.lines[i])]


def _removed(text: Text, index: int) -> Iterator[Plant]:
    """Take an operation out whose operand and result have one type; its users read the operand."""
    line = text.lines[index]
    found = re.match(
        r"\s*(%\w+) = stablehlo\.\w+ (%[\w#]+)(?:, \S+ %?[\w#]+)? : (tensor<\S+>)$", line
    )
    if not found:
        return
    pattern = re.compile(re.escape(found[1]) + r"(?![\w#])")
    users = _users(text, index)
    lines = list(text.lines)
    for place in users:
        lines[place] = pattern.sub(found[2], lines[place])
    del lines[index]
    accepted = _names(text, index).union(*(_names(text, place) for place in users))
    yield Plant(REMOVED, line.strip(), "", "\n".join(lines), accepted)


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _types(lines: Sequence[str], index: int) -> Mapping[str, str]:
    """Return the types of the values that can be read at a line, of one result each."""
    types: dict[str, str] = {}
    depth = _depth(lines[index])
    for line in reversed(lines[:index]):
        if _depth(line) > depth:
            continue
        depth = _depth(line)
        found = re.match(r"\s*(%\w+) = .*[ >](tensor<[^>]*>)$", line)
        if found:
            types.setdefault(found[1], found[2])
        if line.strip().startswith("func.func"):
            types.update(re.findall(r"(%arg\d+): (tensor<[^>]*>)", line))
            break
        if line.strip().startswith(("^bb0", "reducer", "cond", "} do")):
            types.update(re.findall(r"(%arg\d+): (tensor<[^>]*>)", line))
    return types
