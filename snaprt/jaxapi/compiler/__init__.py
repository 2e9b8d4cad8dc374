"""JAX's lowering, compiling and caching, below its public functions."""
