"""The dtype, device and values of results, by those of the operands, as in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import snaprt.torch

FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "multiply": lambda x, s: x * s,
    "multiply from the left": lambda x, s: s * x,
    "in place": lambda x, s: x.clone().mul_(s),
    "add": lambda x, s: torch.add(x, s, alpha=2),
    "subtract": lambda x, s: s - x,
    "rsub": torch.rsub,
    "divide": lambda x, s: x / s,
    "floor": lambda x, s: x // s,
    "remainder": lambda x, s: x % s,
    "fmod": torch.fmod,
    "power": lambda x, s: x.abs() ** s,
    "where": lambda x, s: torch.where(x > 0, x, s),
    "maximum": torch.maximum,
    "clamp": lambda x, s: torch.clamp(x, min=s),
    "less": lambda x, s: x < s,
    "equal": lambda x, s: x == s,
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "addcmul": lambda x, s: torch.addcmul(x, x, s),
    "both have none": lambda x, s: x.max() * s,
}
TYPES = (
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.float16),
    (torch.float32, torch.int32),
    (torch.int32, torch.float16),
    (torch.uint8, torch.int32),
    (torch.bool, torch.int32),
)


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_result_has_the_dtype_and_value_of_pytorch(name: str, types: Any) -> None:
    function = FUNCTIONS[name]
    x = torch.tensor([[-3.0, 0.5, 1.1, 2.0], [7.0, 1.0, 0.0, 40.0]]).abs().to(types[0])
    s = torch.tensor(3 if not types[1].is_floating_point else 1.1).to(types[1])
    try:
        expected = function(x, s)
    except (RuntimeError, TypeError):  # PyTorch has none of these types
        pytest.skip("not in PyTorch")
    device = snaprt.torch.device()
    for way in (function, snaprt.torch.wrap(function)):
        result = way(x.to(device), s.to(device))
        assert result.dtype == expected.dtype
        # PyTorch computes some operators with the number as it is, on the CPU others than on a GPU.
        near = torch.finfo(expected.dtype).eps if expected.is_floating_point() else 0
        torch.testing.assert_close(result.cpu(), expected, rtol=near, atol=near, equal_nan=True)


def test_gradients_have_the_dtypes_of_the_operands() -> None:
    device = snaprt.torch.device()

    def gradients(x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (x * s / (s + 1)).float().sum().backward()
        assert x.grad is not None
        assert s.grad is not None
        return x.grad.cpu(), s.grad.cpu()

    x, s = torch.arange(6, dtype=torch.bfloat16), torch.tensor(1.1)
    expected = gradients(x.clone().requires_grad_(), s.clone().requires_grad_())
    result = gradients(x.to(device).requires_grad_(), s.to(device).requires_grad_())
    for one, other in zip(result, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=2e-2, atol=0)


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("options", [{}, {"dtype": torch.int32}, {"device": "cpu"}], ids=str)
def test_a_tensor_made_of_a_tensor_is_a_copy_where_that_one_is(options: Any) -> None:
    x = torch.arange(3.0, device=snaprt.torch.device())
    made = torch.tensor(x, **options)
    x.zero_()
    assert made.device.type == options.get("device", "jax")
    assert made.dtype == options.get("dtype", torch.float32)
    assert made.tolist() == [0, 1, 2]
