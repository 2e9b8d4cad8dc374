"""What a command says of a module that MLIR or XLA refuses is its own error, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from snaprt import jaxapi

Command = Callable[..., tuple[int, str, str]]

LINE_OF_MLIR = re.compile(
    r'^loc\(|"-":|^error: failed to deserialize|INVALID_ARGUMENT|UNKNOWN:', re.M
)


def module(body: str = "", kind: str = "tensor<4xf32>") -> str:
    return f"""module {{
  func.func @main(%a: {kind}) -> {kind} {{
    {body}
    return %{"b" if body else "a"} : {kind}
  }}
}}"""


@pytest.fixture(scope="module")
def artifact() -> bytes:
    return jaxapi.portable_artifact(jax.jit(jnp.sin).lower(jnp.ones(4)).compiler_ir())


def refused(run: Command, *words: str | Path) -> str:
    """Run a command that is to fail by an error of ours alone, and return that."""
    status, _, errors = run(*words)
    assert status == 2, errors
    assert errors.startswith("error: "), errors
    assert "\nhint: " in errors
    assert not LINE_OF_MLIR.search(errors), errors
    assert len(errors.splitlines()) == 3, errors
    return errors


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (module("%b = stablehlo.sine sine"), r"line 3, column \d+: expected SSA operand"),
        (module("%b = stablehlo.nosuch %a"), r"line 3, column \d+: custom op 'stablehlo.nosuch'"),
        (module().replace("@main", "@other"), "the module has no function 'main'"),
        ("module { func.func private @main(tensor<4xf32>) }", "the module has no function 'main'"),
        ("module { }", "the module has no function 'main'"),
    ],
)
def test_a_module_that_cannot_be_read_is_told_with_its_place(
    snaprt: Command, tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "bad.mlir").write_text(text)
    (tmp_path / "good.mlir").write_text(module())
    for words in (
        ("diff", tmp_path / "good.mlir", tmp_path / "bad.mlir"),
        ("inspect", tmp_path / "bad.mlir"),
        ("replay", tmp_path / "bad.mlir", "--random", "0"),
        ("export", tmp_path / "bad.mlir", "--to", "stablehlo", "-o", tmp_path / "out.mlir"),
    ):
        assert re.search(f"bad.mlir: {said}", refused(snaprt, *words))


def test_damaged_bytecode_prints_nothing_of_mlir(
    snaprt: Command, tmp_path: Path, artifact: bytes
) -> None:
    (tmp_path / "good.mlirbc").write_bytes(artifact)
    (tmp_path / "bad.mlirbc").write_bytes(artifact[: len(artifact) // 2])
    told = refused(snaprt, "diff", tmp_path / "good.mlirbc", tmp_path / "bad.mlirbc")
    assert "bad.mlirbc: " in told


def test_hlo_text_that_cannot_be_read_is_told_with_its_place(
    snaprt: Command, tmp_path: Path, artifact: bytes
) -> None:
    proto = jaxapi.module_to_hlo_proto(jaxapi.parse_module(artifact))
    text = re.sub(r"\bsine\(", "nosuch(", jaxapi.hlo_text(proto))
    (tmp_path / "bad.hlo").write_text(text)
    told = refused(snaprt, "inspect", tmp_path / "bad.hlo")
    assert re.search(r"line \d+, column \d+: expects opcode but sees: nosuch", told)


def test_an_operation_that_stablehlo_or_hlo_lacks_is_named(snaprt: Command, tmp_path: Path) -> None:
    (tmp_path / "a.mlir").write_text(module("%b = arith.addf %a, %a : tensor<4xf32>"))
    out = tmp_path / "out.mlirbc"
    for words in (
        ("export", tmp_path / "a.mlir", "--to", "stablehlo", "-o", out),
        ("inspect", tmp_path / "a.mlir", "--hlo"),
    ):
        assert "arith.addf" in refused(snaprt, *words)
    assert not out.exists()


def test_dynamic_sizes_are_shown_and_not_run(snaprt: Command, tmp_path: Path) -> None:
    path = tmp_path / "dynamic.mlir"
    path.write_text(module(kind="tensor<?x3xf32>"))
    assert "float32[?,3]" in snaprt("inspect", path)[1]
    assert "its module takes float32[?,3]" in refused(snaprt, "replay", path, "--random", "0")
