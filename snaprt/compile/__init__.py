"""Finds the executable of a program in memory or in the cache, or compiles it; runs it."""
