"""Runs the command line by `python -m elasticzero.launcher.cli`."""

import sys

from elasticzero.launcher.cli.main import main

sys.exit(main())
