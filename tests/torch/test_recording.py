"""Steps that train PyTorch modules are recorded, replayed and searched like any other."""

from pathlib import Path

import models
import pytest
import torch
from torch import nn

import snaprt
import snaprt.torch
from snaprt.cli.main import main
from snaprt.snapshot.format.read import SnapshotFile, open_snapshot
from snaprt.snapshot.recorder.record import process_recorder


def _train(model: nn.Module, folder: Path, steps: int = 3) -> None:
    """Train on random tokens, lazily, and record the last step."""
    snaprt.torch.wrap(model)
    loss_of = snaprt.torch.wrap(nn.CrossEntropyLoss())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(1)
    with snaprt.torch.lazy():
        for step in range(steps):
            tokens, target = models.tokens(generator)
            with snaprt.record("all" if step == steps - 1 else "execution=1000000", folder):
                optimizer.zero_grad()
                loss_of(model(tokens), target).backward()
                optimizer.step()
                snaprt.mark_step()
    assert process_recorder().flush(60)


def _only(folder: Path) -> SnapshotFile:
    (path,) = folder.glob("*.inputs.snap")
    return open_snapshot(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dump")
    _train(models.Transformer(2), folder)
    return folder


def test_parameters_have_the_names_of_pytorch(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = _only(folder)
    names = {name for name, _ in models.Transformer(2).named_parameters()}
    assert names <= {*file.array_names}
    assert {f"{name}.exp_avg" for name in names} <= {*file.array_names}
    assert {"tokens", "target"} <= {*file.array_names}
    assert file.array("layers.1.attn.q.weight").shape == (16, 16)
    assert main(["inspect", *map(str, folder.glob("*.inputs.snap"))]) == 0
    assert "layers.1.attn.q.weight" in capsys.readouterr().out


def test_a_whole_step_is_one_program_that_replays_bit_for_bit(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *map(str, folder.glob("*.inputs.snap"))]) == 0
    assert "identical, bit for bit" in capsys.readouterr().out
