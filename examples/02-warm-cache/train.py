"""Some steps of a deep network, and how long the first of them took."""

import time

import jax
import jax.numpy as jnp

import snaprt

LAYERS, WIDTH = 12, 64


def loss_of(layers, x):
    for weights in layers:
        x = x + jnp.tanh(x @ weights)
    return jnp.mean(x**2)


with snaprt.lazy():
    layers = list(jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) * 0.1)
    x = jax.random.normal(jax.random.key(1), (32, WIDTH))
    started = time.perf_counter()
    for step in range(5):
        loss, gradients = jax.value_and_grad(loss_of)(layers, x)
        layers = [w - 0.1 * g for w, g in zip(layers, gradients, strict=True)]
        snaprt.mark_step(wait=True)
        if step == 0:
            print(f"first step after {time.perf_counter() - started:.2f} s")
    print(f"loss {float(loss):.4f}")

counter = snaprt.metrics.counter_value
print("from the cache on disk:", counter("PersistentCacheHit") or 0)
print("compiled and stored:", counter("PersistentCacheMiss") or 0)
