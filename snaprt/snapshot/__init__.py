"""The snapshot files of an execution: when to write them, how, and how to read them."""
