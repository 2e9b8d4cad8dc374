"""Swings a double pendulum with Brax under several torques."""

import jax
import jax.numpy as jnp
from brax.generalized import pipeline
from brax.io import mjcf

PENDULUM = """
<mujoco>
  <option timestep="0.02"/>
  <worldbody>
    <body>
      <joint name="shoulder" type="hinge" axis="0 1 0" damping="0.1"/>
      <geom type="capsule" size="0.02" mass="1" fromto="0 0 0 0 0 -0.5"/>
      <body pos="0 0 -0.5">
        <joint name="elbow" type="hinge" axis="0 1 0" damping="0.1"/>
        <geom type="capsule" size="0.02" mass="1" fromto="0 0 0 0 0 -0.5"/>
      </body>
    </body>
  </worldbody>
  <actuator>
    <motor joint="shoulder" gear="1"/>
  </actuator>
</mujoco>
"""
system = mjcf.loads(PENDULUM)
start = jnp.array([0.3, -0.2])


@jax.jit
def swing(torques):
    """Return the angles of both joints after each step."""
    state = pipeline.init(system, start, jnp.zeros(2))

    def step(state, torque):
        state = pipeline.step(system, state, torque[None])
        return state, state.q

    return jax.lax.scan(step, state, torques)[1]


for torque in (0.0, 0.5, 1.0):
    angles = swing(torque * jnp.ones(20))
    print(torque, [f"{angle:.3f}" for angle in angles[-1]])
