"""The commands of docs/how-to/team-cache.md, run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "how-to" / "team-cache.md"
BLOCKS = re.findall(r"<!-- tested -->\n```sh\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
PROGRAM = """
import jax.numpy as jnp
print(float(jnp.sum(jnp.arange(8.0) ** 2)))
"""
COMMAND = f'#!/bin/sh\nexec "{sys.executable}" -m snaprt "$@"\n'


@pytest.fixture
def surroundings(bucket: str, tmp_path: Path) -> dict[str, str]:
    """A folder with a program and the command ``snaprt``; the environment to work in it."""
    (tmp_path / "train.py").write_text(PROGRAM)
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "snaprt").write_text(COMMAND)
    (commands / "snaprt").chmod(0o755)
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "cache"), str(ROOT / "replay")]),
        "SNAPRT_CACHE_DIR": str(tmp_path / "own-cache"),
    }


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.strip().splitlines()[-1])
def test_the_commands_of_the_document_work(
    surroundings: dict[str, str], tmp_path: Path, block: str
) -> None:
    filled = "snaprt run --lazy -- train.py\n"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", filled + block],
        cwd=tmp_path,
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "140.0" in done.stdout


def test_every_block_of_commands_is_tested() -> None:
    assert len(BLOCKS) == DOCUMENT.read_text("utf-8").count("```sh")
