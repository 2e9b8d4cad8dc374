"""Why something was a miss: what is remembered of misses, and how keys differ."""
