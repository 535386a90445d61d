"""Names the release: a file of its own, so that no module imports the package that exports all."""

__version__ = "0.2.0"
