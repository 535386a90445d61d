"""Drawn scripts end as by plain torch, or are refused in a sentence before a second step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.generator.buffers import BUFFERS, UNSEEN
from tests.integration.generator.changes import CHANGES
from tests.integration.generator.checks import QUICK, SLOW, check, describe, parts
from tests.integration.generator.draws import NETWORK, Draw, World
from tests.integration.generator.elements import Element
from tests.integration.generator.optimizers import OPTIMIZERS, PLAIN
from tests.integration.generator.play import play
from tests.integration.generator.schedules import NONE, SCHEDULES
from tests.integration.training_harness import Pool

KILLED = World(ranks=2, end="kill", step=3, rank=1, place="backward")
SMALL = Draw(
    seed=1,
    strategy="ddp",
    worlds=(KILLED, World(ranks=1)),
    elements=(BUFFERS[0],),
    optimizer=PLAIN,
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seeds", parts(QUICK, 8), ids=lambda seeds: f"from-{seeds.start}")
def test_scripts_are_exact_or_refused(pool: Pool, tmp_path: Path, seeds: range) -> None:
    check(pool, seeds, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", parts(SLOW, 25), ids=lambda seeds: f"from-{seeds.start}")
def test_many_scripts_are_exact_or_refused(pool: Pool, tmp_path: Path, seeds: range) -> None:
    check(pool, seeds, tmp_path)


def test_state_that_is_lost_is_told_from_state_that_is_kept(pool: Pool, tmp_path: Path) -> None:
    """A count in a plain attribute is lost with its process, and one in a buffer is not."""
    kept = play(pool, SMALL, tmp_path / "kept")
    assert kept.kind == "exact", kept.text
    failing = replace(SMALL, elements=(BUFFERS[1], UNSEEN))
    lost = play(pool, failing, tmp_path / "lost")
    assert lost.kind == "wrong" and "off by" in lost.text, lost
    text = describe(pool, failing, lost, tmp_path / "shrunk", 1)
    smallest = text.partition("The smallest that fails alike: ")[2]
    assert "count in a plain attribute" in smallest and "None until" not in smallest
    assert "self.forwards += 1" in smallest


def element(name: str) -> Element:
    return next(e for e in (*NETWORK, *CHANGES, *OPTIMIZERS, *SCHEDULES) if e.name == name)


STEPPED = World(ranks=3, end="kill", step=3, rank=0, place="stepped")
"""The others are in the next step's forward when a rank dies."""


