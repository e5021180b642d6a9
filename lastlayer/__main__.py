"""Run the command line: ``python -m lastlayer``."""

import sys

from lastlayer.cli import main

if __name__ == "__main__":
    sys.exit(main())
