"""``snaprt demo``."""
