"""What PyTorch refuses is refused by the same type of error, wherever it is called."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import snaprt.torch
from snaprt.errors import UsageError

X = torch.ones(4, 4)
CALLS = {
    "broadcast": lambda x: x + x[0, :3],
    "operator": lambda x: x @ x[:3],
    "mm of three dimensions": lambda x: torch.mm(x[None], x),
    "bmm of two": lambda x: torch.bmm(x[None], x),
    "linear": lambda x: functional.linear(x, x[:, :3]),
    "cat": lambda x: torch.cat([x, x[:3, :3]]),
    "stack": lambda x: torch.stack([x, x[0]]),
    "reshape": lambda x: x.reshape(3, 5),
    "expand": lambda x: x.expand(3, 5),
    "dimension of softmax": lambda x: torch.softmax(x, 3),
    "dimension": lambda x: x.sum(5),
    "max": lambda x: x.max(3),
    "split": lambda x: x.split([1, 1]),
    "repeat": lambda x: x.repeat(2),
    "gather": lambda x: x.gather(1, torch.zeros(9, 9, dtype=torch.long, device=x.device)),
    "set": lambda x: x.clone().__setitem__(0, torch.ones(5, device=x.device)),
    "in place": lambda x: x[0].clone().add_(x),
    "division of integers in place": lambda x: x.long().div_(2),
    "where": lambda x: torch.where(x, x, x),
    "mask of floats": lambda x: x.masked_fill(x, 1.0),
    "difference of booleans": lambda x: (x > 0) - (x > 0),
    "mean of integers": lambda x: x.long().mean(),
    "layer norm": lambda x: functional.layer_norm(x, (5,)),
    "convolution": lambda x: functional.conv2d(x[None, None], x[None, None].repeat(1, 2, 1, 1)),
    "kernel that is too large": lambda x: functional.conv1d(x, x[None].repeat(1, 1, 3)),
    "padding": lambda x: functional.pad(x, (-5, 0)),
    "targets": lambda x: functional.cross_entropy(x, x[:3, 0].long()),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x[:3]),
    "inverse": lambda x: torch.linalg.inv(x[:3]),
    "truth": lambda x: bool(x),
    "number": lambda x: x.item(),
}


def _error_of(call, x):
    with pytest.raises(Exception) as raised:  # noqa: PT011
        call(x)
    return raised.value


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_pytorch_refuses_is_refused_alike(call):
    expected = type(_error_of(call, X))
    x = X.to(snaprt.torch.device())
    assert type(_error_of(call, x)) is expected
    with snaprt.torch.lazy():
        assert type(_error_of(call, x * 1)) is expected


@pytest.mark.parametrize("name", ["broadcast", "operator", "gather", "layer norm", "where", "max"])
def test_the_same_holds_in_wrapped_functions_and_compiled_ones(name):
    call = CALLS[name]
    expected = type(_error_of(call, X))
    x = X.to(snaprt.torch.device())
    assert type(_error_of(snaprt.torch.wrap(lambda x: call(x)), x)) is expected
    assert type(_error_of(snaprt.torch.jit(lambda x: call(x)), x)) is expected


def test_the_message_is_that_of_pytorch():
    model = snaprt.torch.wrap(nn.Sequential(nn.Linear(3, 2), nn.ReLU()))
    with pytest.raises(RuntimeError, match=r"cannot be multiplied \(4x4 and 3x2\)"):
        model(X)


def test_an_error_of_ours_stays_ours():
    @snaprt.torch.wrap
    def differentiates(x):
        return torch.autograd.grad(x.sum(), x)

    with pytest.raises(UsageError, match="computes gradients itself"):
        differentiates(X.clone().requires_grad_())


def test_a_function_of_the_users_raises_its_own_errors():
    @snaprt.torch.wrap
    def checked(x):
        if x.shape[0] != 3:
            raise ValueError("three rows, please")
        return x

    with pytest.raises(ValueError, match="three rows"):
        checked(X)


def test_operands_of_two_types_are_accepted_under_autocast():
    @snaprt.torch.wrap
    def product(x, y):
        return torch.cat([x @ y, y])

    with torch.autocast("cpu", torch.bfloat16):
        assert product(X, X.bfloat16()).shape == (8, 4)
