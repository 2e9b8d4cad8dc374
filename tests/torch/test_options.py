"""Numbers in the options of optimizers may change from step to step without a new program."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import snaprt
import snaprt.torch
from snaprt import metrics

Optimizer = torch.optim.Optimizer
Train = Callable[[Any], torch.Tensor]

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, 0.1, 0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda params: torch.optim.Adam(params, 1e-2, eps=1e-6, weight_decay=0.01),
    "AdamW": lambda params: torch.optim.AdamW(params, 1e-2, eps=1e-6, amsgrad=True),
    "Adamax": lambda params: torch.optim.Adamax(params, 1e-2, eps=1e-6, weight_decay=0.01),
    "NAdam": lambda params: torch.optim.NAdam(params, 1e-2, eps=1e-6, weight_decay=0.01),
    "RAdam": lambda params: torch.optim.RAdam(params, 1e-2, eps=1e-6, weight_decay=0.01),
    "RMSprop": lambda params: torch.optim.RMSprop(params, 1e-3, momentum=0.9, weight_decay=0.01),
    "Rprop": lambda params: torch.optim.Rprop(params, 1e-2, step_sizes=(1e-4, 0.02)),
    "Adadelta": lambda params: torch.optim.Adadelta(params, 1.0, weight_decay=0.01),
    "ASGD": lambda params: torch.optim.ASGD(params, 1e-2, weight_decay=0.01),
    "Adagrad": lambda params: torch.optim.Adagrad(params, 1e-2, weight_decay=0.01),
}
_CONSTANT = ("lr", "dampening", "initial_lr", "max_lr", "min_lr", "initial_accumulator_value", "t0")


def _change(value: Any, step: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_change(item, step) for item in value)
    return value * (1 - 0.05 * (step % 5)) if type(value) is float else value


def _model(*, is_ours: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    return snaprt.torch.wrap(model) if is_ours else model


def _backward(model: nn.Module) -> torch.Tensor:
    x = torch.linspace(-1, 1, 12).reshape(3, 4).to(next(model.parameters()).device)
    loss = model(x).square().sum()
    loss.backward()
    return loss


def _close(ours: nn.Module, theirs: nn.Module) -> None:
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), other.detach(), atol=1e-5, rtol=1e-4)


def _train(
    make: Callable[[Any], Optimizer], *, is_ours: bool, is_compiled: bool, steps: int = 16
) -> tuple[nn.Module, int]:
    """Return the trained model, and how many programs the last steps have compiled."""
    model = _model(is_ours=is_ours)
    optimizer = make(model.parameters())
    options = [{**group} for group in optimizer.param_groups]

    def step() -> None:
        optimizer.zero_grad()
        _backward(model)
        optimizer.step()

    run = snaprt.torch.jit(step) if is_compiled else step
    before = 0
    with snaprt.torch.lazy():
        for number in range(steps):
            if number == 4:
                before = metrics.counter_value("UncachedCompile") or 0
            run()
            snaprt.mark_step()
            for group, first in zip(optimizer.param_groups, options, strict=True):
                for name in {*group} - {"params", *_CONSTANT}:
                    group[name] = _change(first[name], number)
    return model, (metrics.counter_value("UncachedCompile") or 0) - before


@pytest.mark.parametrize("is_compiled", [False, True], ids=["lazily", "jit"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_options_that_change_at_each_step_compile_no_program(
    make: Callable[[Any], Optimizer], is_compiled: bool
) -> None:
    ours, programs = _train(make, is_ours=True, is_compiled=is_compiled)
    theirs, _ = _train(make, is_ours=False, is_compiled=False)
    _close(ours, theirs)
    assert not programs
    assert not metrics.counter_value("torch::untraced_optimizers")


def _one_cycle(optimizer: Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20)


def _cyclic(optimizer: Optimizer) -> Any:
    return torch.optim.lr_scheduler.CyclicLR(optimizer, 1e-3, 1e-2, step_size_up=3)


def _numpy_rates(optimizer: Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.float32(1 / (1 + step)))


@pytest.mark.parametrize("make_scheduler", [_one_cycle, _cyclic, _numpy_rates])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_schedulers_change_momentum_and_betas(
    name: str, make_scheduler: Callable[[Optimizer], Any]
) -> None:
    results = []
    for is_ours in (True, False):
        model = _model(is_ours=is_ours)
        optimizer = OPTIMIZERS[name](model.parameters())
        scheduler = make_scheduler(optimizer)
        with snaprt.torch.lazy():
            for number in range(16):
                if number == 4:
                    before = metrics.counter_value("UncachedCompile")
                optimizer.zero_grad()
                _backward(model)
                optimizer.step()
                scheduler.step()
                snaprt.mark_step()
            if is_ours:
                assert metrics.counter_value("UncachedCompile") == before
        results.append(model)
    _close(*results)


def test_a_decay_that_becomes_zero_and_a_rate_that_is_a_tensor() -> None:
    results = []
    for is_ours in (True, False):
        model = _model(is_ours=is_ours)
        optimizer = torch.optim.SGD(model.parameters(), torch.tensor(0.05), weight_decay=0.1)
        with snaprt.torch.lazy():
            for number in range(9):
                optimizer.zero_grad()
                _backward(model)
                optimizer.step()
                snaprt.mark_step()
                (group,) = optimizer.param_groups
                group["weight_decay"] = max(0.0, 0.1 - 0.02 * number)
                group["momentum"] = 0.1 * (number % 3)
                group["lr"].mul_(0.9)
        results.append(model)
    _close(*results)
    assert not metrics.counter_value("torch::untraced_optimizers")


def test_a_step_with_the_closure_none_is_compiled() -> None:
    plain = nn.Linear(3, 2)
    ours = snaprt.torch.wrap(copy.deepcopy(plain))
    for model in (plain, ours):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)  # no operation does
        for arguments in ({}, {"closure": None}):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step(**arguments)
            optimizer.step(None)
    torch.testing.assert_close(ours.weight.detach().cpu(), plain.weight.detach())


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_step_with_a_closure_is_compiled(kind: Any, is_compiled: bool) -> None:
    plain = nn.Linear(3, 2)
    ours = snaprt.torch.wrap(copy.deepcopy(plain))
    metrics.clear_all()
    results = []
    for model in (plain, ours):
        optimizer = kind(model.parameters(), lr=0.1, fused=True)  # no operation is

        def step(x: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(x).square().sum()
                loss.backward()
                return loss

            return optimizer.step(closure)

        if is_compiled and model is ours:
            step = snaprt.torch.jit(step)
        losses = [step(torch.full((1, 3), float(number))) for number in range(1, 4)]
        results.append([t.detach().cpu() for t in (*losses, model.weight)])
    torch.testing.assert_close(results[1], results[0])
    assert not metrics.counter_value("torch::untraced_optimizers")
