"""What is known of a compiled jitted function when it runs; must not know who watches it run."""

from __future__ import annotations

import contextlib
import functools
import weakref
from dataclasses import dataclass, field
from typing import Any

import jax

from snaprt import jaxapi
from snaprt.compile.key import module_digest
from snaprt.compile.nan_flag import FLAG_NAME
from snaprt.compile.obtain import artifacts_of, new_number
from snaprt.graph.artifacts import ModuleArtifacts

#: How many kinds of calls of a function are remembered.
MAX_KINDS = 256


@dataclass(frozen=True, eq=False)
class JitExecutable:
    """A program that JAX has lowered for some arguments, and compiles once.

    Attributes:
        number: Counts the executables of this process, lazy graphs included.
        graph_id: The first 16 hexadecimal digits of the digest of its StableHLO.
        lowered: The program, which holds its executable when it is compiled.
        module: Its arguments and results.
    """

    number: int
    graph_id: str
    lowered: jax.stages.Lowered
    module: jaxapi.JitModule

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.module.name

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

    @property
    def is_watched(self) -> bool:
        """Whether its last result says that another one has a NaN or an infinity."""
        return self.module.output_names[-1:] == (FLAG_NAME,)

    @property
    def is_compiled(self) -> bool:
        """Whether XLA has compiled it."""
        return jaxapi.is_compiled(self.lowered)

    def artifacts(self) -> ModuleArtifacts:
        """Return the program in the forms in which it is recorded; the first call makes them."""
        return _artifacts(self)


@functools.lru_cache(maxsize=8)
def _artifacts(executable: JitExecutable) -> ModuleArtifacts:
    compiled = None
    with contextlib.suppress(Exception):  # it cannot be compiled: nothing ran
        compiled = executable.lowered.compile()  # else it is by now: this is what JAX runs
    return artifacts_of(executable.lowered, compiled)


@dataclass(frozen=True)
class _Known:
    """What is known of a traced function.

    Attributes:
        lowered: Its executables, by the identity of what was lowered.
        kinds: Which of them each kind of call runs, and what must stay alive for that.
    """

    lowered: dict[int, JitExecutable] = field(default_factory=dict)
    kinds: dict[Any, tuple[JitExecutable, Any]] = field(default_factory=dict)


# JAX forgets a traced function when nobody holds it any more, and so do we.
_known: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()


def executable_ahead(ahead: jaxapi.CompiledAhead) -> JitExecutable:
    """Return the executable of a program that was compiled ahead of time: always the same."""
    if ahead.known is None:
        ahead.known = _described(ahead.lowered, ahead.like)
    return ahead.known


def _described(lowered: jax.stages.Lowered, call: jaxapi.FlatCall) -> JitExecutable:
    module = jaxapi.describe_jit_module(lowered, call)
    digest = module_digest(jaxapi.stablehlo_without_locations(lowered))
    return JitExecutable(new_number(), digest[:16], lowered, module)


def executable_of(call: jaxapi.FlatCall) -> JitExecutable:
    """Return the executable that JAX runs for a call: the same object for the same program.

    Raises:
        Exception: Whatever JAX raises for a program that it cannot lower.
    """
    known = _known.setdefault(call.params["jaxpr"], _Known())
    kind, alive = jaxapi.kind_of_flat_call(call)
    if kind in known.kinds:
        return known.kinds[kind][0]
    lowered = jaxapi.lower_jit_call(call)
    identity = jaxapi.identity_of_lowered(lowered)
    found = known.lowered.get(identity)
    if found is None:
        found = known.lowered[identity] = _described(lowered, call)
    if len(known.kinds) >= MAX_KINDS:
        known.kinds.clear()
    known.kinds[kind] = found, alive
    return found
