"""Steps that train PyTorch modules are recorded, replayed and searched like any other."""

import inspect
import json
from pathlib import Path

import models
import pytest
import torch
from programs import run_program
from torch import nn

import snaprt
import snaprt.torch
from snaprt.cli.main import main
from snaprt.runtime.step import thread_trace
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
    assert any(name.endswith(f".exp_avg+{len(names) - 1}") for name in file.array_names)
    assert {"tokens", "target"} <= {*file.array_names}
    assert file.array("layers.1.attn.q.weight").shape == (16, 16)
    assert main(["inspect", *map(str, folder.glob("*.inputs.snap"))]) == 0
    assert "layers.1.attn.q.weight" in capsys.readouterr().out


def test_a_function_has_the_names_of_its_arguments_model_and_variables(tmp_path: Path) -> None:
    model, criterion = nn.Sequential(nn.Linear(4, 3)), nn.CrossEntropyLoss()
    average = torch.zeros(3, device=snaprt.torch.device())

    @snaprt.torch.wrap
    def loss_of(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return criterion(model(images) - average, labels)

    with snaprt.torch.lazy(), snaprt.record("all", tmp_path):
        loss = loss_of(torch.ones(2, 4), torch.tensor([0, 2]))
        snaprt.mark_step()
    assert process_recorder().flush(60)
    assert loss.requires_grad
    names = {*_only(tmp_path).array_names}
    assert names >= {"0.weight", "0.bias", "images", "labels"}
    assert any(name.endswith(".average") for name in names)


def test_a_whole_step_is_one_program_that_replays_bit_for_bit(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *map(str, folder.glob("*.inputs.snap"))]) == 0
    assert "identical, bit for bit" in capsys.readouterr().out


def test_a_step_compiled_as_a_whole_replays_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = snaprt.torch.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)

    @snaprt.torch.jit
    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for step in range(3):
        with snaprt.record("all" if step == 2 else "execution=1000000", tmp_path):
            train_step(torch.randn(4, 4))
    assert process_recorder().flush(60)
    names = {*_only(tmp_path).array_names}
    assert {"0.weight", "2.bias", "x", "0.bias.exp_avg+3"} <= names
    assert main(["replay", *map(str, tmp_path.glob("*.inputs.snap"))]) == 0
    assert "identical, bit for bit" in capsys.readouterr().out


WITHOUT_PYTORCH = """
import sys

sys.modules["torch"] = sys.modules["torchax"] = None  # importing them fails
from snaprt.cli.main import main
from snaprt.runtime.step import thread_trace

sys.exit(main(["replay", sys.argv[1]]))
"""


def test_replaying_needs_no_pytorch(folder: Path) -> None:
    (path,) = folder.glob("*.inputs.snap")
    assert "identical, bit for bit" in run_program(WITHOUT_PYTORCH, path).stdout


class Logarithm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.offset = nn.Parameter(torch.full((width,), 10.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(self.inner(x).tanh() + self.offset)


def test_a_nan_of_one_layer_is_localized_to_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = [nn.Linear(8, 8), nn.Sigmoid(), Logarithm(8), nn.Sigmoid(), nn.Linear(8, 8)]
    model = snaprt.torch.wrap(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.randn(4, 8)
    with snaprt.torch.lazy(), snaprt.record("nan, first=1", tmp_path):
        for step in range(3):
            if step == 2:
                with torch.no_grad():
                    model[2].offset.sub_(100.0)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            snaprt.mark_step()
    assert process_recorder().flush(60)
    (path,) = tmp_path.glob("*.inputs.snap")
    assert main(["localize", str(path)]) == 1
    lines, first = inspect.getsourcelines(Logarithm.forward)
    line = first + next(number for number, text in enumerate(lines) if "torch.log" in text)
    found = capsys.readouterr().out.splitlines()[-1]
    assert f"test_recording.py:{line} (Logarithm.forward)" in found
    assert "produces NaN from finite inputs" in found


def test_what_a_step_donates_is_recorded_as_it_was(tmp_path: Path) -> None:
    model = snaprt.torch.wrap(nn.Linear(64, 128, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x = torch.randn(4, 64)
    before: list[torch.Tensor] = []
    with snaprt.torch.lazy():
        for step in range(6):
            wanted = "all" if step == 5 else "execution=1000000"
            if step == 3:
                kept = model.weight.detach().clone()
                before.append(kept.cpu())
            with snaprt.record(wanted, tmp_path):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                snaprt.mark_step()
        assert torch.equal(kept.cpu(), before[0])
    assert process_recorder().flush(60)
    file = _only(tmp_path)
    assert file.manifest.execution.donated
    gradient = torch.from_numpy(file.array("weight")).requires_grad_()
    nn.functional.linear(x, gradient).square().mean().backward()
    assert gradient.grad is not None
    velocity = 0.9 * torch.from_numpy(file.array("weight.momentum_buffer")) + gradient.grad
    torch.testing.assert_close(model.weight.detach().cpu(), gradient.detach() - 0.1 * velocity)


TRAINING = """
import json, torch, snaprt, snaprt.torch
from torch import nn

torch.manual_seed(0)
model = snaprt.torch.wrap(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)))
loss_of = snaprt.torch.wrap(nn.MSELoss())
optimizer = torch.optim.Adam(model.parameters())
losses = []
with snaprt.torch.lazy():
    for step in range(4):
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        loss = loss_of(model(x), x[:, :1])
        loss.backward()
        optimizer.step()
        snaprt.mark_step()
        losses.append(loss.item())
names = ("PersistentCacheHit", "PersistentCacheMiss", "UncachedCompile")
print(json.dumps([losses, *[snaprt.metrics.counter_value(name) or 0 for name in names]]))
"""


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    cache = tmp_path / "cache"
    runs = [json.loads(run_program(script, SNAPRT_CACHE_DIR=cache).stdout) for _ in range(2)]
    (cold, _, missed, compiled), (warm, hits, missed_again, compiled_again) = runs
    assert compiled > 0
    assert (hits, missed_again, compiled_again) == (missed, 0, 0)
    assert warm == cold


def test_a_decorated_function_runs_as_its_scope_was_asked_to():
    @snaprt.torch.lazy(steady=True, fullgraph=True)
    def asked() -> tuple[bool, bool]:
        return thread_trace().steady, thread_trace().fullgraph

    assert asked() == (True, True)
