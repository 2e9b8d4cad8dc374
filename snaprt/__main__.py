"""Starts the command line: as ``python -m snaprt``, and as the script ``snaprt``."""

import sys

from snaprt.host.interruptions import interrupted_at_once


def main() -> int:
    """Run the command line of this process and return its exit status."""
    with interrupted_at_once():
        from snaprt.cli import main as command_line
    return command_line.main()


if __name__ == "__main__":
    sys.exit(main())
