"""``python -m flashstep``: the command line, as the ``flashstep`` script."""

import sys

from flashstep.cli import main

if __name__ == "__main__":
    sys.exit(main())
