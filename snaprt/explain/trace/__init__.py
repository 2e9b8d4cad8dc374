"""Writes the folder that SNAPRT_TRACE names: every form of each graph, and a page over all."""
