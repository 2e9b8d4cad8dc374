"""What PyTorch/XLA traces a part of a program with, as the loops and calls that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as of_torch

from snaprt.errors import UsageError

_F = TypeVar("_F", bound=Callable[..., Any])


def scan(fn: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any, **_: Any) -> Any:
    """Call ``carry, y = fn(carry, x)`` for each ``x`` of the first axis of ``xs``, in a loop.

    The loop is part of the step's program, or of the wrapped module's that it is in. Its tensors
    are copies: what ``fn`` writes to them changes neither ``init`` nor ``xs``.

    Args:
        fn: The function of a round.
        init: The first carry, a tree of tensors.
        xs: A tree of tensors whose first axes have the same length.
        _: Options of PyTorch/XLA that say how to trace ``fn``.

    Returns:
        The last carry, and the ``y`` of all rounds in the structure of one, stacked.

    Raises:
        UsageError: ``xs`` has no tensors, none of positive length, or several lengths.

    Examples:
        >>> total, sums = xm.scan(lambda c, x: (c + x, c + x), torch.tensor(0), torch.arange(4))
        >>> total.item(), sums.tolist()
        (6, [0, 1, 3, 6])
    """
    lengths = {len(x) for x in pytree.tree_leaves(xs) if isinstance(x, torch.Tensor)}
    if len(lengths) != 1 or 0 in lengths:
        raise UsageError(
            f"the tensors of xs in scan have the lengths {sorted(lengths)}",
            hint="give tensors whose first axes have the same length, at least 1",
        )
    carry, ys = _copied(init), []
    for index in range(*lengths):
        carry, y = fn(carry, _copied(pytree.tree_map_only(torch.Tensor, itemgetter(index), xs)))
        ys.append(_copied(y))
        carry = _copied(carry)
    return carry, pytree.tree_map(
        lambda *each: torch.stack(each) if isinstance(each[0], torch.Tensor) else each[0], *ys
    )


def _copied(tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.clone, tree)


def scan_layers(layers: Iterable[torch.nn.Module], input_data: Any, **_: Any) -> Any:
    """Call layers one after the other, each with the result of the one before.

    Examples:
        >>> layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        >>> xm.scan_layers(layers, torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """
    for layer in layers:
        input_data = layer(input_data)
    return input_data


def assume_pure(fn: _F) -> _F:
    """Return the function: what it does is traced with the rest, and compiled once.

    Examples:
        >>> xm.assume_pure(torch.sin)(torch.zeros(1))
        tensor([0.])
    """
    return fn


def checkpoint(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call `torch.utils.checkpoint.checkpoint`, with PyTorch/XLA's default ``use_reentrant=True``.

    Examples:
        >>> x = torch.ones(2, requires_grad=True)
        >>> xm.checkpoint(torch.exp, x).sum().backward()
    """
    return of_torch.checkpoint(function, *args, **{"use_reentrant": True, **options})


CheckpointFunction = of_torch.CheckpointFunction
