"""Write the pending step of a PyTorch/XLA program as files that `snaprt replay` runs.

Needs torch_xla and NumPy, not snaprt. Copy this file next to your program.
"""

from pathlib import Path

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm


def write_step(folder, outputs):
    """Write the computation of `outputs`, its inputs and its results; then sync.

    Call this where the program calls `torch_xla.sync()`, while the step is still pending: the sync
    may overwrite the inputs with the results.

    Args:
        folder: Where `step.mlirbc`, `inputs.npz` and `outputs.npz` are written.
        outputs: XLA tensors to compute: the loss, and parameters that the optimizer has updated.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Neither call runs the graph, and both visit its inputs in the same order.
    (folder / "step.mlirbc").write_bytes(xm.get_stablehlo_bytecode(outputs))
    _, inputs = torch_xla._XLAC._get_tensors_xla_device_data_node(outputs)
    save(folder / "inputs.npz", "arg", inputs)
    torch_xla.sync(wait=True)
    save(folder / "outputs.npz", "out", outputs)


def save(path, prefix, tensors):
    """Save tensors as arrays; those of types that NumPy lacks, such as bfloat16, as raw bytes."""
    arrays = {}
    for number, tensor in enumerate(tensors):
        tensor = tensor.detach().cpu()
        try:
            array = tensor.numpy()
        except TypeError:
            size = tensor.element_size()
            array = tensor.view({1: torch.int8, 2: torch.int16}[size]).numpy().view(f"V{size}")
        arrays[f"{prefix}{number}"] = array
    np.savez(path, **arrays)
