"""The same training in PyTorch on the CPU and in snaprt: how far losses and parameters differ.

Run ``python tests/torch/parity.py`` for the table.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import models
import torch
from torch import nn

import snaprt
import snaprt.torch

Optimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizer] = {
    "SGD, momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    # The gradient of a key's bias is 0 but for rounding, which a smaller eps would amplify.
    "Adam": lambda p: torch.optim.Adam(p, 1e-3, eps=1e-6),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3, eps=1e-6),
}


@dataclass(frozen=True)
class Difference:
    """How far two runs differ: losses relative, parameters and buffers absolute."""

    loss: float
    parameters: float
    compiled_late: int  # programs compiled in the second half


def compare(
    example: models.Example, make_optimizer: Optimizer, steps: int = 20, *, clip: bool = True
) -> Difference:
    """Train twice from the same state on the same batches, with a scheduler and clipping."""
    torch.manual_seed(0)
    reference = example.make().train()
    model = copy.deepcopy(reference)
    expected, _ = _train(reference, example.loss(), make_optimizer, example.batch, steps, clip)
    model, loss = snaprt.torch.wrap(model), snaprt.torch.wrap(example.loss())
    with snaprt.torch.lazy():
        losses, late = _train(model, loss, make_optimizer, example.batch, steps, clip)
    apart = [abs(a - b) / max(abs(b), 1e-6) for a, b in zip(losses, expected, strict=True)]
    states = zip(model.state_dict().values(), reference.state_dict().values(), strict=True)
    return Difference(max(apart), max((a.cpu() - b).abs().max().item() for a, b in states), late)


def _train(
    model: nn.Module,
    loss: nn.Module,
    make_optimizer: Optimizer,
    batch: Callable[[torch.Generator], models.Batch],
    steps: int,
    clip: bool,
) -> tuple[list[float], int]:
    generator = torch.Generator().manual_seed(1)
    optimizer = make_optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    losses, compiled = [], 0
    for step in range(steps):
        x, y = batch(generator)
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        snaprt.mark_step()
        losses.append(value)
        if step == steps // 2:
            compiled = snaprt.metrics.counter_value("UncachedCompile") or 0
    late = (snaprt.metrics.counter_value("UncachedCompile") or 0) - compiled
    return [value.item() for value in losses], late


def main() -> None:
    """Print the table of all models and optimizers."""
    print(f"torch {torch.__version__}: 20 steps, a scheduler, gradients clipped to norm 1")
    print(f"{'model':28} {'optimizer':14} {'loss, relative':>15} {'parameters':>11} {'late':>5}")
    for name, example in models.all_examples().items():
        for optimizer_name, optimizer in OPTIMIZERS.items():
            apart = compare(example, optimizer)
            print(
                f"{name:28} {optimizer_name:14} {apart.loss:15.1e} {apart.parameters:11.1e} "
                f"{apart.compiled_late:5}",
                flush=True,
            )


if __name__ == "__main__":
    main()
