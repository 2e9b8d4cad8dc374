"""Edits of one operation in StableHLO text: a line to what may stand in its place.

What else of the program an edit reads is in its `Scope`.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

NAME = re.compile(r"%\w+(?:#\d+)?")


@dataclasses.dataclass(frozen=True)
class Scope:
    """What an edit may know beside its line.

    Args:
        lines: The program's.
        index: Which of them is edited.
        types: The types of the values that can be read there.
        random: A source of chance.
    """

    lines: Sequence[str]
    index: int
    types: Mapping[str, str]
    random: random.Random


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


def _another_operation(line: str, _: Scope) -> Iterator[str]:
    for name, others in _SWAPS.items():
        for form in (f"stablehlo.{name} %", f"applies stablehlo.{name} "):
            if form in line:
                yield from (line.replace(form, form.replace(name, one)) for one in others.split())


def _another_constant(line: str, _: Scope) -> Iterator[str]:
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


def _another_element(line: str, _: Scope) -> Iterator[str]:
    found = re.search(r"stablehlo\.constant dense<(\[.*\])> : tensor<[\dx]+x(?:i|f)\d+>", line)
    if found:
        numbers = list(re.finditer(r"-?\d[\d.eE+-]*", found[1]))
        for one in numbers[1:3]:
            new = str(int(one[0]) + 1) if one[0].lstrip("-").isdigit() else f"{float(one[0]) + 1:e}"
            changed = found[1][: one.start()] + new + found[1][one.end() :]
            yield line.replace(found[1], changed)


def _another_comparison(line: str, _: Scope) -> Iterator[str]:
    found = re.search(r"stablehlo\.compare +(\w\w),", line)
    others = {"LT": "LE GE", "LE": "LT", "GT": "GE LT", "GE": "GT LT", "EQ": "NE", "NE": "EQ"}
    if found:
        for one in others[found[1]].split():
            yield line.replace(f" {found[1]},", f" {one},", 1)


def _swapped_operands(line: str, _: Scope) -> Iterator[str]:
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


def _another_operand(line: str, scope: Scope) -> Iterator[str]:
    """Read an earlier value of the same type instead."""
    if "stablehlo." not in line or "stablehlo.constant" in line or "call @" in line:
        return
    left, _, right = line.partition(" = ")
    if not right:
        return
    operands = [one for one in NAME.findall(right) if one in scope.types]
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


def _another_slice(line: str, _: Scope) -> Iterator[str]:
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


def _another_dimension(line: str, scope: Scope) -> Iterator[str]:
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


def _another_padding(line: str, _: Scope) -> Iterator[str]:
    found = re.search(r"low = \[([\d, ]+)\], high = \[([\d, ]+)\]", line)
    if found and found[1] != found[2]:
        yield line.replace(found[0], f"low = [{found[2]}], high = [{found[1]}]")
    found = re.search(r"pad = \[\[(\d+), (\d+)\]", line)
    if found and int(found[1]) + int(found[2]):
        low = int(found[1]) + (1 if int(found[2]) else -1)
        total = int(found[1]) + int(found[2])
        yield line.replace(found[0], f"pad = [[{low}, {total - low}]")


def _another_attribute(line: str, _: Scope) -> Iterator[str]:
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


def _rounded(line: str, scope: Scope) -> Iterator[str]:
    """Drop a conversion's effect: an exact copy of the operand where both types are the same."""
    found = re.search(
        r"stablehlo\.(?:floor|round_nearest_even|real|sign) (%[\w#]+) : (tensor\S+)$", line
    )
    if found:
        yield line.replace(found[0], f"stablehlo.optimization_barrier {found[1]} : {found[2]}")


def _swapped(line: str, part: str, names: Sequence[str], scope: Scope) -> Iterator[str]:
    """Yield the line with two names of one type in a part of it in each other's place."""
    pairs = [
        (one, other)
        for one, other in itertools.combinations(dict.fromkeys(names), 2)
        if one in scope.types and scope.types[one] == scope.types.get(other)
    ]
    scope.random.shuffle(pairs)
    for one, other in pairs:
        turned = {one: other, other: one}
        yield line.replace(part, NAME.sub(lambda found: turned.get(found[0], found[0]), part), 1)  # noqa: B023


