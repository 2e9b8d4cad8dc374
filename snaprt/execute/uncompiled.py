"""A program that could not be compiled, in the forms in which programs are recorded.

It is lowered again, never compiled.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from snaprt import jaxapi
from snaprt.execute.collect import GRAPH_NAME
from snaprt.execute.compile import ModuleArtifacts
from snaprt.execute.key import module_digest
from snaprt.execute.lower import lowering
from snaprt.lazy.graph import Program


@dataclass(frozen=True, eq=False)
class UncompiledProgram:
    """A lowered program; the attributes are those of `snaprt.execute.compile.Executable`."""

    graph_id: str
    devices: tuple[jaxapi.Device, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    lowered: jax.stages.Lowered
    name: str = GRAPH_NAME
    number: int = 0

    def artifacts(self) -> ModuleArtifacts:
        """Return the program in the forms in which it is recorded."""
        return ModuleArtifacts(
            stablehlo=jaxapi.portable_stablehlo(self.lowered),
            hlo=jaxapi.hlo_proto(self.lowered),
            compile_options=jaxapi.compile_options(self.devices).SerializeAsString(),
            num_devices=len(self.devices),
        )


def uncompiled(program: Program) -> UncompiledProgram:
    """Lower a program with all its literals as constants.

    Its inputs are ``program.arguments(frozenset())``.
    """
    lowered = lowering(program, frozenset())()
    return UncompiledProgram(
        graph_id=module_digest(jaxapi.stablehlo_without_locations(lowered))[:16],
        devices=jaxapi.devices_of_lowered(lowered),
        input_names=tuple(f"arg{number}" for number in range(len(program.inputs))),
        output_names=tuple(f"out{number}" for number in range(len(program.outputs))),
        lowered=lowered,
    )
