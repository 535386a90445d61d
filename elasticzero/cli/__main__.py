"""Runs the command line by `python -m elasticzero.cli`."""

import sys

from elasticzero.cli.main import main

sys.exit(main())
