"""`python -m monoblock` is the command `monoblock`."""

import sys

from monoblock.cli.main import run

sys.exit(run())
