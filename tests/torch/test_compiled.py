"""What functions of `snaprt.torch.jit` use is found wherever it is, or refused."""

import copy
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import snaprt.torch
from snaprt.errors import UsageError

STEPS = 6


def _model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-2, eps=1e-6)


def _batch(step: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def _do(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


class _Trainer:
    """A training loop as many people write it: what changes between steps is in attributes."""

    def __init__(self, jit: Any) -> None:
        self.model = jit.wrap(_model())
        self.optimizer = _optimizer(self.model)
        self.steps_done = 0
        self.losses: list[torch.Tensor] = []
        self.last: torch.Tensor | None = None
        self.step = jit(self._step)

    def _step(self, x: torch.Tensor) -> torch.Tensor:
        next(RUNS[0])
        return self._loss(self.net(x))

    @property
    def net(self) -> nn.Module:
        return self.model

    def _loss(self, y: torch.Tensor) -> torch.Tensor:
        loss = y.square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.step(x)
        self.steps_done += 1
        self.losses.append(loss)
        self.last = loss
        return loss


RUNS: list[Any] = [itertools.count()]

_model_of_module: Any = None
_optimizer_of_module: Any = None


def _by_closure(jit: Any) -> Any:
    model = jit.wrap(_model())
    optimizer = _optimizer(model)
    return jit(lambda x: _do(model, optimizer, x))


def _by_object(jit: Any) -> Any:
    things = SimpleNamespace(a=jit.wrap(_model()))
    things.b = _optimizer(things.a)
    return jit(lambda x: _do(things.a, things.b, x))


def _by_dataclass(jit: Any) -> Any:
    @dataclasses.dataclass
    class Things:
        network: nn.Module
        updates: torch.optim.Optimizer

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return _do(self.network, self.updates, x)

    model = jit.wrap(_model())
    return jit(Things(model, _optimizer(model)))


def _by_globals(jit: Any) -> Any:
    global _model_of_module, _optimizer_of_module
    _model_of_module = jit.wrap(_model())
    _optimizer_of_module = _optimizer(_model_of_module)
    return jit(lambda x: _do(_model_of_module, _optimizer_of_module, x))


def _by_arguments(jit: Any) -> Any:
    model = jit.wrap(_model())
    return functools.partial(jit(_do), model, _optimizer(model))


def _by_partial(jit: Any) -> Any:
    model = jit.wrap(_model())
    return jit(functools.partial(_do, model, _optimizer(model)))


def _by_nested_containers(jit: Any) -> Any:
    model = jit.wrap(_model())
    things: Any = {"models": [model], "rest": {"optimizers": (_optimizer(model),)}}
    return jit(lambda x: _do(things["models"][0], things["rest"]["optimizers"][0], x))


def _by_decorated_function(jit: Any) -> Any:
    def logged(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            return function(*args)

        return call

    model = jit.wrap(_model())
    optimizer = _optimizer(model)

    @jit
    @logged
    @torch.enable_grad()
    def step(x: torch.Tensor) -> torch.Tensor:
        return _do(model, optimizer, x)

    return step


class _Plain:
    """Does nothing: the same program in PyTorch alone."""

    def __call__(self, function: Any) -> Any:
        return function

    def wrap(self, model: nn.Module) -> nn.Module:
        return model


class _Ours:
    def __call__(self, function: Any) -> Any:
        return snaprt.torch.jit(function)

    def wrap(self, model: nn.Module) -> nn.Module:
        return snaprt.torch.wrap(model)


def _assert_same(program: Callable[[Any], Any], *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Compare what a program returns, with steps that are compiled and in PyTorch alone."""
    torch.testing.assert_close(program(_Ours()), program(_Plain()), rtol=rtol, atol=atol)


WAYS: dict[str, Callable[[Any], Any]] = {
    "closure": _by_closure,
    "object": _by_object,
    "dataclass": _by_dataclass,
    "globals": _by_globals,
    "arguments": _by_arguments,
    "partial": _by_partial,
    "containers": _by_nested_containers,
    "decorated": _by_decorated_function,
    "trainer": _Trainer,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_step_trains_whichever_way_it_reaches_its_model(way: str) -> None:
    def program(jit: Any) -> Any:
        step = WAYS[way](jit)
        return [float(step(_batch(number))) for number in range(STEPS)]

    _assert_same(program)


def test_attributes_that_the_step_does_not_read_may_change_between_steps() -> None:
    trainer = _Trainer(_Ours())
    RUNS[0] = itertools.count()
    for number in range(STEPS):
        trainer(_batch(number))
    assert next(RUNS[0]) == 2  # once as it is written, once to compile it


class _Average:
    def __init__(self, jit: Any) -> None:
        self.model = jit.wrap(_model())
        self.optimizer = _optimizer(self.model)
        self.average: torch.Tensor | None = None
        self.step = jit(self._step)

    def _step(self, x: torch.Tensor) -> torch.Tensor:
        next(RUNS[0])
        loss = _do(self.model, self.optimizer, x)
        before = self.average
        self.average = loss if before is None else 0.5 * before + 0.5 * loss
        return loss


def test_a_tensor_may_be_assigned_to_an_attribute() -> None:
    ours, theirs = _Average(_Ours()), _Average(_Plain())
    RUNS[0] = itertools.count()
    for number in range(STEPS):
        ours.step(_batch(number))
    assert next(RUNS[0]) == 2
    for number in range(STEPS):
        theirs.step(_batch(number))
    assert ours.average is not None
    assert theirs.average is not None
    torch.testing.assert_close(ours.average.cpu(), theirs.average, rtol=1e-5, atol=1e-6)


def test_a_tensor_may_be_assigned_to_a_variable_of_the_closure() -> None:
    total = torch.zeros((), device=snaprt.torch.device())

    @snaprt.torch.jit
    def add(x: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total = total + x.sum()
        return x * 2

    for _ in range(5):
        add(torch.ones(3))
    assert float(total) == 15


def test_a_tensor_that_is_put_into_a_list_is_refused_and_nothing_leaks() -> None:
    things = SimpleNamespace(kept=())

    @snaprt.torch.jit
    def step(x: torch.Tensor) -> torch.Tensor:
        things.kept = (x * 2,)
        return x + 1

    assert float(step(torch.ones(()))) == 2
    with pytest.raises(UsageError, match=r"puts a tensor into SimpleNamespace\.kept"):
        step(torch.ones(()))
    assert float(things.kept[0]) == 2


def test_a_model_that_is_not_found_is_refused() -> None:
    hidden = {"model": snaprt.torch.wrap(_model())}

    def model() -> nn.Module:
        return vars(hiding)["hid" + "den"]["model"]

    class hiding:  # noqa: N801
        pass

    hiding.hidden = hidden  # type: ignore[attr-defined]
    step = snaprt.torch.jit(lambda x: model()(x).sum())
    step(_batch(0))
    with pytest.raises(UsageError, match=r"a tensor that is not found .*: 1.running_mean"):
        step(_batch(0))


def test_an_optimizer_that_is_not_found_is_refused() -> None:
    model = snaprt.torch.wrap(_model())
    optimizers = iter([_optimizer(model) for _ in range(2)])

    @snaprt.torch.jit
    def step(x: torch.Tensor) -> torch.Tensor:
        return _do(model, next(optimizers), x)

    step(_batch(0))
    with pytest.raises(UsageError, match="an optimizer that is not found among its variables"):
        step(_batch(0))


def test_a_step_goes_on_from_a_loaded_state_and_with_a_new_group() -> None:
    def program(jit: Any) -> Any:
        trainer = _Trainer(jit)
        losses = []
        for number in range(8):
            losses.append(float(trainer(_batch(number))))
            if number == 3:
                state = trainer.optimizer.state_dict()
                trainer.optimizer.load_state_dict(state)
            if number == 5:
                extra = nn.Linear(2, 2)
                with torch.no_grad():
                    extra.weight.fill_(0.5)
                    extra.bias.fill_(0.1)
                trainer.model.append(extra)
                trainer.optimizer.add_param_group({"params": extra.parameters(), "lr": 0.1})
        return losses

    _assert_same(program)


def test_the_state_of_an_optimizer_may_be_read_and_written_between_steps_and_inside() -> None:
    def program(jit: Any) -> Any:
        model = jit.wrap(_model())
        optimizer = _optimizer(model)
        weight = model[0].weight

        def step(x: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            loss = _do(model, optimizer, x)
            for param in model.parameters():
                optimizer.state[param]["exp_avg"].mul_(0.5)
            return loss + optimizer.state[model[0].weight]["exp_avg"].sum()

        step = jit(step)
        losses = []
        for number in range(STEPS):
            losses.append(float(step(_batch(number))))
            if number == 3:
                optimizer.state[weight]["exp_avg"].zero_()
                losses.append(float(optimizer.state[weight]["exp_avg_sq"].sum()))
        return losses

    _assert_same(program, rtol=1e-4, atol=1e-7)


def test_a_step_whose_optimizer_was_first_traced_inside_may_be_traced_again() -> None:
    def program(jit: Any) -> Any:
        model = jit.wrap(_model())
        optimizer = _optimizer(model)
        step = jit(lambda x, model=model, optimizer=optimizer: _do(model, optimizer, x))
        losses = []
        for number in range(STEPS):
            losses.append(float(step(_batch(number)[: 6 + number % 2])))
            optimizer.load_state_dict(optimizer.state_dict())
        return losses

    _assert_same(program)


def test_tensors_that_are_appended_to_a_list_are_refused_and_removed() -> None:
    kept: list[Any] = []

    @snaprt.torch.jit
    def step(x: torch.Tensor) -> torch.Tensor:
        kept.append(x * 2)
        return x + 1

    step(torch.ones(()))
    with pytest.raises(UsageError, match=r"puts a tensor into list\[1\]"):
        step(torch.ones(()))
    assert [float(tensor) for tensor in kept] == [2]


def test_a_new_attribute_and_a_new_item_may_be_tensors() -> None:
    cache: dict[str, Any] = {}
    things = SimpleNamespace(calls=0)

    @snaprt.torch.jit
    def step(x: torch.Tensor) -> torch.Tensor:
        if things.calls:  # not in the first call, which is not compiled
            cache["double"] = x * 2
            things.triple = x * 3
        return x + 1

    step(torch.ones(()))
    things.calls = 1
    for number in range(4):
        step(torch.full((), float(number)))
        assert [float(cache["double"]), float(things.triple)] == [2 * number, 3 * number]


@pytest.mark.parametrize("clears", [True, False])
def test_a_variable_may_be_a_leaf_that_the_step_changes_by_hand(clears: bool) -> None:
    results = []
    for device in (snaprt.torch.device(), "cpu"):
        weight = torch.ones(3, device=device).requires_grad_()

        def step(x: torch.Tensor, weight: torch.Tensor = weight) -> torch.Tensor:
            loss = ((weight * x).sum() - 1) ** 2
            loss.backward()
            assert weight.grad is not None
            with torch.no_grad():
                weight -= 0.1 * weight.grad
            if clears:
                weight.grad = None
            return loss.detach()

        run = step if device == "cpu" else snaprt.torch.jit(step)
        losses = [float(run(torch.arange(3.0) / 3)) for _ in range(5)]
        gradient = weight.grad
        results.append([*losses, None if gradient is None else float(gradient.sum())])
    for mine, other in zip(*results, strict=True):
        assert mine == (None if other is None else pytest.approx(other, rel=1e-5))


def test_an_optimizer_may_have_tensors_of_no_module() -> None:
    def program(jit: Any) -> Any:
        device = snaprt.torch.device() if type(jit) is _Ours else "cpu"
        weights = [torch.ones(3, device=device).requires_grad_() for _ in range(5)]
        optimizer = torch.optim.Adam(weights, 0.1, eps=1e-6)

        def step(x: torch.Tensor, weights: Any = weights, optimizer: Any = optimizer) -> Any:
            loss = (sum(weight.square() for weight in weights) * x).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = jit(step)
        return [float(run(torch.arange(3.0))) for _ in range(5)]

    _assert_same(program)


def test_threads_may_compile_their_steps_at_once() -> None:
    start = threading.Barrier(3)
    models = [_model(seed) for seed in range(3)]
    expected = [_losses(_Plain(), copy.deepcopy(model)) for model in models]

    def train(model: nn.Module) -> list[float]:
        start.wait(60)
        return _losses(_Ours(), model)

    with ThreadPoolExecutor(3) as threads:
        for ours, theirs in zip(threads.map(train, models), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def _losses(jit: Any, model: nn.Module) -> list[float]:
    model = jit.wrap(model)
    optimizer = _optimizer(model)
    step = jit(lambda x: _do(model, optimizer, x))
    return [float(step(_batch(number))) for number in range(STEPS)]


def test_an_argument_that_is_a_leaf_gets_its_gradient() -> None:
    def program(jit: Any) -> Any:
        model = jit.wrap(_model())
        device = snaprt.torch.device() if type(jit) is _Ours else "cpu"

        def attack(x: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            model(x).square().mean().backward()
            model.zero_grad()
            assert x.grad is not None
            return x.grad.sign()

        run = jit(attack)
        seen = []
        for number in range(3):
            x = _batch(number).to(device).requires_grad_()
            seen += [run(x).cpu() for _ in range(2)]  # which adds up
            assert x.grad is not None
            seen.append(x.grad.cpu())
        return seen

    _assert_same(program, rtol=1e-4, atol=1e-6)


def test_gradients_that_would_leave_the_step_by_an_argument_are_refused() -> None:
    weight = torch.ones(3, device=snaprt.torch.device()).requires_grad_()
    step = snaprt.torch.jit(lambda x: x.sum().backward())
    step(weight * 2)
    with pytest.raises(UsageError, match="for an argument that is a result of other operations"):
        step(weight * 2)
    double = snaprt.torch.jit(lambda x: x * 2)
    for _ in range(2):
        assert double(weight * 2).tolist() == [4, 4, 4]


def test_parts_of_one_module_and_another_module_may_have_one_name() -> None:
    def program(jit: Any) -> Any:
        first, second = jit.wrap(_model()), jit.wrap(nn.Linear(2, 2))  # both have a "1.weight"
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)

        def step(
            x: torch.Tensor, parts: Any = (first, second), optimizer: Any = optimizer
        ) -> torch.Tensor:
            loss = (parts[1](parts[0](x)) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = jit(step)
        return [float(run(_batch(number))) for number in range(STEPS)]

    _assert_same(program)


class _Expert(nn.Module):
    """Keeps a part of the loss, as mixtures of experts do, and what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.balance: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.balance = y.square().mean()
        self.seen = {"mean": y.detach().mean(0)}
        return x + y.tanh()


@pytest.mark.parametrize("normalize", [False, True])
def test_forward_passes_may_set_attributes_to_tensors(normalize: bool) -> None:
    traces: list[int] = []

    def program(jit: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(_Expert(), nn.Sequential(_Expert()))
        experts: Any = [model[0], model[1][0]]  # type: ignore[index]
        if normalize:
            torch.nn.utils.spectral_norm(experts[1].linear)
        model = jit.wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        runs = itertools.count()

        @jit
        def step(x: torch.Tensor) -> torch.Tensor:
            next(runs)
            loss = model(x).square().mean() + sum(expert.balance for expert in experts)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        losses = [float(step(_batch(number))) for number in range(STEPS)]
        kept = [[expert.balance.detach(), expert.seen["mean"]] for expert in experts]
        traces.append(next(runs))
        return losses, [tensor.cpu() for each in kept for tensor in each]

    _assert_same(program)
    assert traces[0] <= 4
