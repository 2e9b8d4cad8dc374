"""Replay many files, on workers or on a cluster, and gather the results for a report."""
