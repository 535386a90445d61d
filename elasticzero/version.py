"""Names the release: a file of its own, so that no module imports the package that exports all."""

import re
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

__version__ = "0.2.0"

_VERSION_OF_TORCH = re.compile(r"^__version__ = ['\"]([^'\"]+)['\"]", re.MULTILINE)


def torch_version() -> str:
    """Returns the version of the installed torch with its build, such as 2.13.0+cpu, without an
    import of torch; empty: it cannot be read."""
    with suppress(ImportError, OSError, ValueError):
        spec = find_spec("torch")
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            match = _VERSION_OF_TORCH.search((Path(folder) / "version.py").read_text())
            if match is not None:
                return match[1]
    return ""
