"""Random numbers on the device have PyTorch's distributions, wherever they are drawn."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributions
from torch.nn import functional as F

import snaprt.torch

COUNT = 20_000

# Of each: what it draws on a device.
DRAWS: dict[str, Callable[[Any], torch.Tensor]] = {
    "normal of tensors": lambda like: torch.normal(like + 3, like + 2),
    "normal of a tensor": lambda like: torch.normal(like + 3, 2.0),
    "normal with a tensor": lambda like: torch.normal(3.0, like + 2),
    "normal of a size": lambda like: torch.normal(3.0, 2.0, like.shape, device=like.device),
    "normal_": lambda like: like.clone().normal_(3, 2),
    "uniform_": lambda like: like.clone().uniform_(2, to=5),
    "exponential_": lambda like: (like + 5).exponential_(2.0),
    "cauchy_": lambda like: (like + 5).cauchy_(1, 2).arctan(),
    "log_normal_": lambda like: like.clone().log_normal_(0.3, 0.5),
    "geometric_": lambda like: like.clone().geometric_(0.1).sqrt(),
    "random_": lambda like: like.clone().random_(),
    "random_ below": lambda like: like.clone().random_(100),
    "random_ between": lambda like: like.to(torch.int32).random_(-50, 50),
    "random_ of bytes": lambda like: like.to(torch.uint8).random_(),
    "bernoulli": lambda like: torch.bernoulli(like + 0.3),
    "bernoulli with a number": lambda like: (like + 0.9).bernoulli(0.3),
    "bernoulli_ of a tensor": lambda like: like.clone().bernoulli_(like + 0.3),
    "poisson": lambda like: torch.poisson(like + 30),
    "binomial": lambda like: torch.binomial(like + 50, like + 0.3),
    "gumbel_softmax": lambda like: F.gumbel_softmax(torch.stack([like, like + 1], -1))[:, 0],
    "init": lambda like: torch.nn.init.trunc_normal_(like.clone(), 1.0, 2.0),
}

DISTRIBUTIONS: dict[str, Callable[[Any], Any]] = {
    "normal": lambda x: distributions.Normal(x, x + 1),
    "gamma": lambda x: distributions.Gamma(x + 2, x + 3),
    "beta": lambda x: distributions.Beta(x + 2, x + 3),
    "student": lambda x: distributions.StudentT(x + 5),
    "weibull": lambda x: distributions.Weibull(x + 1, x + 2),
    "negative binomial": lambda x: distributions.NegativeBinomial(x + 30, x + 0.5),
}


def _share_below(drawn: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    values = drawn.detach().cpu().double().flatten()
    return torch.stack([(values <= limit).double().mean() for limit in limits])


def _assert_same_distribution(ours: torch.Tensor, plain: torch.Tensor) -> None:
    assert ours.shape == plain.shape
    assert ours.dtype == plain.dtype
    limits = torch.quantile(plain.double().flatten(), torch.linspace(0.05, 0.95, 10).double())
    difference = (_share_below(ours, limits) - _share_below(plain, limits)).abs().max()
    assert difference < 0.03  # more than 5 standard deviations


@pytest.mark.parametrize("name", DRAWS)
def test_what_is_drawn_on_the_device_has_the_distribution_of_the_cpu(name: str) -> None:
    draw = DRAWS[name]
    torch.manual_seed(0)
    plain = torch.zeros(COUNT)
    ours = plain.to(snaprt.torch.device())
    expected = draw(plain)
    _assert_same_distribution(draw(ours), expected)
    wrapped = snaprt.torch.wrap(draw)
    first, second = wrapped(ours), wrapped(ours)
    _assert_same_distribution(first, expected)
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    seeded = wrapped(ours)
    torch.manual_seed(7)
    assert torch.equal(seeded, wrapped(ours))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions_sample_and_check_their_arguments_on_the_device(name: str) -> None:
    make = DISTRIBUTIONS[name]
    torch.manual_seed(0)
    plain = make(torch.zeros(2))
    ours = make(torch.zeros(2, device=snaprt.torch.device()))
    expected = plain.sample((COUNT,))
    _assert_same_distribution(ours.sample((COUNT,)), expected)
    on_device = expected[:5].to(snaprt.torch.device())
    torch.testing.assert_close(
        ours.log_prob(on_device).cpu(), plain.log_prob(expected[:5]), rtol=1e-4, atol=1e-4
    )


def test_a_module_with_distributions_is_compiled() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        prior = distributions.Normal(torch.zeros_like(x), 1.0)
        posterior = distributions.Normal(x, x.exp())
        divergence = distributions.kl_divergence(posterior, prior)
        return divergence.sum() - distributions.Categorical(logits=x).log_prob(x.argmax(-1)).sum()

    x = torch.randn(3, 4)
    # PyTorch's compiler, which libraries import, has switched it off.
    distributions.Distribution.set_default_validate_args(True)
    snaprt.metrics.clear_all()
    ours = snaprt.torch.wrap(loss)(x.to(snaprt.torch.device()))
    torch.testing.assert_close(ours.cpu(), loss(x))
    assert not snaprt.metrics.counter_value("torch::untraced_calls")
    with pytest.raises(ValueError, match="invalid values"):
        distributions.Normal(x.to(snaprt.torch.device()), -1.0)


def test_samples_of_a_gamma_distribution_have_a_gradient() -> None:
    for device in ("cpu", snaprt.torch.device()):
        torch.manual_seed(0)
        shape = torch.full((COUNT,), 2.0, device=device, requires_grad=True)
        distributions.Gamma(shape, torch.ones(COUNT, device=device)).rsample().sum().backward()
        assert shape.grad.mean().item() == pytest.approx(1.0, abs=0.05)  # the mean is the shape


@pytest.mark.parametrize("size", [4, 3, (2, None)])
def test_adaptive_max_pooling_is_that_of_pytorch(size: Any) -> None:
    plain = torch.randn(2, 3, 9, 7, requires_grad=True)
    ours = plain.detach().to(snaprt.torch.device()).requires_grad_()
    results = [F.adaptive_max_pool2d(x, size) for x in (plain, ours)]
    for result in results:
        result.square().sum().backward()
    assert torch.equal(results[1].cpu(), results[0])
    torch.testing.assert_close(ours.grad.cpu(), plain.grad)
