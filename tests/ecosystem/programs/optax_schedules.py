"""Fits a line with a chain of optax transformations, schedules and a plateau, read at each step."""

import jax
import jax.numpy as jnp
import optax

key = jax.random.PRNGKey(3)
inputs = jax.random.uniform(key, (128,), minval=-1, maxval=1)
targets = 3 * inputs - 0.5

schedule = optax.warmup_cosine_decay_schedule(0.0, 0.3, warmup_steps=3, decay_steps=12)
optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.scale_by_adam(),
    optax.add_decayed_weights(1e-4),
    optax.scale_by_learning_rate(schedule),
    optax.contrib.reduce_on_plateau(patience=2, factor=0.5),
)


def loss_of(parameters):
    return optax.huber_loss(parameters["slope"] * inputs + parameters["offset"], targets).mean()


@jax.jit
def update(parameters, state):
    loss, gradients = jax.value_and_grad(loss_of)(parameters)
    updates, state = optimizer.update(gradients, state, parameters, value=loss)
    return optax.apply_updates(parameters, updates), state, loss


parameters = {"slope": jnp.zeros(()), "offset": jnp.zeros(())}
state = optimizer.init(parameters)
best = float("inf")
for step in range(12):
    parameters, state, loss = update(parameters, state)
    if loss < best:
        best = float(loss)
    print(step, f"{schedule(step):.4f} {loss:.4f} {best:.4f}")
print({name: f"{value:.3f}" for name, value in parameters.items()})
print("norm", f"{optax.global_norm(parameters):.3f}")

solver = optax.lbfgs()
value_and_grad = optax.value_and_grad_from_state(loss_of)
state = solver.init(parameters)
for _ in range(2):
    value, gradient = value_and_grad(parameters, state=state)
    updates, state = solver.update(
        gradient, state, parameters, value=value, grad=gradient, value_fn=loss_of
    )
    parameters = optax.apply_updates(parameters, updates)
print("lbfgs", f"{loss_of(parameters):.5f}")
