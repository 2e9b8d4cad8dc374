"""Takes out of a module the names that tell where it came from; must not know who asks."""

from __future__ import annotations

import re
from typing import Any

from jaxlib.mlir import ir, passmanager

from snaprt.jaxapi.compiler.modules import parse_module, portable_artifact


def without_locations_or_names(module: bytes, *, names: bool) -> bytes:
    """Return a module, as a portable artifact, without what tells where it came from.

    Args:
        module: StableHLO in any form.
        names: Whether to give neutral names to the module, its functions and the axes of its meshes
            too, and take out JAX's notes on arguments and results.

    Raises:
        ValueError: It cannot be parsed.
    """
    parsed: Any = parse_module(module)
    with parsed.context, ir.Location.unknown():
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(parsed.operation)
        if names:
            _take_out_names(parsed)
            text = _with_neutral_axes(parsed.operation.get_asm(enable_debug_info=False))
            parsed = ir.Module.parse(text)
        return portable_artifact(parsed)


def _take_out_names(module: Any) -> None:
    whole = module.operation
    whole.attributes["sym_name"] = ir.StringAttr.get("graph")
    functions = [one.operation for one in module.body if one.operation.name == "func.func"]
    for number, function in enumerate(functions):
        name = ir.StringAttr(function.attributes["sym_name"]).value
        if name != "main":
            neutral = f"snaprt_function{number}"
            ir.SymbolTable.replace_all_symbol_uses(name, neutral, whole)
            ir.SymbolTable.set_symbol_name(function, neutral)
        for side in ("arg_attrs", "res_attrs"):
            if side in function.attributes:
                kept = [_without_notes(one) for one in ir.ArrayAttr(function.attributes[side])]
                function.attributes[side] = ir.ArrayAttr.get(kept)


def _without_notes(attributes: Any) -> Any:
    """Return an argument's attributes without JAX's own, but for the one that has a meaning."""
    named: Any = ir.DictAttr(attributes)
    return ir.DictAttr.get(
        {
            one.name: one.attr
            for one in named
            if not one.name.startswith("jax.") or one.name == "jax.buffer_donor"
        }
    )


_AXIS = re.compile(r'(?<=[<,\[ ])"([^"]+)"=\d+')


def _with_neutral_axes(text: str) -> str:
    lines = text.splitlines()
    meshes = [line for line in lines if line.lstrip().startswith("sdy.mesh ")]
    axes = list(dict.fromkeys(name for line in meshes for name in _AXIS.findall(line)))
    neutral = {f'"{name}"': f'"axis{number}"' for number, name in enumerate(axes)}
    if not neutral:
        return text
    quoted = re.compile("|".join(map(re.escape, neutral)))
    return "\n".join(
        quoted.sub(lambda found: neutral[found[0]], line) if "sdy." in line else line
        for line in lines
    )


def mesh_axes(module: bytes) -> tuple[str, ...]:
    """Return the names of the axes of a StableHLO module's meshes, in their order there."""
    parsed: Any = parse_module(module)
    text = "\n".join(
        one.operation.get_asm() for one in parsed.body if one.operation.name == "sdy.mesh"
    )
    return tuple(dict.fromkeys(_AXIS.findall(text)))
