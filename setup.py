"""Maps folders at the top of the repository into the package, for every kind of build.

The links elasticzero/launcher and elasticzero/checkpoint serve a checkout only: a zip of the
repository has none.
"""

from setuptools import find_packages, setup

MAPPED = {"elasticzero.launcher": "launcher", "elasticzero.checkpoint": "checkpoint"}
own = [p for p in find_packages(include=["elasticzero*"]) if not p.startswith(tuple(MAPPED))]
mapped = ["elasticzero." + p for p in find_packages(include=["launcher*", "checkpoint*"])]
setup(packages=own + mapped, package_dir=MAPPED)
