"""The program of docs/how-to/coming-from-pytorch-xla.md, with its imports and with two changed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from programs import SNAPRT, run_program

pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'snaprt[demo]'")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "coming-from-pytorch-xla.md").read_text("utf-8")
(PROGRAM,) = re.findall(r"<!-- tested -->\n```python\n(.*?)```", PAGE, re.DOTALL)
(DIFF,) = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
ON_CPU = Path(__file__).parent / "xla_programs" / "on_cpu.py"


def _changed() -> str:
    """Return the program with the lines of the diff changed."""
    lines = DIFF.splitlines()
    removed = "".join(f"{line[1:]}\n" for line in lines if line.startswith("-"))
    added = "".join(f"{line[1:]}\n" for line in lines if line.startswith("+"))
    assert PROGRAM.count(removed) == 1
    return PROGRAM.replace(removed, added)


def _results(run: subprocess.CompletedProcess[str]) -> tuple[list[float], float]:
    losses = [float(text) for text in re.findall(r"loss (\S+)", run.stdout)]
    (accuracy,) = re.findall(r"accuracy (\S+)", run.stdout)
    return losses, float(accuracy)


@pytest.mark.slow
def test_the_program_trains_as_pytorch_does_with_both_ways_to_run_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "changed.py").write_text(_changed())
    expected = _results(run_program((str(ON_CPU), "train.py"), folder=tmp_path))
    assert len(expected[0]) == 15
    assert expected[1] > 80
    runs = ((*SNAPRT, "run", "--lazy", "--torch", "--", "train.py"), ("changed.py",))
    for words in runs:
        (tmp_path / "digits.pt").unlink()
        losses, accuracy = _results(run_program(words, folder=tmp_path))
        assert losses == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
        assert accuracy == expected[1]
        saved = torch.load(tmp_path / "digits.pt", weights_only=True)
        assert all(type(value) is torch.Tensor for value in saved.values())
