"""Runs `elasticzero checkpoint` as `python -m elasticzero.checkpoint.cli`."""

import sys

from elasticzero.checkpoint.cli.main import main

sys.exit(main())
