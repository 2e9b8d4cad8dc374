"""``snaprt bundle``: run a program and pack its logs, graphs, metrics and versions."""
