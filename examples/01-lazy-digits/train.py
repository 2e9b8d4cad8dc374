"""Train a small network on the handwritten digits: plain flax and optax, one graph per step."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import snaprt

digits = load_digits()
pixels = (digits.data / 16).astype(np.float32)
labels = digits.target.astype(np.int32)


class Network(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 128, rngs=rngs)
        self.last = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.hidden(x)))


with snaprt.lazy():
    network = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(network, optax.adam(3e-3), wrt=nnx.Param)
    for step in range(30):
        batch = np.random.default_rng(step).integers(0, 1500, 128)
        x, y = jnp.asarray(pixels[batch]), jnp.asarray(labels[batch])

        def loss_of(network, x=x, y=y):
            return optax.softmax_cross_entropy_with_integer_labels(network(x), y).mean()

        loss, gradients = nnx.value_and_grad(loss_of)(network)
        optimizer.update(network, gradients)
        snaprt.mark_step()  # everything above runs here, as one XLA program
        if step % 10 == 9:
            print(f"step {step + 1}: loss {float(loss):.3f}")

counter = snaprt.metrics.counter_value
print(f"steps {counter('MarkStep')}, programs compiled {counter('UncachedCompile')}")
