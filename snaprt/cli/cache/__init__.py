"""``snaprt cache`` and its subcommands."""
