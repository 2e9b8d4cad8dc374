"""The same training in PyTorch on the CPU and in snaprt: how far losses and parameters differ.

``python tests/torch/parity.py [--float64] [MODEL ...]`` prints the table. The columns *PyTorch* are
how far two runs of PyTorch itself differ if one of the weights is off by one rounding: no run can
be held to less. In float64, rounding is too small to matter: what is left would be a fault.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import jax
import models
import torch
from torch import nn

import snaprt
import snaprt.torch

Optimizer = Callable[[Iterable[torch.Tensor], float], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizer] = {
    "SGD, momentum": lambda p, rate: torch.optim.SGD(p, 0.05 * rate, momentum=0.9),
    # The gradient of a key's bias is 0 but for rounding, which a smaller eps would amplify.
    "Adam": lambda p, rate: torch.optim.Adam(p, 1e-3 * rate, eps=1e-6),
    "AdamW": lambda p, rate: torch.optim.AdamW(p, 1e-3 * rate, eps=1e-6),
}


@dataclass(frozen=True)
class Difference:
    """How far two runs differ: losses relative, parameters and buffers absolute."""

    loss: float
    parameters: float
    compiled_late: int  # programs compiled in the second half
    # How far two runs of PyTorch differ.
    loss_of_pytorch: float
    parameters_of_pytorch: float


def compare(
    example: models.Example,
    make_optimizer: Optimizer,
    steps: int = 20,
    *,
    rate: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Difference:
    """Train from the same state on the same batches, with a scheduler and clipping."""
    torch.manual_seed(0)
    reference = example.make().train().to(dtype)
    model, other = copy.deepcopy(reference), copy.deepcopy(reference)
    rate = example.rate if rate is None else rate

    def train(model: nn.Module, loss: nn.Module) -> tuple[list[float], int]:
        return _train(model, loss, example, make_optimizer(model.parameters(), rate), steps, dtype)

    expected, _ = train(reference, example.loss())
    with torch.no_grad():
        next(other.parameters()).view(-1)[0].mul_(1 + torch.finfo(dtype).eps)
    same, _ = train(other, example.loss())
    model, loss = snaprt.torch.wrap(model), snaprt.torch.wrap(example.loss())
    with snaprt.torch.lazy():
        losses, late = train(model, loss)
    return Difference(
        _relative(losses, expected),
        _apart(model, reference),
        late,
        _relative(same, expected),
        _apart(other, reference),
    )


def _apart(model: nn.Module, reference: nn.Module) -> float:
    states = zip(model.state_dict().values(), reference.state_dict().values(), strict=True)
    return max((a.cpu() - b).abs().max().item() for a, b in states)


def _relative(losses: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(losses, expected, strict=True))


def _train(
    model: nn.Module,
    loss: nn.Module,
    example: models.Example,
    optimizer: torch.optim.Optimizer,
    steps: int,
    dtype: torch.dtype,
) -> tuple[list[float], int]:
    generator = torch.Generator().manual_seed(1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    losses, compiled = [], 0
    for step in range(steps):
        x, y = (t.to(dtype) if t.is_floating_point() else t for t in example.batch(generator))
        optimizer.zero_grad()
        value = example.value(model, loss, x, y)
        value.backward()
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
    """Print the table of the models and optimizers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--float64", action="store_true", help="at the full learning rates")
    parser.add_argument("models", nargs="*", help="words in the names of models")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", options.float64)
    dtype, rate = (torch.float64, 1.0) if options.float64 else (torch.float32, None)
    print(f"torch {torch.__version__}, jax {jax.__version__}, {dtype}: 20 steps, clipped to norm 1")
    print(
        f"{'model':24} {'optimizer':14} {'loss, relative':>15} {'PyTorch':>8} {'parameters':>11} "
        f"{'PyTorch':>8}"
    )
    for name, example in models.all_examples().items():
        if options.models and not any(word in name for word in options.models):
            continue
        for optimizer_name, optimizer in OPTIMIZERS.items():
            apart = compare(example, optimizer, rate=rate, dtype=dtype)
            print(
                f"{name:24} {optimizer_name:14} {apart.loss:15.1e} {apart.loss_of_pytorch:8.1e} "
                f"{apart.parameters:11.1e} {apart.parameters_of_pytorch:8.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
