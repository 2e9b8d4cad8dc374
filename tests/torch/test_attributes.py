"""Tensors that a forward pass keeps in attributes of its module."""

import contextlib
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


class Detached(nn.Module):
    """Reads what the last call has kept without a gradient, in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 4)
        self.hidden: Any = None
        self.before: Any = None
        self.mask: Any = None
        self.total: Any = None
        self.traces = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.traces += 1
        if self.mask is None or self.mask.size(0) != len(x):
            self.mask = torch.ones(len(x), len(x)).tril().to(x.device)
            self.hidden = self.before = torch.zeros(len(x), 4, device=x.device)
            self.total = torch.zeros(1, device=x.device)
        self.total += 1
        hidden = self.cell(self.mask @ x, self.hidden) * self.total
        self.before, self.hidden = self.hidden, hidden.detach()
        return hidden + self.before


@pytest.mark.parametrize("is_lazy", [True, False])
def test_a_module_reads_what_it_kept_without_a_gradient(is_lazy: bool) -> None:
    plain = Detached()
    ours = snaprt.torch.wrap(copy.deepcopy(plain))
    scope = snaprt.torch.lazy() if is_lazy else contextlib.nullcontext()
    for module in (plain, ours):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        with scope:
            for count in (2, 2, 2, 3, 3, 3, 3):
                optimizer.zero_grad()
                module(torch.randn(count, 3)).square().mean().backward()
                optimizer.step()
                snaprt.mark_step()
    for name, value in vars(plain).items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(getattr(ours, name).cpu(), value, msg=name)
    for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), other.detach())
    traces = ours.traces
    ours(torch.ones(3, 3))
    ours(torch.ones(3, 3))
    assert ours.traces == traces


def test_names_of_one_tensor_may_become_names_of_two() -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.first + self.second

    module = Pair()
    module.first = module.second = torch.ones(2, device=snaprt.torch.device())
    ours = snaprt.torch.wrap(module)
    assert ours(torch.ones(2)).tolist() == [2, 2]
    module.second = torch.full((2,), 5.0, device=snaprt.torch.device())
    assert ours(torch.ones(2)).tolist() == [6, 6]
    module.first = torch.full((2,), 3.0, device=snaprt.torch.device())
    assert ours(torch.ones(2)).tolist() == [8, 8]


def test_the_mask_of_a_transformer_is_not_read() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    plain = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    ours = snaprt.torch.wrap(copy.deepcopy(plain))
    mask, x = nn.Transformer.generate_square_subsequent_mask(4), torch.randn(4, 2, 8)
    before = metrics.counter_value("torch::untraced_calls")
    torch.testing.assert_close(ours(x, mask=mask).detach().cpu(), plain(x, mask=mask).detach())
    assert metrics.counter_value("torch::untraced_calls") == before


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
