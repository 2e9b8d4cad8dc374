"""Trains with flax and optax, `value_and_grad` written out in Python, nothing jitted."""

import flax.linen as nn
import jax
import numpy as np
import optax


class Perceptron(nn.Module):
    @nn.compact
    def __call__(self, x):
        for width in (64, 64):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(10)(x)


random = np.random.default_rng(0)
model, optimizer = Perceptron(), optax.adam(1e-2)
params = model.init(jax.random.key(0), np.zeros((1, 32), np.float32))
state = optimizer.init(params)
for number in range(150):
    x = random.normal(size=(64, 32)).astype(np.float32)
    labels = np.argmax(x[:, :10], axis=1)

    def loss_of(params, x=x, labels=labels):
        logits = model.apply(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, state = optimizer.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    if number % 50 == 49:
        print(number, f"{loss:.2f}")
