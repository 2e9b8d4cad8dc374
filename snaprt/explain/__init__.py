"""Says what the lazy runtime does, and why: who looks on, and what is told of it."""
