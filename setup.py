"""Maps folders at the top of the repository into the package, for every kind of build.

The links elasticzero/launcher and elasticzero/checkpoint serve a checkout only: a zip of the
repository has none. The files that `elasticzero show` prints have their places below
elasticzero/share, and no copy in the repository.
"""

from shutil import rmtree

from setuptools import find_packages, setup

MAPPED = {"elasticzero.launcher": "launcher", "elasticzero.checkpoint": "checkpoint"}
SHARED = {
    "elasticzero.share.examples": "examples",
    "elasticzero.share.examples.ports": "examples/ports",
    "elasticzero.share.examples.slurm": "examples/slurm",
    "elasticzero.share.k8s.components.monitoring": "k8s/components/monitoring",
    "elasticzero.share.k8s.components.networks": "k8s/components/networks",
}
own = [p for p in find_packages(include=["elasticzero*"]) if not p.startswith(tuple(MAPPED))]
mapped = ["elasticzero." + p for p in find_packages(include=["launcher*", "checkpoint*"])]
rmtree("build/lib", ignore_errors=True)  # what an earlier build left there would be packed again
setup(packages=[*own, *mapped, *SHARED], package_dir=MAPPED | SHARED)
