"""What PyTorch does with lists of tensors: scaling of gradients, averages of models, norms."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import snaprt
import snaprt.torch


def _trained(body: Callable[[nn.Module, torch.Tensor, int], Any]) -> list[tuple[list[Any], Any]]:
    """Run ``body`` four times with a plain module, and with a wrapped one; return what it gives."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    wrapped = snaprt.torch.wrap(copy.deepcopy(plain))
    found = []
    for model in (plain, wrapped):
        values = []
        generator = torch.Generator().manual_seed(1)
        with snaprt.torch.lazy():
            for step in range(4):
                x = torch.randn(5, 3, generator=generator)
                values.append(body(model, x, step))
                snaprt.mark_step()
        found.append((values, [p.detach().cpu() for p in model.parameters()]))
    return found


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_a_gradient_scaler_skips_infinite_steps_and_adapts_its_scale(device: str) -> None:
    scalers: dict[int, Any] = {}
    optimizers: dict[int, torch.optim.Optimizer] = {}

    def step(model: nn.Module, x: torch.Tensor, number: int) -> float:
        ours = scalers and id(model) not in scalers
        optimizer = optimizers.setdefault(id(model), torch.optim.SGD(model.parameters(), 0.1))
        scaler = scalers.setdefault(
            id(model),
            torch.amp.GradScaler(device if ours else "cpu", init_scale=2.0**120, growth_interval=1),
        )
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean() * (1e20 if number == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    (expected, plain), (scales, ours) = _trained(step)
    assert scales == expected == [2.0**121, 2.0**120, 2.0**121, 2.0**122]
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.9)])
def test_an_averaged_model_is_that_of_pytorch(average: Any) -> None:
    averages: dict[int, AveragedModel] = {}

    def step(model: nn.Module, x: torch.Tensor, number: int) -> list[torch.Tensor]:
        averaged = averages.setdefault(id(model), AveragedModel(model, multi_avg_fn=average))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 + number)
        averaged.update_parameters(model)
        return [
            averaged(x).detach().cpu(),
            *[p.detach().cpu().clone() for p in averaged.parameters()],
        ]

    (expected, _), (found, _) = _trained(step)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(found[2][1], found[3][1])


def test_a_norm_of_gradients_that_was_computed_before_clips_them() -> None:
    def step(model: nn.Module, x: torch.Tensor, number: int) -> list[torch.Tensor]:
        model.zero_grad()
        model(x).sum().backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
        return [norm.cpu(), *[p.grad.cpu().clone() for p in model.parameters()]]

    (expected, _), (found, _) = _trained(step)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("add", ([[3.0], [4.0]],)),
        ("mul_", (2.0,)),
        ("mul", ([2.0, 3.0],)),
        ("addcdiv_", ([[3.0], [4.0]], [[5.0], [8.0]], 0.5)),
        ("addcmul", ([[3.0], [4.0]], [[5.0], [8.0]], [0.5, 2.0])),
        ("maximum_", ([[0.0], [9.0]],)),
        ("copy_", ([[0.0], [9.0]],)),
        ("zero_", ()),
        ("sqrt", ()),
        ("norm", (1,)),
    ],
)
def test_functions_of_lists_are_those_of_each_tensor(name: str, arguments: Any) -> None:
    function = getattr(torch, f"_foreach_{name}")

    def call(device: Any) -> list[Any]:
        def tensors(rows: Any) -> Any:
            is_rows = isinstance(rows, list) and isinstance(rows[0], list)
            return [torch.tensor(row, device=device) for row in rows] if is_rows else rows

        given = tensors([[1.0], [4.0]])
        result = function(given, *map(tensors, arguments))
        return [t.tolist() for t in (given if name.endswith("_") else result)]

    assert call(snaprt.torch.device()) == call("cpu")


def _in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    y.mul_(2)
    return x + y


@pytest.mark.parametrize(
    "write",
    [
        lambda x: torch._foreach_mul_([x, x], 2.0),
        lambda x: torch._foreach_add_([x, x.detach()], [x, torch.ones_like(x)]),
        lambda x: torch._foreach_lerp_([x, x], [x * 2, x * 3], 0.5),
        lambda x: torch._foreach_addcdiv_([x, x], [x, x], [x + 1, x + 2]),
        lambda x: torch.add(x, x, out=x),
        lambda x: x.mul_(x).add_(x),
        lambda x: x.copy_(_in_place(x, x)),
        lambda x: x.copy_(_in_place(x, x.data)),
    ],
)
@pytest.mark.parametrize("is_wrapped", [False, True], ids=["operations", "wrapped"])
def test_a_tensor_that_is_given_twice_is_written_twice(
    write: Callable[[torch.Tensor], Any], is_wrapped: bool
) -> None:
    plain = torch.linspace(0.5, 2, 6).reshape(2, 3)
    ours = plain.to(snaprt.torch.device())
    write(plain)
    with snaprt.torch.lazy(), torch.no_grad():
        (snaprt.torch.wrap(write) if is_wrapped else write)(ours)
    torch.testing.assert_close(ours.cpu(), plain)


def test_a_wrapped_function_that_is_given_one_tensor_twice_writes_to_both() -> None:
    plain = torch.linspace(0.5, 2, 6)
    ours = plain.to(snaprt.torch.device())
    wanted = _in_place(plain, plain)
    got = snaprt.torch.wrap(_in_place)(ours, ours)
    torch.testing.assert_close(got.cpu(), wanted)
    torch.testing.assert_close(ours.cpu(), plain)


def test_parameters_that_share_a_gradient_share_its_scaling() -> None:
    results = []
    for device in ("cpu", snaprt.torch.device()):
        params = [torch.ones(2, 3, device=device).requires_grad_() for _ in range(2)]
        params[0].grad = params[1].grad = torch.ones(2, 3, device=device)
        nn.utils.clip_grad_norm_(params, 0.5)
        torch.nn.utils.clip_grad_value_(params, 0.05)
        assert params[0].grad is params[1].grad
        results.append(params[0].grad.cpu())
    torch.testing.assert_close(*results)
