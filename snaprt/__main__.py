"""``python -m snaprt``: the command line, where the script ``snaprt`` is not on the PATH."""

from snaprt.cli.main import main

main()
