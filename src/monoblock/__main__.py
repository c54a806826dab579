"""Run the command line with `python -m monoblock`."""

import sys

from monoblock.cli.main import run

sys.exit(run())
