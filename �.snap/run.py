"""Runs a recorded execution with jax and numpy alone, and compares: python run.py"""

import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

NAME = 'lazy_graph'
RECORDED_WITH = {'jax': '0.10.2', 'jaxlib': '0.10.2', 'platform': 'cpu'}

# Name and dtype of each input.
INPUTS = [('arg0', 'float32'), ('arg1', 'uint32')]

# Shape and dtype of each result of the module.
RESULTS = [((3, 3), 'float32'), ((3, 3), 'bfloat16')]

# Of each recorded output: name, dtype, allowed relative error, allowed absolute error.
OUTPUTS = [('out0', 'float32', 1.52587890625e-05, 2.144685340234694e-05),
 ('out1', 'bfloat16', 0.03125, 0.04394516650517078)]

HERE = pathlib.Path(__file__).parent


def read(arrays, key, dtype):
    """Return an array; dtypes that NumPy has no name for are stored as their bits."""
    value = arrays[key]
    dtype = jnp.dtype(dtype)
    return value if value.dtype == dtype else value.view(dtype)


def program(inputs):
    """Return a function that calls the recorded module."""
    module = (HERE / "module.mlirbc").read_bytes()
    if b"lapack_" in module:
        jnp.linalg.eigvalsh(jnp.eye(1)).block_until_ready()  # makes JAX load LAPACK

    def stand_in(*arguments):
        return [jnp.zeros(shape, dtype) for shape, dtype in RESULTS]

    exported = export.export(jax.jit(stand_in, keep_unused=True))(*inputs)
    return dataclasses.replace(exported, mlir_module_serialized=module).call


def main():
    jax.config.update("jax_enable_x64", True)  # or JAX would narrow 64-bit arrays
    with np.load(HERE / "arrays.npz", allow_pickle=False) as arrays:
        inputs = [read(arrays, f"input{i}", dtype) for i, (_, dtype) in enumerate(INPUTS)]
        expected = [read(arrays, f"output{i}", row[1]) for i, row in enumerate(OUTPUTS)]
    results = [np.asarray(result) for result in program(inputs)(*inputs)]
    print(f"{NAME}: recorded with {RECORDED_WITH}, run with jax {jax.__version__}")
    if not OUTPUTS:
        for number, result in enumerate(results):
            print(f"result {number}: {result.dtype}{list(result.shape)}")
        print("nothing to compare with: no outputs were recorded")
        return 0
    failed = 0
    for (name, _, rtol, atol), before, now in zip(OUTPUTS, expected, results, strict=True):
        if before.tobytes() == now.tobytes():
            print(f"identical  {name}")
            continue
        wide = np.complex128 if before.dtype.kind == "c" else np.float64
        before, now = before.astype(wide), now.astype(wide)
        with np.errstate(invalid="ignore"):
            error = np.abs(now - before)
            near = (error <= atol + rtol * np.abs(before)) | (before == now)
        near |= np.isnan(before) & np.isnan(now)
        largest = np.nanmax(error, initial=0.0)
        failed += not near.all()
        print(f"{'close' if near.all() else 'DIFFERENT':<10} {name}: largest error {largest:.3g}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