def _loop_state(line: str, scope: Scope) -> Iterator[str]:
    """Start a loop with two values of its state in each other's place."""
    found = re.search(r"stablehlo\.while\((.*?)\) :", line)
    if found:
        starts = re.findall(r"= (%\w+(?:#\d+)?)", found[1])
        for new in _swapped(found[0], found[0], starts, scope):
            yield line.replace(found[0], new, 1)


def _returned(line: str, scope: Scope) -> Iterator[str]:
    found = re.match(r"\s*(?:stablehlo\.)?return (.*) :", line)
    if found:
        yield from _swapped(line, found[1], NAME.findall(found[1]), scope)


def _arguments(line: str, scope: Scope) -> Iterator[str]:
    found = re.search(r"(?<!custom_)call @\w+\((.*?)\)", line)
    if found:
        yield from _swapped(line, found[1], NAME.findall(found[1]), scope)


def _another_result(line: str, scope: Scope) -> Iterator[str]:
    """Read another result of an operation that has several."""
    for found in re.finditer(r"(%\w+)#(\d)", line.partition(" = ")[2]):
        for other in "0123":
            if other != found[2]:
                yield line.replace(found[0], f"{found[1]}#{other}", 1)


def _sign(line: str, _: Scope) -> Iterator[str]:
    if "stablehlo.compare" in line:
        for old, new in (("SIGNED", "UNSIGNED"), ("UNSIGNED", "SIGNED")):
            if f", {old} :" in line:
                yield line.replace(f", {old} :", f", {new} :", 1)


