"""Schedules of the learning rate, which the session tracks, and rates that the script sets itself.

`made` is the body of `make_schedule(optimizer, total)`, where `optimizer` is the first of several
and `total` the number of steps; `stepped` steps `schedule`, or sets the rate by itself.
"""

from __future__ import annotations

from tests.integration.generator.elements import Element

NONE = Element(name="no schedule", odds=12)


def _schedule(name: str, text: str, step: str = "schedule.step()", *, odds: int = 2) -> Element:
    made = f"return torch.optim.lr_scheduler.{text}"
    return Element(name=name, made=made, stepped=step, odds=odds)


SCHEDULES = [
    NONE,
    _schedule("StepLR", "StepLR(optimizer, step_size=2, gamma=0.7)"),
    _schedule("MultiStepLR", "MultiStepLR(optimizer, [2, 5, 5, 7], gamma=0.5)"),
    _schedule("LambdaLR", "LambdaLR(optimizer, lambda step: 1 - step / (2 * total))"),
    _schedule("MultiplicativeLR", "MultiplicativeLR(optimizer, lambda step: 0.9)"),
    _schedule("CosineAnnealingLR", "CosineAnnealingLR(optimizer, total, eta_min=1e-3)"),
    _schedule("warm restarts", "CosineAnnealingWarmRestarts(optimizer, 2, T_mult=2)"),
    _schedule(
        "OneCycleLR",
        "OneCycleLR(optimizer, 0.05, total_steps=total + 1, "
        'cycle_momentum="betas" in optimizer.defaults)',
    ),
    _schedule("CyclicLR", "CyclicLR(optimizer, 0.01, 0.05, step_size_up=2, cycle_momentum=False)"),
    _schedule(
        "ReduceLROnPlateau",
        "ReduceLROnPlateau(optimizer, patience=0, factor=0.5)",
        "schedule.step(abs(n - 4))",
    ),
    Element(
        name="SequentialLR",
        made="""
first = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=3)
later = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
return torch.optim.lr_scheduler.SequentialLR(optimizer, [first, later], [3])
""",
        stepped="schedule.step()",
        odds=2,
    ),
    Element(
        name="ChainedScheduler",
        made="""
first = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=4)
later = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
return torch.optim.lr_scheduler.ChainedScheduler([first, later], optimizer)
""",
        stepped="schedule.step()",
        odds=2,
    ),
    Element(
        name="a rate that the script sets",
        stepped="""
for group in listed(optimizer)[0].param_groups:
    group["lr"] = group["lr"] * 0.8
""",
        odds=3,
    ),
    Element(
        name="a decay that the script sets",
        stepped="""
for group in listed(optimizer)[0].param_groups:
    group["weight_decay"] = 0.01 * n
""",
        odds=1,
    ),
]
