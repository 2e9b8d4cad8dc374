"""Saves parameters, optimizer state and a key with orbax, restores them in other ways, goes on."""

import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

key = jax.random.key(0)
parameters = {
    "kernel": jax.random.normal(key, (4, 3)) / 2,
    "bias": jnp.zeros((3,), jnp.bfloat16),
    "scale": jnp.float32(1.5),
}
optimizer = optax.adam(1e-2)
state = {"parameters": parameters, "optimizer": optimizer.init(parameters), "step": jnp.int32(0)}


def step(state):
    def loss_of(parameters):
        hidden = jnp.ones((2, 4)) @ parameters["kernel"] + parameters["bias"]
        return jnp.mean((hidden * parameters["scale"] - 1) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["parameters"])
    updates, moments = optimizer.update(gradients, state["optimizer"])
    return {
        "parameters": optax.apply_updates(state["parameters"], updates),
        "optimizer": moments,
        "step": state["step"] + 1,
    }, loss


folder = pathlib.Path(tempfile.mkdtemp())
options = ocp.CheckpointManagerOptions(max_to_keep=2)
with ocp.CheckpointManager(folder / "run", options=options) as manager:
    for number in range(4):
        state, loss = step(state)
        manager.save(number, args=ocp.args.StandardSave(state))
        print(number, f"{loss:.4f}")
    manager.wait_until_finished()
    print("kept", manager.all_steps())
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    restored = manager.restore(3, args=ocp.args.StandardRestore(abstract))
same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)) and a.dtype == b.dtype, state, restored)
print("restored", all(jax.tree.leaves(same)), int(restored["step"]))
state, loss = step(restored)
print("goes on", f"{loss:.4f}")

checkpointer = ocp.PyTreeCheckpointer()
checkpointer.save(folder / "tree", state)
tree = checkpointer.restore(folder / "tree")
print("tree", sorted(tree), f"{np.sum(tree['parameters']['kernel']):.4f}")
with ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()) as background:
    background.save(folder / "async", args=ocp.args.StandardSave(state["parameters"]))
    background.wait_until_finished()
    print("async", sorted(background.restore(folder / "async")))
