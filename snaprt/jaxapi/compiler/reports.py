"""What XLA tells of an executable: memory, cost, HLO; must not compile, load or run it."""

from __future__ import annotations

from typing import Any

from jaxlib import _hlo  # type: ignore[attr-defined]


def executable_memory(executable: Any) -> dict[str, int]:
    """Return an executable's memory in bytes by use: ``argument_size``, ``temp_size``, ..."""
    statistics = executable.get_compiled_memory_stats()
    return {
        name.removesuffix("_in_bytes"): int(getattr(statistics, name))
        for name in dir(statistics)
        if name.endswith("_in_bytes")
    }


def executable_report(executable: Any) -> tuple[dict[str, int], dict[str, float], str]:
    """Return an executable's memory in bytes by use, its cost analysis, and its optimized HLO."""
    memory = executable_memory(executable)
    try:
        cost = dict(executable.cost_analysis())
    except Exception:  # not every plugin has one
        cost = {}
    return memory, cost, "\n".join(one.to_string() for one in executable.hlo_modules())


def optimised_hlo(executable: Any, *, constants: bool) -> str:
    """Return what XLA made of a loaded executable's module, as HLO text, "" where it keeps none.

    Names and source locations are left out: equal programs have equal texts. No other thread runs
    Python meanwhile (jaxlib 0.10.2 and 0.12.0.1 print while they hold its lock).

    Args:
        executable: Of XLA's.
        constants: Whether constants of more than ten elements are printed, else ``{...}`` is.
    """
    options = _hlo.HloPrintOptions.canonical()
    options.print_metadata = False
    options.print_large_constants = constants
    try:
        modules = executable.hlo_modules()
    except Exception:  # a plugin that does not hand them out, in its own words
        return ""
    return "\n".join(module.to_string(options) for module in modules)


def executable_fingerprint(executable: Any) -> str:
    """Return the fingerprint that XLA gives a loaded executable, "" where it gives none."""
    found = getattr(executable, "fingerprint", None) or b""
    return found.decode() if found.isalnum() else found.hex()
