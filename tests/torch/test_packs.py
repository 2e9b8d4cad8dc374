"""Small gradients and states of optimizers are packed, and nobody sees it but in the time."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import nn

import snaprt
import snaprt.torch
from snaprt import metrics
from snaprt.snapshot.format.read import open_snapshot
from snaprt.snapshot.recorder.record import process_recorder
from snaprt.torch import packs

Optimizer = torch.optim.Optimizer
MakeOptimizer = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda params: torch.optim.SGD(params, 0.1),
    "momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, nesterov=True),
    "Adam": lambda params: torch.optim.Adam(params, 1e-2, eps=1e-6, amsgrad=True),
    "AdamW": lambda params: torch.optim.AdamW(params, 1e-2, eps=1e-6),
    "Adamax": lambda params: torch.optim.Adamax(params, 1e-2, eps=1e-6),
    "NAdam": lambda params: torch.optim.NAdam(params, 1e-2, eps=1e-6),
    "RAdam": lambda params: torch.optim.RAdam(params, 1e-2, eps=1e-6),
    "RMSprop": lambda params: torch.optim.RMSprop(params, 1e-3, momentum=0.9, centered=True),
    "Rprop": lambda params: torch.optim.Rprop(params, 1e-3),
    "Adadelta": lambda params: torch.optim.Adadelta(params, 1.0),
    "ASGD": lambda params: torch.optim.ASGD(params, 1e-2),
    "Adagrad": lambda params: torch.optim.Adagrad(params, 1e-2),
}


class Two(nn.Module):
    """Two parts of the same shapes, run in either order, beside one weight that is not small."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.right = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.large = nn.Linear(4, packs.MOST_ELEMENTS // 2)

    def parts(self, step: int) -> tuple[nn.Module, nn.Module]:
        return (self.left, self.right) if step % 2 else (self.right, self.left)


def _groups(model: Two) -> list[dict[str, Any]]:
    vectors = [p for p in model.parameters() if p.ndim < 2]
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return [{"params": vectors, "lr": 2e-3}, {"params": matrices}]


def _train(make: MakeOptimizer, *, is_ours: bool, steps: int = 6) -> Iterator[tuple[Two, Any]]:
    torch.manual_seed(0)
    model = Two()
    if is_ours:
        for part in model.children():
            snaprt.torch.wrap(part)
    optimizer = make(_groups(model))
    generator = torch.Generator().manual_seed(1)
    with snaprt.torch.lazy():
        for step in range(steps):
            x = torch.randn(5, 4, generator=generator).to(model.left[0].weight.device)
            optimizer.zero_grad()
            for _ in range(1 + step % 3):  # gradients add up
                first, second = model.parts(step)
                model.large(second(first(x))).square().mean().backward()
            if step % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1, step)
            optimizer.step()
            snaprt.mark_step()
            yield model, optimizer


def _state(model: Two, optimizer: Optimizer) -> list[torch.Tensor]:
    states = [optimizer.state[p] for p in model.parameters()]
    tensors = [value for state in states for _, value in sorted(state.items())]
    return [
        t.detach().cpu() for t in [*model.parameters(), *tensors] if isinstance(t, torch.Tensor)
    ]


def _close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-5, rtol=2e-4, check_dtype=False)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_each_optimizer_steps_packed_parameters_as_pytorch_does(make: MakeOptimizer) -> None:
    *_, ours = _train(make, is_ours=True, steps=3)
    *_, theirs = _train(make, is_ours=False, steps=3)
    _close(_state(*ours), _state(*theirs))


def _read(step: int, model: Two, optimizer: Optimizer) -> None:
    _state(model, optimizer)


def _write(step: int, model: Two, optimizer: Optimizer) -> None:
    state = optimizer.state[model.left[0].weight]
    state["exp_avg"].mul_(0.5)
    model.right[2].bias.data = model.right[2].bias.data * 0.9
    view = state["exp_avg_sq"][0]
    assert view.shape == (4,)


