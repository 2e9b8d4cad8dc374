"""The command line; it may import everything and is imported by nothing."""
