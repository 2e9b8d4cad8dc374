"""A program in the forms in which it is recorded, and what tells its executable from others.

Source of the aliases: ``input_output_alias`` in the first line of HLO text, as openxla's
``hlo_input_output_alias_config.cc`` prints it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from snaprt import jaxapi
from snaprt.graph.proof import Proof

# What the partitioner was allowed, which shows in what it did; with one device it does nothing.
_ALLOWED = re.compile(r", allow_spmd_sharding_propagation_to_\w+=\{[^}]*\}")
_ID_IN_NAME = re.compile(r"(?<=^HloModule jit_lazy_graph)_[0-9a-f]{16}\b")  # not where it replays
_LEFT_OUT = re.compile(r"\[([0-9,]*)\]\S* constant\(\{\.\.\.\}\)")  # group: its dimensions
_MOST_CONSTANTS = 1 << 14  # elements: printing so many takes 5 ms, and nobody can run meanwhile
_ALIAS = re.compile(r"\{([0-9, ]*)\}: \(([0-9]+), \{[0-9, ]*\}, (?:may|must)-alias\)")


@dataclass(frozen=True)
class ModuleArtifacts:
    """A program in the forms in which it is recorded."""

    stablehlo: bytes  # portable artifact: versioned bytecode, with source locations
    hlo: bytes  # serialized `xla.HloModuleProto`, before optimization
    compile_options: bytes  # serialized `xla.CompileOptionsProto`
    num_devices: int  # how many devices one execution runs on
    proof: Proof = field(default_factory=Proof)
    trace_error: Any = None  # what a snapshot says of the error that ended its recording


def proof_of(executable: Any) -> Proof:
    """Return what tells a loaded executable of XLA's from others; None gives an empty proof.

    The optimized module is taken as text with canonical names and without source locations, and
    with ``{...}`` in place of constants of more than ten elements where those have more than 16,384
    together. Printing a large module takes a while: ask in a thread that may take its time.
    """
    if executable is None:
        return Proof()
    printed = jaxapi.optimized_hlo(executable, constants=False)
    if 0 < _elements_left_out(printed) <= _MOST_CONSTANTS:
        printed = jaxapi.optimized_hlo(executable, constants=True)
    header, _, body = printed.partition("\n")
    text = f"{_ID_IN_NAME.sub('', _ALLOWED.sub('', header))}\n{body}"
    return Proof(
        fingerprint=jaxapi.executable_fingerprint(executable),
        optimised_hlo=blake3(text.encode()).hexdigest() if header else "",
        aliases=_aliases(header),
    )


def _elements_left_out(text: str) -> int:
    """Return how many elements the constants have that the text does not show."""
    shapes = [dimensions.split(",") for dimensions in _LEFT_OUT.findall(text)]
    return sum(math.prod(int(size) for size in shape) for shape in shapes)


def _aliases(header: str) -> tuple[str, ...]:
    _, _, aliases = header.partition("input_output_alias=")
    return tuple(f"{result or 0} <- {parameter}" for result, parameter in _ALIAS.findall(aliases))
