"""Decides which executions to record, and hands them to the writer."""
