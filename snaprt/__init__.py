"""snaprt: run eager JAX code lazily, cache what XLA compiles, record executions and replay them."""
