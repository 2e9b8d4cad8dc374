"""A running program: here recording, compiling, running and snapshots meet."""
