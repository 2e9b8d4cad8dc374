"""Wrapped functions that call modules and read tensors of the device which are no arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import snaprt
import snaprt.torch
from snaprt.errors import UsageError

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Task:
    """Has modules, as many programs keep them."""

    def __init__(self, model: nn.Module, head: nn.Module) -> None:
        self.model = model
        self.parts = {"head": head}
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.criterion(self.parts["head"](self.model(x)), y)


def _closure(model: nn.Module, head: nn.Module) -> Loss:
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(head(model(x)), y)

    return loss


def _one_module(model: nn.Module, head: nn.Module) -> Loss:
    whole = nn.Sequential(model, head)
    return lambda x, y: whole(x)[torch.arange(len(x), device=x.device), y].square().mean()


MAKERS: dict[str, Callable[[nn.Module, nn.Module], Loss]] = {
    "closure": _closure,
    "bound method": lambda model, head: Task(model, head).loss,
    "one module": _one_module,
}


def _train(loss_of: Loss, *modules: nn.Module) -> list[float]:
    parameters = [p for module in modules for p in module.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in range(8):
        for module in modules:
            module.train(step not in (3, 4))
        parameters[0].requires_grad_(step != 5)
        x, y = torch.randn(16, 4, generator=generator), torch.randint(0, 3, (16,))
        optimizer.zero_grad()
        loss = loss_of(x, y % 3)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        snaprt.mark_step()
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("is_moved", [True, False])
@pytest.mark.parametrize("name", MAKERS)
def test_modules_that_a_function_calls_are_trained(name: str, is_moved: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
    head = nn.Linear(8, 3)
    ours = copy.deepcopy((model, head))
    torch.manual_seed(2)
    expected = _train(MAKERS[name](model, head), model, head)
    loss_of = snaprt.torch.wrap(MAKERS[name](*ours))
    if is_moved:
        for module in ours:
            snaprt.torch.wrap(module)
    torch.manual_seed(2)
    with snaprt.torch.lazy():
        losses = _train(loss_of, *ours)
    assert losses == pytest.approx(expected, rel=1e-5)
    for module, other in zip((model, head), ours, strict=True):
        for key, value in module.state_dict().items():
            now = other.state_dict()[key].cpu()
            torch.testing.assert_close(now, value, rtol=1e-4, atol=1e-4, check_dtype=False)


class Shifted(nn.Module):
    """Has a buffer that is not saved, as tables of positions are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


def test_a_module_of_several_may_have_a_buffer_that_is_not_saved() -> None:
    model, shifted = nn.Linear(3, 3), Shifted()
    x = torch.ones(2, 3)
    expected = shifted(model(x)).detach()
    result = snaprt.torch.wrap(lambda x: shifted(model(x)))(x)
    torch.testing.assert_close(result.detach().cpu(), expected)


def test_a_module_that_is_replaced_is_called_from_then_on() -> None:
    task = Task(nn.Linear(4, 4), nn.Linear(4, 3))
    loss_of = snaprt.torch.wrap(task.loss)
    x, y = torch.ones(2, 4), torch.tensor([0, 2])
    first = loss_of(x, y).item()
    before, task.model = task.model, copy.deepcopy(task.model)
    with torch.no_grad():
        task.model.weight.mul_(3)  # type: ignore[operator, union-attr]
    other = loss_of(x, y).item()
    assert other != first
    task.model = before
    assert loss_of(x, y).item() == first


def test_tensors_of_the_device_are_read_written_and_have_gradients() -> None:
    scale = torch.full((3,), 2.0, device=snaprt.torch.device(), requires_grad=True)
    inside = {"total": torch.zeros(3, device=snaprt.torch.device())}

    @snaprt.torch.wrap
    def scaled(x: torch.Tensor) -> torch.Tensor:
        inside["total"] += x.detach()
        return (x * scale).sum()

    total = inside["total"]
    for _ in range(2):
        scaled(torch.arange(3.0)).backward()
    assert scale.grad is not None
    assert scale.grad.tolist() == [0, 2, 4]
    assert inside["total"] is total
    assert total.tolist() == [0, 2, 4]
    with torch.no_grad():
        scale.mul_(10)
    assert scaled(torch.ones(3)).item() == 60
    scale = torch.ones(3, device=snaprt.torch.device())
    assert scaled(torch.ones(3)).item() == 3


