"""What PyTorch's random functions draw while they are traced, by JAX's samplers.

torchax 0.0.13 has no sampler for some, fills nothing for others, and takes the operands of
`torch.normal` for others than they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import torch

from snaprt.torch.lowering import versions
from snaprt.torch.lowering.slopes import flat


def _uniform(key: Any, like: Any, low: Any = 0.0, high: Any = 1.0) -> Any:
    return low + (high - low) * jax.random.uniform(key, like.shape, _float_for(like))


def _normal(key: Any, like: Any, mean: Any = 0.0, std: Any = 1.0) -> Any:
    return mean + std * jax.random.normal(key, like.shape, _float_for(like))


def _log_normal(key: Any, like: Any, mean: Any = 1.0, std: Any = 2.0) -> Any:
    return jnp.exp(_normal(key, like, mean, std))


def _exponential(key: Any, like: Any, lambd: Any = 1.0) -> Any:
    # Never zero: what calls this takes the logarithm.
    tiny = jnp.finfo(_float_for(like)).tiny
    return jnp.maximum(jax.random.exponential(key, like.shape, _float_for(like)), tiny) / lambd


def _cauchy(key: Any, like: Any, median: Any = 0.0, sigma: Any = 1.0) -> Any:
    return median + sigma * jax.random.cauchy(key, like.shape, _float_for(like))


def _geometric(key: Any, like: Any, p: Any) -> Any:
    return jax.random.geometric(key, p, like.shape)


def _bernoulli(key: Any, like: Any, p: Any = 0.5) -> Any:
    return jax.random.bernoulli(key, p, like.shape)


def _random(key: Any, like: Any, low: Any = None, high: Any = None) -> Any:
    """Draw integers from ``low`` to below ``high``; by default, from 0 on, all that fit."""
    if high is None:
        low, high = 0, low
    if high is None:
        high = 1 << min(_bits(like.dtype), 31)
    return jax.random.randint(key, like.shape, low, high, jnp.uint32 if low == 0 else jnp.int32)


def _bits(dtype: Any) -> int:
    """Return how many bits of an integer a dtype represents."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.finfo(dtype).nmant + 1
    if dtype == jnp.bool_:
        return 1
    return int(jnp.iinfo(dtype).max).bit_length()


def _float_for(array: Any) -> Any:
    return array.dtype if jnp.issubdtype(array.dtype, jnp.floating) else jnp.float32


#: The names that PyTorch's methods have for arguments that are no names in Python.
_RENAMED: Final = {"from": "low", "to": "high"}


def _array(value: Any) -> Any:
    tensor = value.torch() if isinstance(value, versions.torchax().view.View) else value
    return tensor.jax() if hasattr(tensor, "jax") else tensor


def _draw(sampler: Callable[..., Any], *operands: Any, **options: Any) -> Any:
    """Return a tensor of what ``sampler(key, *operands, **options)`` draws."""
    torchax = versions.torchax()
    environment = torchax.default_env()
    drawn = sampler(environment.get_and_rotate_prng_key(), *map(_array, operands), **options)
    return torchax.tensor.Tensor(drawn, environment)


def _filling(sampler: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that writes into its tensor what ``sampler`` draws."""

    def draw(key: Any, like: Any, *args: Any, **options: Any) -> Any:
        return flat(sampler(key, like, *args, **options).astype(like.dtype), like)

    def fill(tensor: Any, *args: Any, generator: None = None, **named: Any) -> Any:
        options = {_RENAMED.get(name, name): _array(value) for name, value in named.items()}
        return tensor.copy_(_draw(draw, tensor, *args, **options))

    return fill


def _sampling(sampler: Callable[..., Any], *, is_flat: bool = False) -> Callable[..., Any]:
    """Return a function whose result has the dtype of its first tensor.

    Args:
        sampler: What draws.
        is_flat: Whether its gradients are zeros.
    """

    def draw(key: Any, *operands: Any) -> Any:
        drawn = sampler(key, *operands).astype(operands[0].dtype)
        return flat(drawn, *operands) if is_flat else drawn

    def sample(*operands: Any, generator: None = None) -> Any:
        return _draw(draw, *operands)

    return sample


def _dirichlet(key: Any, concentration: Any) -> Any:
    return jax.nn.softmax(jax.random.loggamma(key, concentration), -1)


def normal(
    mean: Any,
    std: Any = 1.0,
    size: Sequence[int] | None = None,
    *,
    generator: None = None,
    dtype: torch.dtype | None = None,
    **_: Any,
) -> Any:
    """Draw from normal distributions, of tensors or numbers, without a gradient."""

    def sampler(key: Any, mean: Any, std: Any) -> Any:
        shape = jnp.broadcast_shapes(jnp.shape(mean), jnp.shape(std), tuple(size or ()))
        like = jax.ShapeDtypeStruct(shape, jnp.result_type(mean, std))
        return jax.lax.stop_gradient(_normal(key, like, mean, std))

    if size is not None and dtype is None:
        dtype = torch.get_default_dtype()
    drawn = _draw(sampler, mean, std)
    return drawn if dtype is None else drawn.to(dtype)


def bernoulli(tensor: Any, p: Any = None, *, generator: None = None) -> Any:
    """Draw zeros and ones: ones with the probabilities of the tensor, or with ``p``."""
    return tensor.clone().bernoulli_(tensor if p is None else p)


_FILLS: Final[dict[str, Callable[..., Any]]] = {
    "bernoulli_": _bernoulli,
    "cauchy_": _cauchy,
    "exponential_": _exponential,
    "geometric_": _geometric,
    "log_normal_": _log_normal,
    "normal_": _normal,
    "random_": _random,
    "uniform_": _uniform,
}

_SAMPLES: Final[dict[str, Callable[..., Any]]] = {
    "_sample_dirichlet": _dirichlet,
    "_standard_gamma": jax.random.gamma,
}

_JUMPS: Final[dict[str, Callable[..., Any]]] = {
    "binomial": jax.random.binomial,
    "poisson": jax.random.poisson,
}


IN_PLACE: Final = {name: _filling(sampler) for name, sampler in _FILLS.items()}
"""Functions that write to their first tensor, by the names of PyTorch's operators."""

OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    **{name: _sampling(sampler) for name, sampler in _SAMPLES.items()},
    **{name: _sampling(sampler, is_flat=True) for name, sampler in _JUMPS.items()},
    "bernoulli": bernoulli,
    "normal": normal,
}
"""Functions that draw tensors, by the names of PyTorch's operators."""
