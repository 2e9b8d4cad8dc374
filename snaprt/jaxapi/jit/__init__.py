"""What happens inside a call of a jitted function."""
