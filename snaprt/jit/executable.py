"""What is known of a compiled jitted function when it runs; must not know who watches it run."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import Any

import jax

from snaprt import jaxapi
from snaprt.execute.compile import ModuleArtifacts, artifacts_of, new_number
from snaprt.execute.key import module_digest


@dataclass(frozen=True, eq=False)
class JitExecutable:
    """A program that JAX has lowered for some arguments, and compiles once.

    Attributes:
        number: Counts the executables of this process, lazy graphs included.
        lowered: The program, which holds its executable when it is compiled.
        module: Its arguments and results.
    """

    number: int
    lowered: jax.stages.Lowered
    module: jaxapi.JitModule

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.module.name

    @functools.cached_property
    def graph_id(self) -> str:
        """The first 16 hexadecimal digits of the digest of its StableHLO."""
        return module_digest(jaxapi.stablehlo_without_locations(self.lowered))[:16]

    @property
    def devices(self) -> tuple[jaxapi.Device, ...]:
        """The devices it runs on."""
        return self.module.devices

    @property
    def input_names(self) -> tuple[str, ...]:
        """A name for each argument of the module."""
        return self.module.input_names

    @property
    def output_names(self) -> tuple[str, ...]:
        """A name for each result of the module."""
        return self.module.output_names

    @property
    def donated(self) -> tuple[int, ...]:
        """The arguments whose memory it takes."""
        return self.module.donated

    def artifacts(self) -> ModuleArtifacts:
        """Return the program in the forms in which it is recorded; the first call makes them."""
        return _artifacts(self)


@functools.lru_cache(maxsize=8)
def _artifacts(executable: JitExecutable) -> ModuleArtifacts:
    # It is compiled by now: this is what JAX runs.
    return artifacts_of(executable.lowered, executable.lowered.compile())


# Of each traced function: what was lowered of it, which JAX keeps as long as the function.
_executables: weakref.WeakKeyDictionary[Any, dict[int, JitExecutable]] = weakref.WeakKeyDictionary()


def executable_of(call: jaxapi.FlatCall) -> JitExecutable:
    """Return the executable that JAX runs for a call: the same object for the same program.

    Raises:
        Exception: Whatever JAX raises for a program that it cannot lower.
    """
    lowered = jaxapi.lower_jit_call(call)
    lowerings = _executables.setdefault(call.params["jaxpr"], {})
    which = jaxapi.identity_of_lowered(lowered)
    found = lowerings.get(which)
    if found is None:
        module = jaxapi.describe_jit_module(lowered, call)
        found = lowerings[which] = JitExecutable(new_number(), lowered, module)
    return found
