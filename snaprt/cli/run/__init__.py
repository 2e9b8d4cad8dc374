"""``snaprt run``."""
