"""Sizes that a model computes with tensors of one number are known while it is traced."""

from collections.abc import Callable

import pytest
import torch

import snaprt
import snaprt.torch


def _slices(x: torch.Tensor) -> torch.Tensor:
    half = torch.tensor(x.shape[0]) // 2
    return x[half - 1 : half + 1] * x.repeat(int(torch.sqrt(torch.tensor(9.0))), 1).sum()


def _counts(x: torch.Tensor) -> torch.Tensor:
    count, total = torch.tensor(3), torch.tensor(0.0)
    count += 1
    total += x.sum()
    x = x.clone()
    x[: torch.tensor(1)] = 0
    return total + x[:count].sum() + (x[0, 0] if count > 3 else x.sum())


@pytest.mark.parametrize("function", [_slices, _counts])
def test_numbers_are_read_without_leaving_the_program(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x = torch.arange(12.0).reshape(4, 3)
    before = snaprt.metrics.counter_value("torch::untraced_calls")
    got = snaprt.torch.wrap(function)(x.to(snaprt.torch.device()))
    torch.testing.assert_close(got.cpu(), function(x))
    assert snaprt.metrics.counter_value("torch::untraced_calls") == before


def test_a_number_that_depends_on_an_argument_or_on_chance_is_not_known() -> None:
    def grow(x: torch.Tensor) -> torch.Tensor:
        limit = torch.tensor(1)
        limit.add_(x.int().max())
        return x[:limit] + torch.tensor(0.5).bernoulli().mul(0)

    for highest in (1.0, 2.0):
        x = torch.full((4,), highest, device=snaprt.torch.device())
        assert snaprt.torch.wrap(grow)(x).shape == (int(highest) + 1,)


def test_tensors_are_bounds_of_slices_outside_of_wrapped_functions() -> None:
    x = torch.arange(6.0).to(snaprt.torch.device())
    start = torch.tensor(2).to(snaprt.torch.device())
    assert x[start:].tolist() == [2, 3, 4, 5]
    x[: start + 1] = 7
    assert x.tolist() == [7, 7, 7, 3, 4, 5]
