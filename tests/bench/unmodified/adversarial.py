"""Two jitted steps in turn, as of a generator and its critic, with an average of the weights."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

optimizer = optax.adam(1e-3)
random = np.random.default_rng(0)


def layers(*sizes):
    return [
        (jnp.asarray(random.normal(size=pair).astype(np.float32)) / 8, jnp.zeros(pair[1]))
        for pair in itertools.pairwise(sizes)
    ]


def apply(params, x):
    for w, b in params[:-1]:
        x = jax.nn.leaky_relu(x @ w + b)
    return x @ params[-1][0] + params[-1][1]


generator, critic = layers(16, 128, 32), layers(32, 128, 1)
states = optimizer.init(generator), optimizer.init(critic)


@jax.jit
def critic_step(critic, state, generator, real, noise):
    def loss_of(critic):
        fake = apply(generator, noise)
        return jnp.mean(
            jax.nn.softplus(apply(critic, fake)) + jax.nn.softplus(-apply(critic, real))
        )

    loss, grads = jax.value_and_grad(loss_of)(critic)
    updates, state = optimizer.update(grads, state)
    return optax.apply_updates(critic, updates), state, loss


@jax.jit
def generator_step(generator, state, critic, noise):
    def loss_of(generator):
        return jnp.mean(jax.nn.softplus(-apply(critic, apply(generator, noise))))

    loss, grads = jax.value_and_grad(loss_of)(generator)
    updates, state = optimizer.update(grads, state)
    return optax.apply_updates(generator, updates), state, loss


key, average, losses = jax.random.key(0), generator, []
for _ in range(300):
    key, own = jax.random.split(key)
    noise = jax.random.normal(own, (256, 16))
    real = random.normal(size=(256, 32)).astype(np.float32)
    critic, state, first = critic_step(critic, states[1], generator, real, noise)
    states = states[0], state
    generator, state, second = generator_step(generator, states[0], critic, noise)
    states = state, states[1]
    average = jax.tree.map(lambda a, p: 0.99 * a + 0.01 * p, average, generator)
    losses.append((first, second))
print(f"{losses[-1][0]:.1f} {losses[-1][1]:.1f} {jnp.abs(average[0][0]).mean():.2f}")
