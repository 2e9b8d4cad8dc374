"""What the ranks of a job know of each other: how far each one is, and what one has recorded."""
