"""An evaluation loop, which adds up what a jitted function says of 500 batches."""

import jax
import jax.numpy as jnp
import numpy as np

random = np.random.default_rng(0)
weights = [jnp.asarray(random.normal(size=(128, 128)).astype(np.float32)) / 11 for _ in range(6)]


@jax.jit
def predict(weights, x):
    for w in weights:
        x = jax.nn.gelu(x @ w)
    return x


correct = total = jnp.zeros((), jnp.int32)
loss = 0.0
for _ in range(500):
    x = random.normal(size=(128, 128)).astype(np.float32)
    labels = random.integers(0, 128, 128)
    logits = predict(weights, x)
    correct += (jnp.argmax(logits, -1) == labels).sum()
    total += len(labels)
    loss += -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()
print(f"{correct / total:.3f} {loss / 500:.2f}")
