"""The lazy runtime: records eager JAX operations into a graph and cuts it."""
