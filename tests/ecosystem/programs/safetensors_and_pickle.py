"""Stores arrays in every way a script does: safetensors, npz, pickle, deepcopy, DLPack."""

import copy
import io
import pathlib
import pickle
import tempfile
import weakref

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.flax import load_file, save_file

key = jax.random.key(11)
parameters = {"kernel": jax.random.normal(key, (3, 2)), "bias": jnp.ones(2, jnp.bfloat16) / 3}
with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder) / "model.safetensors"
    save_file(dict(parameters), file)  # it converts the values in place
    loaded = load_file(file)
print({name: bool((loaded[name] == parameters[name]).all()) for name in sorted(loaded)})

kernel = parameters["kernel"] * 2
buffer = io.BytesIO()
np.savez(buffer, kernel=kernel)
buffer.seek(0)
print(np.array_equal(np.load(buffer)["kernel"], kernel))
again = pickle.loads(pickle.dumps({"kernel": kernel + 1, "scale": jnp.asarray(2.0)}))
print(type(again["kernel"]).__name__, again["scale"].weak_type, f"{again['kernel'].sum():.4f}")
copied = copy.deepcopy(parameters)
print(copied["kernel"] is parameters["kernel"], copied["bias"].dtype)
print(weakref.ref(kernel)() is kernel, np.from_dlpack(kernel * 3).shape)
print(jax.device_get({"kernel": kernel[0], "n": 3})["kernel"].round(3))
print(jax.random.key_data(jax.device_get(key)), jax.random.key_impl(key))
print(np.asarray(kernel).flags.writeable, np.array(kernel).flags.writeable)
try:
    hash(kernel)
except TypeError:
    print("unhashable")
print([f"{row.sum():.3f}" for row in kernel], len(kernel), kernel.at[0].set(0)[0])
