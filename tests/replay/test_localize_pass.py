"""A real miscompile: a pass in XLA's own pipeline that breaks an operation after optimization."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.extend.xla
import jax.numpy as jnp
import pytest
from snaprt_replay.load.load import load
from snaprt_replay.localize.findings import Localization
from snaprt_replay.localize.pipeline import LocalizeRequest, localize
from snaprt_replay.run.variants.variants import parse_variant

from snaprt import jaxapi

WRONG_PASS = """
import jax.extend.xla
from snaprt.hlo.proto import HloModuleProto, parse

def break_tanh(content):
    module = parse(HloModuleProto, content, "module")
    broken = False
    for computation in module.computations:
        if {NEEDED} <= {{one.opcode for one in computation.instructions}}:
            for one in computation.instructions:
                if one.opcode == "tanh":
                    one.opcode, broken = "sine", True
    return module.SerializeToString() if broken else None

jax.extend.xla.register_hlo_module_transformation(break_tanh, name="break-tanh")
"""


@pytest.fixture
def localize_with_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Localization]:
    """Return a function that localizes a program on an XLA with the wrong pass against one without.

    Its argument says with which operations in one computation the pass breaks a `tanh`.
    """
    lowered = jax.jit(lambda x: jnp.exp(jnp.tanh(x @ x.T) * 2 + 1).sum(0)).lower(jnp.ones((3, 4)))
    program = tmp_path / "program.stablehlo"
    program.write_bytes(jaxapi.portable_stablehlo(lowered))
    environment = tmp_path / "python"
    # What it compiles is wrong: keep it out of the cache that the other side uses.
    environment.write_text(
        f'#!/bin/sh\nexport SNAPRT_CACHE=0 PYTHONPATH="{tmp_path}:$PYTHONPATH"\n'
        f'exec "{sys.executable}" "$@"\n'
    )
    environment.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))

    def run(needed: set[str]) -> Localization:
        (tmp_path / "sitecustomize.py").write_text(WRONG_PASS.format(NEEDED=needed))
        request = LocalizeRequest(parse_variant(f"python={environment}"), parse_variant("cpu"))
        return localize(load(program, random_seed=0), request)

    return run


@pytest.mark.full  # the next one is the same and more
def test_an_operation_that_a_compiler_pass_breaks_is_found(
    localize_with_pass: Callable[..., Localization],
) -> None:
    found = localize_with_pass({"tanh"})
    assert [one.opcode for one in found.instructions] == ["tanh"], found.sentence
    assert "test_localize_pass.py" in found.instructions[0].source


def test_a_pass_that_breaks_operations_together_is_named(
    localize_with_pass: Callable[..., Localization],
) -> None:
    found = localize_with_pass({"tanh", "exponential"})
    assert found.kind == "interaction", found.sentence
    tried = {one.variant.rpartition("=")[2] for one in found.passes}
    healing = {one.variant.rpartition("=")[2] for one in found.passes if one.error <= 1}
    assert "fusion" in healing < tried
    assert "disable-hlo-pass=fusion" in found.sentence
