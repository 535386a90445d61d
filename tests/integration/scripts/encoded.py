"""The regression, where also its small matrices have gradients that `--wire` encodes."""

import runpy
from pathlib import Path

from elasticzero.parallel.wire import codecs

codecs.LEAST_ELEMENTS = 1
runpy.run_path(str(Path(__file__).with_name("regression.py")), run_name="__main__")
