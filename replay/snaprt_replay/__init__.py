"""Replay: load a snapshot, run it again, compare, and say what differs."""
