"""Run a case, here or in a process of its own."""
