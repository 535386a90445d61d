"""Has the strategies, which lay parameters, gradients and optimizer state over the ranks.

`ddp` keeps everything whole on each rank, `zero1` partitions the optimizer state, `zero2` the
gradients too, `zero3` also the parameters. A gradient is the mean over the global batch in all of
them, and what they write of the training state has the same names.
"""

from elasticzero.parallel.base import OptimizerFactory, Setting, Strategy
from elasticzero.parallel.strategies import create

__all__ = ["OptimizerFactory", "Setting", "Strategy", "create"]
