"""All the tables of cases, family by family, and the public functions that none of them calls."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator

from breadth_cases import Case, public_functions

TABLES = (
    "table_numpy",
    "table_lax",
    "table_nn",
    "table_scipy",
    "table_random",
    "table_control_flow",
    "table_derivatives",
    "table_effects",
    "table_flax",
    "table_optax",
    "table_sharded",
)
"""The modules with cases; each is run in a process of its own."""


def cases_of(table: str) -> Iterator[Case]:
    """Return the cases of one table."""
    yield from importlib.import_module(table).cases()


def without_recipe(covered: Iterable[str]) -> list[str]:
    """Return the public functions that are not among those that cases cover."""
    return sorted(public_functions() - set(covered))
