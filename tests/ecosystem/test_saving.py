"""What docs/how-to/coming-from-pytorch-xla.md says of saving works as it stands, in one graph."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import snaprt

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "coming-from-pytorch-xla.md"


@pytest.mark.ecosystem
def test_arrays_are_moved_and_saved_in_three_formats(tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    safetensors = pytest.importorskip("safetensors.numpy")
    text = PAGE.read_text(encoding="utf-8")
    (code,) = re.findall(r"<!-- tested: saving -->\n```python\n(.*?)```", text, re.S)
    with snaprt.lazy():
        params = {"kernel": jnp.arange(6.0).reshape(3, 2) * 2, "bias": jnp.ones(2) / 4}
        exec(code, {"snaprt": snaprt, "params": params, "folder": tmp_path})
    graphs = snaprt.metrics.metric_data("TensorsGraphSize")
    assert graphs is not None
    assert graphs[0] == 1
    wanted = {"kernel": [[0, 2], [4, 6], [8, 10]], "bias": [0.25, 0.25]}
    with checkpoint.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "params")
    for saved in (
        np.load(tmp_path / "params.npz"),
        safetensors.load_file(tmp_path / "params.safetensors"),
        restored,
    ):
        assert sorted(saved) == sorted(wanted)
        for name, value in wanted.items():
            np.testing.assert_array_equal(saved[name], np.float32(value))
