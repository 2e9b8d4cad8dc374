"""JAX functions as HLO programs without calls, which localizing and minifying take."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from snaprt_replay.hlo.hlo_module import entry_computation
from snaprt_replay.localize.program import FlatModule, flatten
from snaprt_replay.minify.candidate import Candidate

from snaprt import jaxapi
from snaprt.hlo.proto import HloModuleProto, parse


def flat_program(function: Callable, *arguments: object) -> FlatModule:
    """Return the program of a function for these arguments, of which it keeps all."""
    module = jax.jit(function, keep_unused=True).lower(*arguments).compiler_ir("stablehlo")
    return flatten(parse(HloModuleProto, jaxapi.module_to_hlo_proto(module), "test"))


def normal(*shape: int) -> np.ndarray:
    """Return the same normally distributed float32 numbers each time."""
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def opcodes(candidate: Candidate) -> list[str]:
    """Return what the entry of a candidate's program does, in order."""
    entry = entry_computation(candidate.modules[0])
    plumbing = ("parameter", "tuple", "constant")
    return [one.opcode for one in entry.instructions if one.opcode not in plumbing]
