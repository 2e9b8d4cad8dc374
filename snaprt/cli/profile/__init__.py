"""``snaprt profile``."""
