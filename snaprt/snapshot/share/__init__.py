"""Lists, packs, redacts and prunes what was recorded."""
