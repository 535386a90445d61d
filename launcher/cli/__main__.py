"""Runs the command line by `python -m elasticzero.launcher.cli`, its name before `elasticzero.cli`.

It is the one place of the launcher that imports a layer above it.
"""

import sys

from elasticzero.cli.main import main

sys.exit(main())
