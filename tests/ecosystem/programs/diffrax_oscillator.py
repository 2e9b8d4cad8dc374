"""Solves a damped oscillator with diffrax, adaptively, and fits its damping by gradients."""

import diffrax
import jax
import jax.numpy as jnp


def motion(time, state, damping):
    position, velocity = state
    return velocity, -position - damping * velocity


def solve(damping):
    return diffrax.diffeqsolve(
        diffrax.ODETerm(motion),
        diffrax.Tsit5(),
        t0=0.0,
        t1=4.0,
        dt0=0.1,
        y0=(jnp.float32(1.0), jnp.float32(0.0)),
        args=damping,
        saveat=diffrax.SaveAt(ts=jnp.linspace(0, 4, 9)),
        stepsize_controller=diffrax.PIDController(rtol=1e-5, atol=1e-6),
    )


solution = solve(jnp.float32(0.3))
positions, _ = solution.ys
print([f"{position:.3f}" for position in positions])
print("solved", solution.result == diffrax.RESULTS.successful, int(solution.stats["num_steps"]))

target = positions


@jax.jit
def step(damping):
    def loss_of(damping):
        return jnp.mean((solve(damping).ys[0] - target) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(damping)
    return damping - 2 * gradient, loss


damping = jnp.float32(0.6)
for number in range(6):
    damping, loss = step(damping)
    print(number, f"{damping:.3f} {loss:.4f}")
