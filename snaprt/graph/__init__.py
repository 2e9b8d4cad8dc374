"""Programs as plain data: operations, how they are wired, and what identifies them."""
