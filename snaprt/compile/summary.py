"""Writes a program down for `snaprt cache why`: its operations, with shapes and source lines.

It stands in the cache beside the executable and is only ever read by people's questions. Knows
MLIR modules; reading what it wrote, without JAX, is the business of ``operations``.
"""

from __future__ import annotations

import base64
import logging
from typing import Any, Final

import zstandard

from snaprt import jaxapi

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
    try:
        return _pack(jaxapi.stablehlo_with_locations(module, _LARGEST_CONSTANT))
    except Exception as error:  # nobody's program may fail for it
        _log.info("a program could not be summarized: %s", error)
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
    kept = body[: int(len(body) * share)]
    used = {word for line in kept for word in _locations(line)}
    by_name = {line.partition(" = ")[0]: line for line in table}
    # A location stands on others: all that the kept lines lead to.
    waiting = list(used)
    while waiting:
        more = _locations(by_name.get(waiting.pop(), "").partition(" = ")[2])
        waiting += [name for name in more if name not in used]
        used.update(more)
    return "\n".join([*kept, "// cut", *(line for n, line in by_name.items() if n in used)])


def _locations(line: str) -> list[str]:
    return [f"#loc{rest.split(')')[0].split(' ')[0]}" for rest in line.split("#loc")[1:]]