def _bits(line: str, _: Scope) -> Iterator[str]:
    """Change an element of a constant that is written as bits, or is complex."""
    found = re.search(r'dense<"0x([0-9A-F]+)">', line)
    if found and len(found[1]) >= 8:
        digits = found[1]
        for at in (len(digits) // 8 // 2 * 8 + 4, 4):
            digit = "A" if digits[at] != "A" else "3"
            yield line.replace(digits, digits[:at] + digit + digits[at + 1 :], 1)
    found = re.search(r"dense<\(([-.\dE+]+),([-.\dE+]+)\)> : tensor<complex", line)
    if found:
        yield line.replace(f"({found[1]},{found[2]})", f"({found[2]},{found[1]})", 1)
        yield line.replace(f"({found[1]},", f"({float(found[1]) + 0.5:e},", 1)


def _index_order(line: str, scope: Scope) -> Iterator[str]:
    found = re.search(r"stablehlo\.dynamic_(?:update_)?slice (.*?)(?:, sizes|:)", line)
    if found:
        names = [one for one in NAME.findall(found[1]) if scope.types.get(one) == "tensor<i32>"]
        yield from _swapped(line, found[1], names, scope)


def _trip_count(line: str, scope: Scope) -> Iterator[str]:
    """Change what the condition of a loop compares, or with what."""
    depth = len(line) - len(line.lstrip())
    for above in reversed(scope.lines[: scope.index]):
        if len(above) - len(above.lstrip()) < depth:
            if above.strip().startswith("cond {"):
                yield from _another_constant(line, scope)
                yield from _another_comparison(line, scope)
            return


def _reducer(line: str, _: Scope) -> Iterator[str]:
    """Reduce by another operation."""
    found = re.search(r"applies stablehlo\.(\w+) across", line)
    for new in ("add", "maximum", "minimum", "multiply", "or", "and"):
        if found and new != found[1]:
            yield line.replace(f"applies stablehlo.{found[1]}", f"applies stablehlo.{new}", 1)


def _result(line: str) -> re.Match[str] | None:
    return re.match(r"(\s*)(%\w+) = (.*[ >](tensor<[^<>]*(?:complex<\w+>)?>))$", line)


def _then(line: str, _: Scope) -> Iterator[str]:
    """Put an operation behind the one of the line: its users read what that makes of it."""
    found = _result(line)
    if not found or "constant" in line:
        return
    indent, name, right, kind = found.groups()
    was = "%was" + name[1:]
    if re.search(r"[<x]b?f\d+>", kind):
        behind = [f"{one} {was} : {kind}" for one in ("negate", "sine", "abs")]
        behind.append(f"reduce_precision {was}, format = e5m2 : {kind}")
        behind.append(f"add {was}, {was} : {kind}")
    elif re.search(r"[<x]u?i\d+>", kind):
        behind = [f"add {was}, {was} : {kind}", f"not {was} : {kind}"]
    else:
        return
    yield from (f"{indent}{was} = {right}\n{indent}{name} = stablehlo.{one}" for one in behind)


def _before(line: str, scope: Scope) -> Iterator[str]:
    """Put an operation before one operand of the line's."""
    left, _, right = line.partition(" = ")
    indent = line[: len(line) - len(line.lstrip())]
    if "stablehlo." not in right or "({" in line or "stablehlo.while" in line:
        return
    for name in NAME.findall(right):
        kind = scope.types.get(name, "")
        form = "negate" if re.search(r"[<x]b?f\d+>", kind) else "not"
        if kind and (form == "negate" or re.search(r"[<x]u?i\d+>", kind)):
            made = f"{indent}%changed = stablehlo.{form} {name} : {kind}\n"
            read = re.sub(re.escape(name) + r"(?![\w#])", "%changed", right, count=1)
            yield f"{made}{left} = {read}"


def _zero(line: str, _: Scope) -> Iterator[str]:
    """Make an operation's result a constant."""
    found = _result(line)
    if found and "constant" not in line and re.search(r"[<x](?:b?f|u?i)\d+>", found[4]):
        is_float = re.search(r"[<x]b?f\d+>", found[4])
        value = "1.000000e+00" if is_float else "true" if "i1>" in found[4] else "1"
        yield f"{found[1]}{found[2]} = stablehlo.constant dense<{value}> : {found[4]}"


KINDS: Mapping[str, Callable[[str, Scope], Iterator[str]]] = {
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
    "state of a loop": _loop_state,
    "order of results": _returned,
    "order of arguments": _arguments,
    "another result": _another_result,
    "signedness": _sign,
    "bits of a constant": _bits,
    "order of indices": _index_order,
    "trip count": _trip_count,
    "reducer": _reducer,
    "operation behind": _then,
    "operation before": _before,
    "result made constant": _zero,
}


def _operand(line: str, _: Scope) -> Iterator[str]:
    found = re.match(
        r"\s*(%\w+) = stablehlo\.\w+ (%[\w#]+)(?:, \S+ %?[\w#]+)? : (tensor<\S+>)$", line
    )
    if found:
        yield found[2]


def _bounded(line: str, _: Scope) -> Iterator[str]:
    found = re.search(r"stablehlo\.clamp %[\w#]+, (%[\w#]+), ", line)
    if found:
        yield found[1]
    found = re.search(r"stablehlo\.(?:maximum|minimum|and) (%[\w#]+), (%[\w#]+) ", line)
    if found:
        yield from (found[1], found[2])


def _masked(line: str, _: Scope) -> Iterator[str]:
    found = re.search(r"stablehlo\.select %[\w#]+, (%[\w#]+), (%[\w#]+) ", line)
    if found:
        yield from (found[1], found[2])


def _one_of_two(line: str, _: Scope) -> Iterator[str]:
    found = re.search(r"stablehlo\.(?:add|multiply|subtract) (%[\w#]+), (%[\w#]+) ", line)
    if found:
        yield from (found[1], found[2])


def _converted(line: str, scope: Scope) -> Iterator[str]:
    """Yield what was converted to a type and back."""
    pattern = r"(%\w+) = stablehlo\.convert (%[\w#]+) : \((.*)\) -> (.*)$"
    back = re.search(pattern, line)
    for above in scope.lines[: scope.index] if back else ():
        there = re.search(pattern, above)
        if back and there and there[1] == back[2] and there[3] == back[4]:
            yield there[2]


REMOVALS: Mapping[str, Callable[[str, Scope], Iterator[str]]] = {
    "removed": _operand,
    "removed bound": _bounded,
    "removed mask": _masked,
    "removed term": _one_of_two,
    "removed conversion": _converted,
}
"""What is read in place of an operation that is taken out."""
