"""Tensors that a forward pass keeps in attributes of its module."""

import copy
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import snaprt
import snaprt.torch
from snaprt import metrics
from snaprt.errors import UsageError


class Layer(nn.Module):
    """Keeps what it computes, with and without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.penalty: Any = None
        self.seen: Any = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.penalty = y.abs().mean()
        self.seen = {"mean": y.detach().mean(0), "parts": [x, y.detach()[0]]}
        self.input = x
        return y


def _layers() -> nn.Module:
    return nn.Sequential(Layer(), nn.Tanh(), Layer())


def _pruned() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    prune.l1_unstructured(model[0], "weight", 0.4)
    prune.random_structured(model[2], "weight", 0.5, dim=0)
    return model


def _with_old_norms() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    nn.utils.weight_norm(model[0])
    nn.utils.spectral_norm(model[2])
    return model


def _with_norms() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    parametrizations.weight_norm(model[0])
    parametrizations.spectral_norm(model[2])
    return model


def _train(model: nn.Module, penalty: Callable[[nn.Module], Any]) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    with snaprt.torch.lazy():
        for step in range(5):
            x = torch.linspace(-1, step + 1, 12).reshape(4, 3).to(next(model.parameters()).device)
            optimizer.zero_grad()
            loss = model(x).square().mean() + penalty(model)
            loss.backward()
            optimizer.step()
            snaprt.mark_step()
            losses.append(loss.detach().cpu())
    return losses


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("make", [_layers, _pruned, _with_old_norms, _with_norms])
def test_training_is_the_same(make: Callable[[], nn.Module]) -> None:
    def penalty(model: Any) -> Any:
        return model[0].penalty + model[2].penalty if make is _layers else 0

    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    ours = snaprt.torch.wrap(make())
    wanted = _train(plain, penalty)
    got = _train(ours, penalty)
    torch.testing.assert_close(got, wanted)
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach())


def test_each_call_sets_the_attributes() -> None:
    torch.manual_seed(0)
    plain = Layer()
    ours = snaprt.torch.wrap(copy.deepcopy(plain))
    with snaprt.torch.lazy():
        for step in range(4):
            x = torch.full((2, 3), float(step))
            plain(x)
            ours(x)
            if step == 2:
                traces = metrics.counter_value("UncachedCompile")
            snaprt.mark_step()
    assert metrics.counter_value("UncachedCompile") == traces
    torch.testing.assert_close(ours.penalty.detach().cpu(), plain.penalty.detach())
    torch.testing.assert_close(ours.seen["mean"].cpu(), plain.seen["mean"])
    torch.testing.assert_close(ours.seen["parts"][1].cpu(), plain.seen["parts"][1])
    torch.testing.assert_close(ours.input.cpu(), plain.input)


def test_a_pruned_weight_is_that_of_the_last_call() -> None:
    torch.manual_seed(0)
    plain = _pruned()
    torch.manual_seed(0)
    ours = snaprt.torch.wrap(_pruned())
    for model in (plain, ours):
        with torch.no_grad():
            model[0].weight_orig.mul_(2)
        model(torch.ones(1, 3))
    torch.testing.assert_close(ours[0].weight.detach().cpu(), plain[0].weight.detach())
    prune.remove(ours[0], "weight")
    prune.remove(plain[0], "weight")
    x = torch.ones(1, 3)
    torch.testing.assert_close(ours(x).detach().cpu(), plain(x).detach())
    back = snaprt.torch.unwrap(ours)
    torch.testing.assert_close(back(x), plain(x))


class Recurrent(nn.Module):
    """Reads what the last call has kept."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.ones(3))
        self.hidden: Any = [] if kind == "list" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "list":
            self.hidden.append(x * self.weight)
            return self.hidden[-1]
        hidden = torch.zeros_like(x) if self.hidden is None else self.hidden
        self.hidden = torch.tanh(x * self.weight + hidden)
        return self.hidden


@pytest.mark.parametrize("kind", ["tensor", "list"])
def test_a_module_that_reads_what_it_kept_is_an_error_not_a_wrong_value(kind: str) -> None:
    module = snaprt.torch.wrap(Recurrent(kind))

    def call_twice() -> None:
        module(torch.ones(3))
        module(torch.ones(3))

    with pytest.raises(UsageError, match="register"):
        call_twice()


def test_a_module_may_start_anew_after_each_call() -> None:
    module = Recurrent("tensor")
    module.hidden = None
    ours = snaprt.torch.wrap(copy.deepcopy(module))
    for value in (1.0, 2.0, 3.0):
        x = torch.full((3,), value)
        module.hidden = ours.hidden = None
        torch.testing.assert_close(ours(x).detach().cpu(), module(x).detach())
        torch.testing.assert_close(ours.hidden.detach().cpu(), module.hidden.detach())


def test_a_forward_pass_that_jax_traces_does_not_set_attributes() -> None:
    model = snaprt.torch.wrap(Layer())

    @jax.jit
    def forward(x: jax.Array) -> jax.Array:
        return snaprt.torch.to_jax(model(snaprt.torch.to_torch(x)).detach())

    with pytest.raises(UsageError, match="sets its attribute 'penalty' to a tensor while JAX"):
        forward(jax.numpy.ones((2, 3)))
    assert model.penalty is None
