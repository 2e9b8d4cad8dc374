"""The native functions that executables call: told by their entries, there before they are loaded.

An executable that calls a function which nobody has initialized ends the process. It knows entries
by what is said about them, not how they are stored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

import jax

from snaprt import jaxapi
from snaprt.errors import CompileError

#: What the metadata of an entry calls them.
TOLD_AS: Final = "custom_calls"


def told_of_calls(calls: jaxapi.CustomCalls, platform: str) -> dict[str, str]:
    """Return what the metadata of an entry says of the functions that its module calls."""
    return {TOLD_AS: json.dumps(jaxapi.functions_of_process(calls.targets, platform))}


def obstacle(metadata: Mapping[str, str | int | float]) -> str:
    """Make the functions of an entry's executable available; return why it cannot be used.

    Args:
        metadata: What was said about the entry when it was stored.

    Returns:
        Empty where the executable can be loaded and run.
    """
    targets = _targets(metadata)
    if targets is None:
        return "it does not say which native functions it calls: an older snaprt stored it"
    missing = jaxapi.make_available(targets, str(metadata.get("platform", "")))
    if missing:
        return f"it calls {', '.join(missing)}, which this process has not registered with JAX"
    return ""


def can_be_made_available_in_background(metadata: Mapping[str, str | int | float]) -> bool:
    """Return whether a thread may make the functions of an entry's executable available.

    It may import nothing for that: the program might be importing it at the same time.
    """
    targets = _targets(metadata)
    return targets is not None and not jaxapi.modules_awaited(targets)


def _targets(metadata: Mapping[str, str | int | float]) -> list[str] | None:
    try:
        return [str(name) for name in json.loads(str(metadata[TOLD_AS]))]
    except (KeyError, ValueError, TypeError):
        return None


def bound_to_process(lowered: jax.stages.Lowered, calls: jaxapi.CustomCalls) -> str:
    """Return what a program needs of this very process, so that no other may have its executable.

    Args:
        lowered: The program.
        calls: Those of its module.
    """
    return calls.bound_to or ("Python objects" if jaxapi.holds_objects(lowered) else "")


def refuse_objects_of_another_process(calls: jaxapi.CustomCalls) -> None:
    """Refuse a module from a file that names objects of the process that it was lowered in.

    Raises:
        CompileError: It does; XLA would follow an address that means something else here.
    """
    if calls.bound_to:
        raise CompileError(
            f"the module needs {calls.bound_to}, which only the process that recorded it had",
            hint="record the program without it; `snaprt inspect` prints the module and the arrays",
        )
