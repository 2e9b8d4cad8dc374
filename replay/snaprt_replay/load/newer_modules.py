"""Read a snapshot's module that a newer jaxlib wrote; it must not know what runs it.

StableHLO promises that a reader understands what older ones wrote, not the reverse: a newer jaxlib
may write an operation in a form that is not known here. The snapshot has the same module as HLO.
"""

from __future__ import annotations

import re
from importlib import metadata

from snaprt import jaxapi
from snaprt.errors import SnapshotError
from snaprt.snapshot.format.read import SnapshotFile
from snaprt_replay.process.parsing import can_parse


def readable_module(file: SnapshotFile) -> tuple[bytes, tuple[str, ...]]:
    """Return a snapshot's module in a form that the jaxlib here understands.

    Returns:
        The module as `jaxapi.parse_module` takes it, and a note where it is not as it was written.

    Raises:
        SnapshotError: There is no such form.
    """
    module, writer = file.module, file.manifest.execution.versions.get("jaxlib", "")
    here = metadata.version("jaxlib")
    if _numbers(writer) <= _numbers(here) or can_parse(module.stablehlo):
        return module.stablehlo, ()
    try:
        stablehlo = jaxapi.hlo_to_stablehlo(module.hlo)
    except ValueError as error:
        raise SnapshotError(
            f"{file.path} was written with jaxlib {writer}, and jaxlib {here} cannot read its "
            f"module: {error}",
            hint=f"replay it with jaxlib {writer} or a later one",
        ) from error
    return stablehlo, (
        f"jaxlib {here} cannot read the StableHLO of jaxlib {writer}: "
        "the module is made of its HLO",
    )


def _numbers(version: str) -> list[int]:
    return [int(one) for one in re.findall(r"\d+", version)]
