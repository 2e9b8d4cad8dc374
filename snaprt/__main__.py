"""``python -m snaprt``: the command line, where the script ``snaprt`` is not on the PATH."""

import sys

from snaprt.cli.main import main

sys.exit(main())
