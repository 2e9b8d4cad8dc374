"""Functions that torchax 0.0.13 computes wrongly, or not at all, as they run while traced."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as functional

from snaprt.torch.lowering.lists import OF_LISTS
from snaprt.torch.lowering.views import contiguous


def batch_norm(
    input: Any,  # noqa: A002 - the name in PyTorch
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Normalize as PyTorch does, and update the running statistics, which torchax leaves."""
    if not training or running_mean is None:
        return torch.batch_norm(
            input, weight, bias, running_mean, running_var, training, momentum, eps, False
        )
    axes = [axis for axis in range(input.ndim) if axis != 1]
    if input.numel():  # an empty batch changes nothing
        _update(input, axes, running_mean, running_var, momentum, [])
    return torch.batch_norm(input, weight, bias, None, None, True, momentum, eps, False)


def instance_norm(
    input: Any,  # noqa: A002 - the name in PyTorch
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Normalize as PyTorch does, with or without running statistics."""
    axes = list(range(2, input.ndim))
    shape = [1, -1, *[1] * len(axes)]
    if use_input_stats:
        if running_mean is not None:
            _update(input, axes, running_mean, running_var, momentum, [0])
        mean = input.mean(axes, keepdim=True)
        variance = input.var(axes, unbiased=False, keepdim=True)
    else:
        mean, variance = running_mean.reshape(shape), running_var.reshape(shape)
    result = (input - mean) * torch.rsqrt(variance + eps)
    if weight is not None:
        result = result * weight.reshape(shape)
    return result if bias is None else result + bias.reshape(shape)


def _update(
    values: Any,
    axes: Sequence[int],
    running_mean: Any,
    running_var: Any,
    momentum: float,
    then_over: Sequence[int],
) -> None:
    seen = values.detach()
    mean, variance = seen.mean(axes), seen.var(axes, unbiased=True)
    if then_over:
        mean, variance = mean.mean(then_over), variance.mean(then_over)
    for running, new in ((running_mean, mean), (running_var, variance)):
        running.copy_(running * (1 - momentum) + new.to(running.dtype) * momentum)


def type_as(tensor: Any, other: Any) -> Any:
    """Return a tensor of the other's dtype; torchax changes the tensor itself."""
    return tensor.to(other.dtype)


def adaptive_max_pool(
    input: Any,  # noqa: A002 - the name in PyTorch
    output_size: int | Sequence[int | None] | None,
    return_indices: bool = False,
    *,
    dimensions: int,
) -> Any:
    """Return the maximum of each of ``output_size`` windows along the last ``dimensions`` axes."""
    wanted = [output_size] * dimensions if isinstance(output_size, int | None) else output_size
    sizes = input.shape[-dimensions:]
    places = torch.arange(math.prod(sizes), device=input.device).reshape(sizes).expand(input.shape)
    for axis, count in zip(range(-1, -dimensions - 1, -1), reversed(wanted), strict=True):
        length = input.shape[axis]
        count = length if count is None else count
        windows = [(i * length // count, -(-(i + 1) * length // count)) for i in range(count)]
        maxima = [input.narrow(axis, a, b - a).max(axis, keepdim=True) for a, b in windows]
        inside = torch.cat([m.indices + a for m, (a, _) in zip(maxima, windows, strict=True)], axis)
        places = places.gather(axis, inside)
        input = torch.cat([m.values for m in maxima], axis)  # noqa: A001
    return (input, places) if return_indices else input


def rrelu(
    input: Any,  # noqa: A002 - the name in PyTorch
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Any:
    """Multiply negative values by what is drawn uniformly, or by the mean of the bounds."""
    slope = torch.empty_like(input).uniform_(lower, upper) if training else (lower + upper) / 2
    result = torch.where(input >= 0, input, input * slope)
    return input.copy_(result) if inplace else result


def ctc_loss(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Any:
    """Return the loss; lengths may be on the CPU, as they may for other devices."""
    given: Any = [
        value.to(log_probs.device) if isinstance(value, torch.Tensor) else value
        for value in (targets, input_lengths, target_lengths)
    ]
    number = ("none", "mean", "sum").index(reduction)
    return _private.ctc_loss(log_probs, *given, blank, number, zero_infinity)


def _of_matrices(name: str) -> Callable[..., Any]:
    """Return a function that transposes matrices: the conjugates of them, but for ``mT``."""

    def transpose(tensor: Any, *_: Any) -> Any:
        if tensor.ndim < 2:
            raise RuntimeError(
                f"tensor.{name} is only supported on matrices or batches of matrices. "
                f"Got {tensor.ndim}-D tensor."
            )
        swapped = tensor.transpose(-2, -1)
        return swapped if name == "mT" else swapped.conj()

    return transpose


def new_tensor(tensor: Any, data: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    """Return a tensor of the dtype of another one, or of ``dtype``."""
    dtype = tensor.dtype if dtype is None else dtype
    if isinstance(data, torch.Tensor):
        return data.detach().clone().to(dtype)
    return torch.tensor(data, dtype=dtype, device=device or "jax")


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Return the values that each query attends to: zeros if a mask lets it attend to none."""
    if enable_gqa:
        groups = query.size(-3) // key.size(-3)
        key, value = (tensor.repeat_interleave(groups, -3) for tensor in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        if attn_mask is not None:
            raise RuntimeError("Explicit attn_mask should not be set when is_causal=True")
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(seen.logical_not(), -math.inf)
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    if attn_mask is None:
        weights = scores.softmax(-1)
    else:
        is_blind = (scores == -math.inf).all(-1, keepdim=True)
        weights = scores.masked_fill(is_blind, 0).softmax(-1).masked_fill(is_blind, 0)
    return torch.dropout(weights, dropout_p, dropout_p > 0) @ value


Adapted = tuple[Any, dict[str, Any]]


def _with_bounds_alike(args: Any, kwargs: dict[str, Any]) -> Adapted:
    """Return the arguments of `torch.clamp`, of whose bounds none or all are tensors."""
    named = {**dict(zip(("input", "min", "max"), args, strict=False)), **kwargs}
    bounds = {name: named[name] for name in ("min", "max") if named.get(name) is not None}
    if len({isinstance(bound, torch.Tensor) for bound in bounds.values()}) > 1:
        tensors = {name: torch.as_tensor(bound, device="jax") for name, bound in bounds.items()}
        return (named["input"],), tensors
    return args, kwargs


def _with_source_expanded(args: Any, kwargs: dict[str, Any]) -> Adapted:
    """Return the arguments of `Tensor.copy_`, of which both have one shape."""
    if len(args) > 1 and args[0].shape != args[1].shape:
        return (args[0], args[1].expand(args[0].shape), *args[2:]), kwargs
    return args, kwargs


def _with_copy(args: Any, kwargs: dict[str, Any]) -> Adapted:
    """Return the arguments of `Tensor.to`, with a copy of the tensor if that is asked for."""
    tensor, *rest = args
    flags = [value for value in rest if isinstance(value, bool)]  # `non_blocking` and `copy`
    if kwargs.get("copy") or flags[1:] == [True]:
        tensor = tensor.clone()
    return (tensor, *rest), {name: value for name, value in kwargs.items() if name != "copy"}


def _with_size_of_each_axis(args: Any, kwargs: dict[str, Any]) -> Adapted:
    """Return the arguments of `interpolate`, with a size for each axis."""
    named = {**dict(zip(("input", "size"), args, strict=False)), **kwargs}
    tensor, size = named.pop("input"), named.pop("size", None)
    size = (size,) * (tensor.ndim - 2) if isinstance(size, int) else size
    return (tensor, size, *args[2:]), named


_T = torch.Tensor
_private: Any = torch
_methods: Any = _T

ARGUMENTS: Final[dict[Any, Callable[[Any, dict[str, Any]], Adapted]]] = {
    **{
        getattr(place, name): _with_bounds_alike
        for place in (torch, _T)
        for name in ("clamp", "clamp_", "clip", "clip_")
    },
    _T.copy_: _with_source_expanded,
    _T.to: _with_copy,
    functional.interpolate: _with_size_of_each_axis,
}
"""What a function is called with on tensors of torchax, in the place of its arguments."""

# As `torch.autocast` does on the CPU; torchax knows only what reaches it as an operator of C++.
NARROWED: Final[frozenset[Any]] = frozenset(
    [
        *(functional.linear, functional.conv1d, functional.conv2d, functional.conv3d),
        *(functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d),
        *(functional.scaled_dot_product_attention, torch.matmul, _T.matmul),
        *(_T.__matmul__, _T.__rmatmul__, torch.mm, _T.mm, torch.bmm, _T.bmm, torch.mv, _T.mv),
        *(torch.addmm, _T.addmm, torch.baddbmm, _T.baddbmm, torch.addbmm, _T.addbmm, torch.einsum),
        *(torch.conv1d, torch.conv2d, torch.conv3d, torch.lstm, torch.gru, torch.rnn_tanh),
        *(torch.rnn_relu,),
    ]
)
"""The functions that autocast computes in its narrow type."""

WIDENED: Final[frozenset[Any]] = frozenset(
    [
        *(functional.cross_entropy, functional.nll_loss, functional.mse_loss, functional.l1_loss),
        *(functional.smooth_l1_loss, functional.huber_loss, functional.kl_div),
        *(functional.binary_cross_entropy, functional.binary_cross_entropy_with_logits),
        *(functional.cosine_embedding_loss, functional.margin_ranking_loss, functional.ctc_loss),
        *(functional.triplet_margin_loss, functional.soft_margin_loss, functional.poisson_nll_loss),
    ]
)
"""The functions that autocast computes in float32."""

CORRECTIONS: Final[dict[Any, Callable[..., Any]]] = {
    **OF_LISTS,
    functional.batch_norm: batch_norm,
    functional.instance_norm: instance_norm,
    **{
        getattr(functional, f"adaptive_max_pool{count}d{ending}"): partial(
            adaptive_max_pool, return_indices=bool(ending), dimensions=count
        )
        for count in (1, 2, 3)
        for ending in ("", "_with_indices")
    },
    functional.ctc_loss: ctc_loss,
    functional.rrelu: rrelu,
    functional.scaled_dot_product_attention: attention,
    torch.rrelu: rrelu,
    torch.rrelu_: partial(rrelu, inplace=True),
    _T.mT.__get__: _of_matrices("mT"),  # type: ignore[attr-defined]
    _T.mH.__get__: _of_matrices("mH"),  # type: ignore[attr-defined]
    _T.adjoint: _of_matrices("adjoint()"),
    torch.adjoint: _of_matrices("adjoint()"),
    torch.ldexp: lambda mantissa, exponent: mantissa * 2.0**exponent,
    _T.contiguous: contiguous,
    _T.new_tensor: new_tensor,
    _T.data.__get__: lambda tensor, *_: tensor.detach(),  # type: ignore[attr-defined]
    # torchax's tensors are PyTorch's meta tensors underneath, which initializers leave as they are.
    _T.is_meta.__get__: lambda *_: False,  # type: ignore[attr-defined]
    **{place._is_all_true: lambda tensor: tensor.all() for place in (_private, _methods)},
    **{place._is_any_true: lambda tensor: tensor.any() for place in (_private, _methods)},
}
"""The functions, and what runs in the place of each."""
