"""Plain ``jax.jit`` programs: each call of a jitted function is an execution to be recorded."""
