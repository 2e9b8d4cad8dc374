"""Cases: a piece of existing JAX code, what it is applied to, and which public functions it covers.

Most are expressions such as ``jnp.add(x, row)``, whose names of arguments say what they are (see
`sampled_values`); longer ones are functions with such parameters. It must not know snaprt.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from sampled_values import ARGUMENTS, KINDS, values

MODULES: dict[str, str] = {
    "jnp": "jax.numpy",
    "jnp.linalg": "jax.numpy.linalg",
    "jnp.fft": "jax.numpy.fft",
    "lax": "jax.lax",
    "lax.linalg": "jax.lax.linalg",
    "nn": "jax.nn",
    "nn.initializers": "jax.nn.initializers",
    "random": "jax.random",
    "special": "jax.scipy.special",
    "sla": "jax.scipy.linalg",
    "signal": "jax.scipy.signal",
    "stats": "jax.scipy.stats",
    "ndimage": "jax.scipy.ndimage",
    "dct": "jax.scipy.fft",
    "image_of": "jax.image",
    "ops": "jax.ops",
    "tree_of": "jax.tree",
    "tree_util": "jax.tree_util",
    "sparse_linalg": "jax.scipy.sparse.linalg",
    "optimize": "jax.scipy.optimize",
    "integrate": "jax.scipy.integrate",
    "interpolate": "jax.scipy.interpolate",
    "spatial": "jax.scipy.spatial.transform",
    "vq": "jax.scipy.cluster.vq",
    "dlpack": "jax.dlpack",
    "debug": "jax.debug",
    "flatten_util": "jax.flatten_util",
}
"""The modules whose public functions the cases are to cover, by the name that cases call them."""

DISTRIBUTIONS = tuple(
    name
    for name, value in sorted(vars(importlib.import_module("jax.scipy.stats")).items())
    if isinstance(value, types.ModuleType) and not name.startswith("_")
)
MODULES |= {f"stats.{name}": f"jax.scipy.stats.{name}" for name in DISTRIBUTIONS}

NAMES: dict[str, Any] = {
    "jax": jax,
    "np": np,
    **{
        name: importlib.import_module(module) for name, module in MODULES.items() if "." not in name
    },
}
"""What the names in an expression mean, besides arguments."""

WIDE = {"f": "d", "i": "l", "c": "z", "b": "b"}
"""The kind that a case is sampled at where 64-bit types are enabled; those left out are not."""


@dataclass(frozen=True)
class Case:
    """One piece of code, at one kind of values.

    Args:
        name: What a report calls it.
        family: The table that it is from.
        call: The code.
        arguments: The names of what it is applied to.
        kind: The letter of the dtype of those that have none of their own.
        covers: The public functions that it calls, by their full names.
    """

    name: str
    family: str
    call: Callable[..., Any]
    arguments: tuple[str, ...]
    kind: str
    covers: frozenset[str]

    def values(self, sample: int) -> list[Any]:
        """Return what the code is applied to: other values of the same types for each sample."""
        return values(self.arguments, self.kind, sample)


def expressions(family: str, tables: Mapping[str, Sequence[str]]) -> Iterator[Case]:
    """Make cases of expressions, one for each of the kinds that they are listed under.

    Args:
        family: The name of the whole.
        tables: For letters of kinds, the expressions. One that names a function that this version
            of JAX does not have is left out.
    """
    for kinds, rows in tables.items():
        for row in rows:
            tree = ast.parse(row, mode="eval")
            covers = _mentioned(tree)
            if all(map(_exists, covers)):
                used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
                arguments = tuple(name for name in ARGUMENTS if name in used)
                call = eval(f"lambda {', '.join(arguments)}: {row}", NAMES)
                yield from _sampled(row, family, call, arguments, kinds, covers)


def programs(
    family: str, functions: Sequence[Callable[..., Any]], kinds: str = "f"
) -> Iterator[Case]:
    """Make cases of functions whose parameters are named as `sampled_values.ARGUMENTS` are."""
    for function in functions:
        covers = _mentioned(ast.parse(textwrap.dedent(inspect.getsource(function))))
        arguments = tuple(inspect.signature(function).parameters)
        name = function.__name__
        yield from _sampled(name, family, function, arguments, kinds, covers)


def named_programs(
    family: str, functions: Mapping[str, Callable[..., Any]], kinds: str = "f"
) -> Iterator[Case]:
    """Make cases of functions that were made out of others, under names of their own."""
    for name, function in functions.items():
        arguments = tuple(inspect.signature(function).parameters)
        yield from _sampled(name, family, function, arguments, kinds, frozenset())


def _sampled(
    name: str,
    family: str,
    call: Callable[..., Any],
    arguments: tuple[str, ...],
    kinds: str,
    covers: frozenset[str],
) -> Iterator[Case]:
    wide = jax.config.jax_enable_x64
    for kind in dict.fromkeys(WIDE.get(kind, "") for kind in kinds) if wide else kinds:
        if kind:
            label = f"{name} [{np.dtype(KINDS[kind]).name}{', x64' if wide else ''}]"
            yield Case(label, family, call, arguments, kind, covers)


def _mentioned(tree: ast.AST) -> frozenset[str]:
    """Return the full names of the public functions that code mentions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            module, _, name = ast.unparse(node).rpartition(".")
            known = MODULES.get(module, module if module in MODULES.values() else None)
            if known is not None and f"{module}.{name}" not in MODULES:
                found.add(f"{known}.{name}")
    return frozenset(found)


def _exists(full_name: str) -> bool:
    module, _, name = full_name.rpartition(".")
    return hasattr(importlib.import_module(module), name)


@functools.cache
def public_functions() -> frozenset[str]:
    """Return the full names of the public functions of `MODULES`, without those of `NO_ARRAYS`."""
    found = set()
    for module in MODULES.values():
        for name, value in vars(importlib.import_module(module)).items():
            if not name.startswith("_") and callable(value) and not isinstance(value, type):
                found.add(f"{module}.{name}")
    return frozenset(found - NO_ARRAYS.keys() - {f"{m}.{n}" for m, n in _IMPORTED})


_IMPORTED = (("jax.scipy.interpolate", "RegularGridInterpolator"),)

NO_ARRAYS: dict[str, str] = {
    "jax.lax.ConvGeneralDilatedDimensionNumbers": "a type",
    "jax.lax.DotDimensionNumbers": "a type",
    "jax.lax.PrecisionLike": "a type",
    "jax.tree_util.KeyPath": "a type",
    "jax.random.Key": "a type",
    "jax.numpy.fromfile": "JAX does not implement it",
    "jax.numpy.fromiter": "JAX does not implement it",
    "jax.debug.breakpoint": "asks the user",
    "jax.nn.get_scaled_dot_general_config": "needs a GPU",
    "jax.nn.scaled_dot_general": "needs a GPU",
    "jax.nn.scaled_matmul": "needs a GPU",
    "jax.lax.scaled_dot": "needs a GPU",
}
"""Public names that no case can call, and why."""
