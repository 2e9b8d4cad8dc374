"""The persistent compile cache: knows bytes and keys, never graphs, and never snaprt."""