def _restart(step: int, model: Two, optimizer: Optimizer) -> None:
    if step == 3:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if step == 4:
        optimizer.state[model.left[0].bias]["step"].fill_(1.0)
    if step == 5:
        del optimizer.state[model.large.weight]


def _scale_one(step: int, model: Two, optimizer: Optimizer) -> None:
    gradient = model.left[0].weight.grad
    assert gradient is not None
    gradient.mul_(2)
    model.right[0].bias.grad = None


@pytest.mark.parametrize("between", [_read, _write, _restart, _scale_one])
def test_what_is_done_to_packed_tensors_is_done_to_those_of_pytorch(
    between: Callable[[int, Two, Optimizer], None],
) -> None:
    results = []
    for is_ours in (True, False):
        for step, both in enumerate(_train(OPTIMIZERS["AdamW"], is_ours=is_ours)):
            between(step, *both)
        results.append(_state(*both))
    _close(*results)


def test_packed_gradients_behave_as_tensors_of_their_own() -> None:
    torch.manual_seed(0)
    plain = Two()
    ours = copy.deepcopy(plain)
    snaprt.torch.wrap(ours.left)
    results = []
    for model in (plain, ours):
        x = torch.ones(2, 4).to(model.left[0].weight.device)
        params = [*model.left.parameters()]

        def backward(model: Two = model, x: torch.Tensor = x) -> None:
            model.left(x).square().sum().backward()

        with snaprt.torch.lazy():
            backward()
            first: Any = params[0].grad
            backward()  # which adds to it
            added = first.clone()
            norms = [nn.utils.clip_grad_norm_(params, 1e3, order) for order in (0, 1, 2, torch.inf)]
            norms.append(nn.utils.clip_grad_norm_([*params, *params], 0.5))
            params[1].grad.zero_()
            params[2].grad = params[2].grad * 2
            backward()
            summed = [p.grad.clone() for p in params]
            model.left.zero_grad()
            backward()
            ends = [first, added, *norms, *summed, *[p.grad for p in params]]
            results.append([tensor.cpu() for tensor in ends])
    _close(results[1], results[0])


def test_a_view_of_a_packed_tensor_shows_what_a_step_has_made_of_it() -> None:
    results = []
    for is_ours in (True, False):
        steps = _train(OPTIMIZERS["AdamW"], is_ours=is_ours)
        for _ in range(3):
            model, optimizer = next(steps)
        view = optimizer.state[model.left[0].weight]["exp_avg"][0]
        view[1:] *= 0.5
        next(steps)
        results.append([view.cpu(), *_state(model, optimizer)])
    _close(*results)


def _handles(steps: Iterator[Any], count: int) -> int:
    for _ in range(5):
        next(steps)
    before = metrics.counter_value("CreateDataHandles") or 0
    for _ in range(count):
        next(steps)
    return ((metrics.counter_value("CreateDataHandles") or 0) - before) // count


def _train_transformer() -> Iterator[None]:
    model = snaprt.torch.wrap(models.Transformer(2))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens, target = models.tokens(torch.Generator().manual_seed(1))
    with snaprt.torch.lazy():
        while True:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens), target).backward()
            optimizer.step()
            snaprt.mark_step()
            yield


def test_a_step_hands_out_few_arrays_unless_that_is_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = len([*models.Transformer(2).parameters()])
    steps = _train_transformer()
    assert params < _handles(steps, 2) < params + 8
    monkeypatch.setenv("SNAPRT_TORCH_PACK", "0")
    assert _handles(steps, 2) > 3 * params
    monkeypatch.delenv("SNAPRT_TORCH_PACK")
    assert params < _handles(steps, 2) < params + 8


def test_recording_changes_no_program(tmp_path: Path) -> None:
    steps = _train_transformer()
    _handles(steps, 1)
    before = metrics.counter_value("UncachedCompile")
    with snaprt.record("all", tmp_path):
        next(steps)
    assert process_recorder().flush(60)
    assert metrics.counter_value("UncachedCompile") == before
    (path,) = tmp_path.glob("*.inputs.snap")
    assert any(".exp_avg+" in name for name in open_snapshot(path).array_names)
