"""Processes that work for another: how they are started, and what is sent to them."""
