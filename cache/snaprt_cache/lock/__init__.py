"""Locks between processes, and what must hold around a fork."""