@pytest.mark.parametrize(
    ("strategy", "names", "kind"),
    [
        ("ddp", ("a weight that a forward hook shrinks afterwards",), "exact"),
        ("ddp", ("a momentum encoder",), "exact"),
        ("ddp", ("shrunk before each forward",), "exact"),
        ("ddp", ("a parameter that is taken out of its group",), "refused"),
        ("zero1", ("a group without parameters", "MultiStepLR"), "exact"),
        ("zero1", ("a parameter that is taken out of its group",), "refused"),
        ("zero1", ("None until its third step",), "refused"),
        ("zero1", ("an attribute that changes at its fifth step only",), "refused"),
        ("zero2", ("a frozen layer", "weights clamped by a hook of the step"), "refused"),
        ("zero2", ("a gradient that is taken away",), "refused"),
        ("zero3", ("parameters of 0 dimensions and of 0 elements",), "exact"),
        ("zero3", ("a backward of its own after the session's",), "refused"),
        ("zero3", ("vector_to_parameters",), "refused"),
        ("zero3", ("first weights put back",), "refused"),
    ],
)
def test_what_draws_have_brought_to_light_stays_right(
    pool: Pool, tmp_path: Path, strategy: str, names: tuple[str, ...], kind: str
) -> None:
    chosen = [element(name) for name in names]
    drawn = replace(
        SMALL,
        strategy=strategy,
        worlds=(STEPPED, World(ranks=2)),
        elements=tuple(e for e in chosen if e not in OPTIMIZERS and e not in SCHEDULES),
        optimizer=next((e for e in chosen if e in OPTIMIZERS), PLAIN),
        schedule=next((e for e in chosen if e in SCHEDULES), NONE),
    )
    verdict = play(pool, drawn, tmp_path)
    assert verdict.kind == kind, verdict.text


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize(
    "forward",
    [
        "model(PROBE, PROBE_I)",
        "session and session.evaluate(DATA, lambda batch: losses_of(model, batch).mean())",
    ],
)
def test_a_change_after_a_forward_between_steps_counts(
    pool: Pool, tmp_path: Path, strategy: str, forward: str
) -> None:
    """FSDP2 leaves the outermost module's parameters gathered, in copies that are freed later."""
    changed = Element(name="a change", stepped=f"{forward}\nmodel.enter.weight.mul_(0.9)")
    verdict = play(pool, replace(SMALL, strategy=strategy, elements=(changed,)), tmp_path)
    assert verdict.kind == "exact", verdict.text


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_hook_on_what_flows_through_a_module_sees_the_gradients_of_one_process(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    """zero3 multiplied them by the number of ranks, by which FSDP2 divides later."""
    clamped = Element(
        name="a clamped gradient",
        init="self.bent = nn.Linear(5, 5)",
        hidden="""
h = h + torch.tanh(self.bent(h))
if h.requires_grad:
    h.register_hook(lambda gradient: gradient.clamp(-0.002, 0.002))
""",
    )
    worlds = (KILLED, World(ranks=3))
    drawn = replace(SMALL, strategy=strategy, elements=(clamped,), worlds=worlds)
    verdict = play(pool, drawn, tmp_path)
    assert verdict.kind == "exact", verdict.text


@pytest.mark.parametrize(
    ("strategy", "text", "kind"),
    [
        ("ddp", "KEPT['schedule'].step()", "exact"),
        ("zero2", "model.enter.weight.mul_(0.75); model.level.mul_(0.5)", "exact"),
        ("zero3", "for p in model.parameters(): p.mul_(0.75)", "exact"),
        ("ddp", "for kept in optimizer.state.values(): kept['exp_avg'].mul_(0.5)", "refused"),
    ],
)
def test_what_lines_between_loops_change_counts_once(
    pool: Pool, tmp_path: Path, strategy: str, text: str, kind: str
) -> None:
    """They run again in each generation, and `scheduler.step()` after each epoch counted twice."""
    changed = Element(
        name="a change",
        init='self.register_buffer("level", torch.ones(1, dtype=D))',
        hidden="h = h * self.level",
        prepared="""
KEPT["schedule"] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
if session is not None:
    session.track("rates", KEPT["schedule"])
""",
        between=text,
    )
    drawn = replace(
        SMALL,
        strategy=strategy,
        elements=(changed,),
        optimizer=element("AdamW"),
        worlds=(World(ranks=2, end="kill", step=7, rank=1, place="backward"), World(ranks=3)),
        each_epoch=True,
        since=7,
    )
    verdict = play(pool, drawn, tmp_path)
    assert verdict.kind == kind, verdict.text


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        ("raise UserError('use another one')", "refused", "use another one"),
        ("if n == 2: raise UserError('use another one')", "failed", "refused only after step 2"),
        ("if n == 1: raise KeyError('raw')", "failed", "KeyError: 'raw'"),
        ("if n == 1: import nothing_like_it", "failed", "ModuleNotFoundError"),
        ("if n == 1: os._exit(3)", "failed", "exits 3"),
    ],
)
def test_only_a_sentence_before_a_second_step_is_a_refusal(
    pool: Pool, tmp_path: Path, text: str, kind: str, reason: str
) -> None:
    ending = Element(
        name="an end",
        top="from elasticzero.errors import UserError",
        begin=f"if SESSION is not None:\n    {text}",
    )
    verdict = play(pool, replace(SMALL, elements=(ending,)), tmp_path)
    assert verdict.kind == kind and reason in verdict.text, verdict


def test_a_script_that_plain_torch_cannot_run_is_no_case(pool: Pool, tmp_path: Path) -> None:
    broken = Element(name="a mistake", begin="if SESSION is None: raise KeyError('mistake')")
    verdict = play(pool, replace(SMALL, elements=(broken,)), tmp_path)
    assert verdict.kind == "invalid" and "mistake" in verdict.text
