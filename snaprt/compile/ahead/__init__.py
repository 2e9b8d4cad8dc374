"""Programs that are collected in one run and compiled ahead of time in others."""
