"""Training gives what PyTorch gives on the CPU."""

from dataclasses import replace

import models
import parity
import pytest

_DEEP = "transformer, 12 layers"
_EXAMPLES = models.EXAMPLES | {
    "transformer, 3 layers": replace(models.EXAMPLES[_DEEP], make=lambda: models.Transformer(3))
}

_QUICK = [
    ("MLP", "AdamW"),
    ("CNN with BatchNorm", "SGD, momentum"),
    ("transformer, 3 layers", "AdamW"),
    pytest.param(_DEEP, "AdamW", marks=pytest.mark.full),
    ("GRU", "Adam"),
    ("embedding, tied", "SGD, momentum"),
    ("ViT", "AdamW"),
]


@pytest.mark.parametrize(("name", "optimizer"), _QUICK)
def test_twenty_steps_equal_those_of_pytorch(name: str, optimizer: str) -> None:
    apart = parity.compare(_EXAMPLES[name], parity.OPTIMIZERS[optimizer])
    assert apart.loss < 1e-5
    assert apart.parameters < 1e-4
    assert apart.compiled_late == 0
