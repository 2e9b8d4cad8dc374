"""Records eager JAX operations and decides where the recording is cut into programs."""
