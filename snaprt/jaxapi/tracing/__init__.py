"""Traces, primitives, abstract values and arrays: JAX's eager dispatch."""
