"""Builds a penzai model with named axes, edits it by selecting, and prints it with treescope."""

import dataclasses

import jax
import jax.numpy as jnp
import treescope
from penzai import pz

affine = pz.nn.Affine.from_config(
    "first", init_base_rng=jax.random.key(0), input_axes={"in": 3}, output_axes={"out": 4}
)
model = pz.nn.Sequential([affine, pz.nn.Elementwise(jax.nn.relu)])
inputs = pz.nx.wrap(jnp.linspace(-1, 1, 6).reshape(2, 3)).tag("batch", "in")
outputs = model(inputs)
print(dict(outputs.named_shape))
print([f"{value:.3f}" for value in outputs.untag("batch", "out").unwrap().sum(1)])
model, variables = pz.unbind_params(model, freeze=True)
print({variable.label: variable.value.named_shape for variable in variables})
doubled = pz.bind_variables(model, [dataclasses.replace(v, value=2 * v.value) for v in variables])
print(f"{doubled(inputs).untag('batch', 'out').unwrap().sum():.3f}")
print(treescope.render_to_text(jnp.arange(6.0).reshape(2, 3)))
print(treescope.render_to_text({"weights": jnp.ones((2, 2)), "key": jax.random.PRNGKey(0)}))
print(len(treescope.render_to_text(model)) > 100)
print("array" in treescope.render_to_html(jnp.ones((3, 3))).lower())
