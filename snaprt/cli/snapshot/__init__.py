"""The commands that handle files of recorded executions without running them."""
