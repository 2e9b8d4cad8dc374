"""Training gives what PyTorch gives on the CPU."""

import models
import parity
import pytest

_QUICK = [
    ("MLP", "AdamW"),
    ("CNN with BatchNorm", "SGD, momentum"),
    ("transformer, 3 layers", "AdamW"),
    pytest.param("transformer, 12 layers", "AdamW", marks=pytest.mark.full),  # XLA takes minutes
    ("GRU", "Adam"),
    ("embedding, tied", "SGD, momentum"),
    ("ViT", "AdamW"),
]


@pytest.mark.parametrize(("name", "optimizer"), _QUICK)
def test_twenty_steps_equal_those_of_pytorch(name: str, optimizer: str) -> None:
    apart = parity.compare(models.EXAMPLES[name], parity.OPTIMIZERS[optimizer])
    assert apart.loss < 1e-5
    assert apart.parameters < 1e-4
    assert apart.compiled_late == 0
