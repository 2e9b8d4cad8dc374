"""What tells one executable from another: fingerprint, optimised HLO, aliases; knows no snapshots.

Source of the aliases: ``input_output_alias`` in the first line of HLO text, as openxla's
``hlo_input_output_alias_config.cc`` prints it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from snaprt import jaxapi

# What the partitioner was allowed, which shows in what it did; with one device it does nothing.
_ALLOWED = re.compile(r", allow_spmd_sharding_propagation_to_\w+=\{[^}]*\}")
_ALIAS = re.compile(r"\{([0-9, ]*)\}: \(([0-9]+), \{[0-9, ]*\}, (?:may|must)-alias\)")


@dataclass(frozen=True)
class Proof:
    """What tells which executable ran.

    Attributes:
        fingerprint: XLA's own of the executable, in its words; empty where it has none.
        optimised_hlo: BLAKE3, in hex, of the optimised module as text with canonical names and
            without source locations; empty where the platform keeps it to itself.
        aliases: ``result <- parameter`` for each result that takes a parameter's memory.
    """

    fingerprint: str = ""
    optimised_hlo: str = ""
    aliases: tuple[str, ...] = ()


def proof_of(executable: Any) -> Proof:
    """Return what tells a loaded executable of XLA's from others; None gives an empty proof.

    Printing a large module takes a while: ask in a thread that may take its time.
    """
    if executable is None:
        return Proof()
    header, _, body = jaxapi.optimised_hlo(executable).partition("\n")
    text = f"{_ALLOWED.sub('', header)}\n{body}"
    return Proof(
        fingerprint=jaxapi.executable_fingerprint(executable),
        optimised_hlo=blake3(text.encode()).hexdigest() if header else "",
        aliases=_aliases(header),
    )


def _aliases(header: str) -> tuple[str, ...]:
    _, _, told = header.partition("input_output_alias=")
    return tuple(f"{result or 0} <- {parameter}" for result, parameter in _ALIAS.findall(told))
