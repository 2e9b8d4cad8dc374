"""Lowers, compiles (through the cache) and runs programs; knows nothing of what records them."""
