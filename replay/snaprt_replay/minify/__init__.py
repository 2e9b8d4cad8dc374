"""Make the program that shows a failure as small as possible; `pipeline` is the entry point."""
