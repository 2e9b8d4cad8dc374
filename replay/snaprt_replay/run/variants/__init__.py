"""Other ways to run a case: interpreted, operation by operation, in another precision."""
