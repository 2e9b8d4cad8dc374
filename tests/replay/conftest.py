"""Real files to replay, each kind made once: by the recorder, by XLA, and by lowering."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from programs import run_program
from snaprt_replay.run.workers import Workers

from snaprt.cli.main import main

LAZY_PROGRAM = """
import jax, jax.numpy as jnp, snaprt
with snaprt.lazy():
    x = jnp.asarray([[0.5, -1.0, 2.0], [1.5, 0.25, -3.0]])
    w = jnp.linspace(-1.0, 1.0, 6).reshape(3, 2).astype(jnp.bfloat16)
    snaprt.mark_step(wait=True)
    y = jnp.tanh(x @ w.astype(jnp.float32))
    z = (x @ w.astype(jnp.float32)).astype(jnp.bfloat16)
    positive = y > 0
    snaprt.mark_step(wait=True)
"""

PLAIN_PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
def step(x, w):
    y = jnp.tanh(x @ w)
    return jax.nn.softmax(y), y.sum(), y > 0
jax.jit(step)(np.ones((4, 3), np.float32), np.ones((3, 2), np.float32))[1].block_until_ready()
"""


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Two processes that run programs."""
    with Workers(2) as processes:
        yield processes


@pytest.fixture
def snaprt(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs the command line and gives status, stdout and stderr."""

    def run(*words: str | Path) -> tuple[int, str, str]:
        status = main([str(word) for word in words])
        return status, *capfd.readouterr()

    return run


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the ``.inputs.snap`` of a recorded step; its ``.outputs.snap`` lies beside it."""
    folder = tmp_path_factory.mktemp("recorded")
    run_program(LAZY_PROGRAM, XLA_FLAGS=f"--xla_dump_to={folder} --xla_dump_hlo_snapshots")
    found = sorted(folder.glob("*.inputs.snap"), key=lambda path: path.stat().st_size)
    assert found, list(folder.iterdir())
    return found[-1]


@pytest.fixture(scope="session")
def xla_snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an HloSnapshot that XLA itself wrote."""
    folder = tmp_path_factory.mktemp("xla")
    run_program(PLAIN_PROGRAM, XLA_FLAGS=f"--xla_dump_to={folder} --xla_dump_hlo_snapshots")
    return next(folder.glob("*jit_step*.snapshot.*.pb"))


@pytest.fixture(scope="session")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Return one module in each form that brings no inputs, by the name of its format."""
    import jax
    import jax.numpy as jnp
    from snaprt_replay.load import sniff

    from snaprt import jaxapi

    def function(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.tanh(x @ w), x.sum() > 0

    lowered = jax.jit(function).lower(jnp.ones((4, 3)), jnp.ones((3, 2)))
    folder = tmp_path_factory.mktemp("modules")
    contents = {
        sniff.MLIR_TEXT: ("module.mlir", lowered.as_text().encode()),
        sniff.MLIR_BYTECODE: ("module.stablehlo", jaxapi.portable_stablehlo(lowered)),
        sniff.HLO_TEXT: ("module.hlo.txt", lowered.as_text("hlo").encode()),
        sniff.HLO_MODULE: ("module.hlo.pb", jaxapi.hlo_proto(lowered)),
    }
    paths = {}
    for form, (name, content) in contents.items():
        paths[form] = folder / name
        paths[form].write_bytes(content)
    return paths


@pytest.fixture
def rewritten(recorded: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies the recorded pair with other outputs.

    Its argument gets each output's name and value and returns the value to store.
    """
    from several_devices import write_anew

    from snaprt.snapshot.format.read import sibling_outputs

    def rewrite(change: Callable[[str, np.ndarray], np.ndarray]) -> Path:
        outputs = sibling_outputs(recorded)
        assert outputs is not None
        write_anew(outputs, tmp_path / outputs.name, change)
        copy = tmp_path / recorded.name
        copy.write_bytes(recorded.read_bytes())
        return copy

    return rewrite


@pytest.fixture
def spoiled(rewritten: Callable[..., Path]) -> Path:
    """Return a copy of the recorded pair in which one element of each float32 output is wrong."""

    def spoil(name: str, value: np.ndarray) -> np.ndarray:
        if value.dtype == np.float32:
            value.reshape(-1)[2] *= 1.5
        return value

    return rewritten(spoil)
