"""Simulates a pendulum with MuJoCo's MJX in a jitted step."""

import jax
import mujoco
import numpy as np
from mujoco import mjx

PENDULUM = """
<mujoco>
  <option timestep="0.01"/>
  <worldbody>
    <body>
      <joint type="hinge" axis="0 1 0"/>
      <geom type="capsule" size="0.02" fromto="0 0 0 0 0 -0.5"/>
    </body>
  </worldbody>
</mujoco>
"""
model = mujoco.MjModel.from_xml_string(PENDULUM)
on_device = mjx.put_model(model)
data = mjx.make_data(on_device)
data = data.replace(qpos=data.qpos.at[0].set(0.7))
step = jax.jit(mjx.step)
for number in range(20):
    data = step(on_device, data)
    if number % 5 == 4:
        print(number, f"{data.time:.2f}", np.round(data.qpos, 3), np.round(data.qvel, 3))
host = mjx.get_data(model, data)
print(np.round(host.qpos, 3))