def test_a_result_of_an_earlier_step_is_no_part_of_the_next_one() -> None:
    task = Task(nn.Linear(4, 4), nn.Linear(4, 3))
    last: Any = torch.zeros(())

    @snaprt.torch.wrap
    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return task.loss(x, y) if isinstance(last, torch.Tensor) else x.sum()

    for _ in range(3):  # `last` has a history, which must not be looked at again
        last = loss_of(torch.ones(2, 4), torch.tensor([0, 2]))
        last.backward()


def test_what_was_computed_before_has_to_be_an_argument() -> None:
    computed = torch.ones(3, device=snaprt.torch.device(), requires_grad=True) * 2
    with pytest.raises(UsageError, match="not an argument"):
        snaprt.torch.wrap(lambda x: x * computed)(torch.ones(3))


class Keeper:
    """Assigns to its attributes, as trainers do that keep the last result."""

    def __init__(self) -> None:
        self.model = nn.Linear(3, 3)
        self.last: Any = None
        self.seen = torch.zeros(3, device=snaprt.torch.device())
        self.average = torch.zeros((), device=snaprt.torch.device())
        self.all: list[Any] = []

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.model(x).sum()
        self.seen = self.seen + 1
        self.average = 0.5 * self.average + self.last.detach()
        return self.last * 2

    def append(self, x: torch.Tensor) -> torch.Tensor:
        self.all.append(x * 2)
        return x


def test_tensors_that_a_function_assigns_are_there_after_each_call() -> None:
    keeper = Keeper()
    keep = snaprt.torch.wrap(keeper.keep)
    average = 0.0
    for count in range(1, 5):
        result = keep(torch.full((2, 3), float(count)))
        assert type(keeper.last) is type(result)
        assert result.item() == pytest.approx(2 * keeper.last.item())
        expected = keeper.model(torch.full((2, 3), float(count))).sum()
        assert keeper.last.item() == pytest.approx(expected.item(), rel=1e-5)
        assert keeper.seen.tolist() == [count] * 3
        average = 0.5 * average + keeper.last.item()
        assert keeper.average.item() == pytest.approx(average, rel=1e-5)
        assert not keeper.average.requires_grad
    keeper.last.backward()
    assert keeper.model.weight.grad is not None


def test_a_tensor_that_is_appended_to_a_list_is_an_error_and_not_there() -> None:
    keeper = Keeper()
    with pytest.raises(UsageError, match=r"puts a tensor into list\[0\]"):
        snaprt.torch.wrap(keeper.append)(torch.ones(3))
    assert keeper.all == []


def test_what_was_computed_before_is_no_constant_either() -> None:
    computed = torch.ones(3, device=snaprt.torch.device(), requires_grad=True) * 2
    with pytest.raises(UsageError, match="not an argument"):
        snaprt.torch.wrap(lambda x: x * (computed + 1))(torch.ones(3))
    assert snaprt.torch.wrap(lambda x: x.reshape(computed.shape))(torch.ones(3, 1)).shape == (3,)


def test_a_parameter_of_the_cpu_does_not_lose_its_gradient_without_a_word() -> None:
    scale = nn.Parameter(torch.full((3,), 2.0))
    scaled = snaprt.torch.wrap(lambda x: x * scale)
    with pytest.raises(UsageError, match="requires a gradient"):
        scaled(torch.ones(3))
    with torch.no_grad():
        assert scaled(torch.ones(3)).tolist() == [2, 2, 2]
    fixed = snaprt.torch.wrap(lambda x: x * scale.detach())
    assert fixed(torch.ones(3)).tolist() == [2, 2, 2]
