"""How a snapshot is laid out in files: written, stored and read."""
