"""Every optimizer of torch's trains as in one plain process, or is refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from elasticzero import checkpoint as ez_checkpoint
from elasticzero.checkpoint.io.reader import open_step
from elasticzero.checkpoint.steps.catalog import newest_good
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.ipc.assignment import Resume
from elasticzero.ipc.failure import Failed
from elasticzero.ipc.messages import Stepped
from elasticzero.spans import STRATEGIES
from tests.integration import training_gan
from tests.integration.training_harness import Pool
from tests.integration.training_optimizer_table import DIVIDED, OPTIMIZERS
from tests.integration.training_optimizers import (
    SAMPLES,
    Model,
    Samples,
    keepers,
    optimizers,
    schedulers,
    squares,
)
from tests.support.cases import drawn, slow

HERE = Path(__file__).parent
REFUSED = {
    "LBFGS": "LBFGS computes the loss anew inside its step",
    "SparseAdam": "SparseAdam takes sparse gradients only",
}
REFUSED_BY_ROWS = {
    name: f"{name} works on whole parameters, and zero3 divides each of them by rows"
    for name in ("Adafactor", "Muon")
}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_each_optimizer_of_torch_equals_ddp_or_is_refused(pool: Pool, tmp_path: Path) -> None:
    """100 steps of 2 ranks, which have whole matrices of Muon's and Adafactor's."""
    names = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    assert names - {"Optimizer"} == OPTIMIZERS.keys()
    told: dict[str, Any] = {"world_size": 2, "out": str(tmp_path / "table")}
    script = HERE / "training_optimizer_table.py"
    worlds = [pool.start(script, [json.dumps(told | {"rank": rank})], 1) for rank in range(2)]
    for running in worlds:
        running.until(running.ended, 300)
        assert running.workers[0].exit_code == 0, running.logs()
    for rank in range(2):
        table = json.loads((tmp_path / f"table-{rank}").read_text())
        assert table.keys() == set(DIVIDED)
        for strategy, results in table.items():
            assert results.keys() == OPTIMIZERS.keys()
            for name, result in results.items():
                refused = REFUSED | (REFUSED_BY_ROWS if strategy == "zero3" else {})
                if name in refused:
                    assert result.startswith(refused[name]), (strategy, name, result)
                else:
                    assert isinstance(result, float), (strategy, name, result)
                    assert result < 1e-6, (strategy, name, result)


def plain(steps: int, clip: float, factory: Any = optimizers) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model = Model().double()
    made = factory(list(model.parameters()))
    tracked = schedulers(made)
    samples = Samples()
    for step in range(steps):
        batch = [samples[i] for i in range(step * 6 % 42, min(step * 6 % 42 + 6, SAMPLES))]
        squares(model, {k: torch.stack([s[k] for s in batch]) for k in batch[0]}).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for name, optimizer in made.items():
            optimizer.step()
            optimizer.zero_grad()
            tracked[name].step()
    state = {f"model/{n}": p.detach() for n, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for optimizer in made.values():
            for key, value in optimizer.state.get(parameter, {}).items():
                state[f"optimizer/{name}/{key}"] = value
    return state


@pytest.mark.parametrize(
    ("strategies", "bucket_bytes"),
    [
        slow(("zero1", "zero2", "ddp"), 1 << 20),
        (("zero2", "ddp", "zero1"), 300),
        slow(("ddp", "zero1", "zero2"), 300),
    ],
)
def test_muon_and_adamw_on_one_model_through_worlds_and_strategies(
    pool: Pool, tmp_path: Path, strategies: tuple[str, ...], bucket_bytes: int
) -> None:
    """Worlds of 3, 2 and 1, each with another strategy; schedulers on both optimizers."""
    told = {"micro": 1, "clip": 0.5, "bucket_bytes": bucket_bytes}
    worlds = [
        (ranks, told | {"strategy": strategy, "steps": steps})
        for strategy, ranks, steps in zip(strategies, (3, 2, 1), (6, 13, 20), strict=True)
    ]
    pool.train_through(HERE / "training_optimizers.py", tmp_path, worlds)
    state = ez_checkpoint.load(tmp_path)
    expected = plain(20, 0.5)
    named = {n for n in state if n.startswith(("model/", "optimizer/"))}
    assert named == expected.keys()
    for name, tensor in expected.items():
        assert (state[name].double() - tensor.double()).abs().max().item() < 1e-9, name


def test_state_of_every_kind_goes_on_through_worlds(pool: Pool, tmp_path: Path) -> None:
    """Worlds of 3, 2 and 1; state in lists, trees, attributes, and under no parameter."""
    told = {"strategy": "ddp", "keepers": True, "clip": 0.5}
    worlds = [(ranks, told | {"steps": steps}) for ranks, steps in ((3, 5), (2, 8), (1, 13))]
    pool.train_through(HERE / "training_optimizers.py", tmp_path, worlds)
    stored = ez_checkpoint.load(tmp_path)
    expected = plain(13, 0.5, keepers)
    for name, tensor in expected.items():
        if name.startswith("model/"):
            assert (stored[name] - tensor).abs().max().item() < 1e-9, name


def gan_batch(step: int) -> tuple[Tensor, Tensor]:
    """The noise and the real samples of the global batch of this step."""
    samples = training_gan.Samples()
    batch = [samples[i % training_gan.SAMPLES] for i in range(step * 6, step * 6 + 6)]
    noise, real = (torch.stack([sample[key] for sample in batch]) for key in ("noise", "real"))
    return noise, real


def plain_gan(steps: int) -> dict[str, Tensor]:
    """Each network has the gradient of its own loss, and both are stepped then."""
    gan = training_gan.build("lists")
    made = training_gan.optimizers(gan)
    for step in range(steps):
        noise, real = gan_batch(step)
        fake = gan.generator(noise)
        losses = {
            "generator": softplus(-gan.critic(fake)).mean(),
            "critic": (softplus(gan.critic(fake)) + softplus(-gan.critic(real))).mean(),
        }
        gradients = {}
        for name, loss in losses.items():
            network_parameters = list(gan.get_submodule(name).parameters())
            gradients[name] = torch.autograd.grad(loss, network_parameters, retain_graph=True)
        for name, optimizer in made.items():
            parameters = gan.get_submodule(name).parameters()
            for parameter, gradient in zip(parameters, gradients[name], strict=True):
                parameter.grad = gradient
            optimizer.step()
    return {f"model/{name}": parameter.detach() for name, parameter in gan.named_parameters()}


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_a_gan_with_two_optimizers_is_as_in_one_process(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    told = {"strategy": strategy, "steps": 12, "micro": 1}
    script = HERE / "training_gan.py"
    running = pool.start(script, [json.dumps(told)], 2, checkpoint_dir=str(tmp_path))
    assert running.finish() == 12
    state = ez_checkpoint.load(tmp_path)
    for name, tensor in plain_gan(12).items():
        assert (state[name] - tensor).abs().max().item() < 1e-9, name


def plain_turns(
    steps: int, turns: str, bad: tuple[int, ...] = (), kind: str = "lists"
) -> dict[str, Tensor]:
    """The two networks are stepped one after the other, each by its own loss."""
    gan = training_gan.build(kind)
    made = training_gan.optimizers(gan)
    for step in range(steps):
        noise, real = gan_batch(step)
        for name in ("critic", "generator") if turns == "within" else (training_gan.turn(step),):
            if name == "generator" and step in bad:
                continue
            gan.zero_grad()
            training_gan.Losses(gan, kind, noise, real).of(name).backward()
            torch.nn.utils.clip_grad_norm_(gan.get_submodule(name).parameters(), training_gan.CLIP)
            made[name].step()
    return {f"model/{name}": parameter.detach() for name, parameter in gan.named_parameters()}


def assert_equal(folder: Path, expected: dict[str, Tensor]) -> None:
    state = ez_checkpoint.load(folder)
    for name, tensor in expected.items():
        assert (state[name] - tensor).abs().max().item() < 1e-9, name


FAST_TURNS = {
    ("zero1", "lists", "within"),
    ("zero2", "lists", "between"),
    ("zero3", "parts", "within"),
}
"""What `make test` runs of the cases below; `make slow` runs all others."""


@pytest.mark.parametrize(
    ("strategy", "kind", "turns", "micro"),
    [
        pytest.param(
            *(strategy, kind, turns, micro),
            marks=[] if (strategy, kind, turns) in FAST_TURNS else [pytest.mark.slow],
        )
        for strategy, kind in [
            *((name, "lists") for name in STRATEGIES),
            ("zero3", "networks"),
            ("zero3", "parts"),
        ]
        for turns, micro in [("within", None), ("between", 1)]
    ],
)
def test_two_networks_in_turn_are_as_in_one_process(
    pool: Pool, tmp_path: Path, strategy: str, kind: str, turns: str, micro: int | None
) -> None:
    """Worlds of 3, of 2 nodes with 2 workers, of 2, and of 1; the gradient of one network is not
    that of the other's loss."""
    told = {"strategy": strategy, "kind": kind, "micro": micro, "turns": turns}
    script, resume = HERE / "training_gan.py", Resume(tier="fresh")
    node = "world" if strategy == "ddp" else "node"
    worlds = ((3, 1, "world", 5), (4, 2, node, 10), (2, 1, "world", 15), (1, 1, "world", 18))
    for generation, (world_size, row, shard, steps) in enumerate(worlds, 1):
        running = pool.start(
            script,
            [json.dumps(told | {"steps": steps})],
            world_size,
            row=row,
            shard=shard,
            generation=generation,
            resume=resume,
            checkpoint_dir=str(tmp_path),
        )
        assert running.finish() == steps
        counted = [stepped.step for stepped in running.workers[0].all(Stepped)]
        assert counted == list(range(resume.step + 1, steps + 1)), "one for each global batch"
        resume = Resume(tier="storage", step=steps)
    assert_equal(tmp_path, plain_turns(18, turns, kind=kind))


@pytest.mark.parametrize("kind", ["networks", "parts"])
def test_zero3_sums_the_gradients_of_one_network_only(
    pool: Pool, tmp_path: Path, kind: str
) -> None:
    """Each network has its two layers as groups of FSDP2, and its head in a group of its own or
    with the other's. The critic's second layer runs twice, for which FSDP2 sums twice."""
    told = {"strategy": "zero3", "kind": kind, "turns": "within", "steps": 2}
    arguments = [json.dumps(told | {"count": str(tmp_path / "count")})]
    assert pool.start(HERE / "training_gan.py", arguments, 2).finish() == 2
    assert json.loads((tmp_path / "count").read_text()) == [4, 3, 4, 3, 0]


@pytest.mark.parametrize("strategy", drawn("zero1", "zero3"))
def test_a_worker_killed_between_two_optimizers_changes_nothing(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    """The generator has not been stepped: training goes on from the newest state of a boundary."""
    told = {"strategy": strategy, "turns": "within", "steps": 12, "die": [1, 6]}
    told["saved"] = str(tmp_path)
    script = HERE / "training_gan.py"
    options: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "checkpoint_every": 2}
    running = pool.start(script, [json.dumps(told)], 3, generation=1, **options)
    running.until(running.ended)
    newest = newest_good(open_directory(str(tmp_path)))
    assert newest is not None and newest <= 6
    resume = Resume(tier="storage", step=newest)
    running = pool.start(script, [json.dumps(told)], 2, generation=2, resume=resume, **options)
    assert running.finish() == 12
    assert_equal(tmp_path, plain_turns(12, "within"))


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_a_bad_loss_of_one_network_is_left_out_and_the_other_is_stepped(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    told = {"strategy": strategy, "turns": "within", "steps": 8, "bad": [3]}
    line = json.dumps(told | {"out": str(tmp_path / "applied")})
    running = pool.start(
        HERE / "training_gan.py", [line], 2, checkpoint_dir=str(tmp_path), on_nonfinite="skip"
    )
    assert running.finish() == 8
    for rank in range(2):
        applied = json.loads((tmp_path / f"applied-{rank}").read_text())
        assert applied == [index != 7 for index in range(16)]
    assert_equal(tmp_path, plain_turns(8, "within", bad=(3,)))
    manifest = open_step(open_directory(str(tmp_path)).step(f"step-{8:012d}")).manifest
    assert manifest.state["position"].get("skipped", []) == []


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"strategy": "zero1", "micro": 1}, "in the middle of a global batch"),
        ({"strategy": "ddp", "odd": ["generator"]}, "ranks gave session.backward different only="),
        ({"strategy": "zero1", "odd": ["critic", "generator"]}, "different only= in one turn"),
        (
            {"strategy": "zero3", "odd": ["generator"]},
            "ranks gave session.backward different only=",
        ),
        ({"strategy": "ddp", "stale": True}, "modified by an inplace operation"),
        ({"strategy": "zero1", "stale": True}, "modified by an inplace operation"),
        ({"strategy": "zero3", "stale": True}, "modified by an inplace operation"),
        ({"strategy": "zero3", "turns": None}, "is replaced, as torch.func.functional_call does"),
    ],
)
def test_a_step_of_one_network_alone_is_refused_where_it_would_be_wrong(
    pool: Pool, tmp_path: Path, told: dict[str, Any], message: str
) -> None:
    line = json.dumps({"turns": "within", "steps": 2} | told)
    running = pool.start(HERE / "training_gan.py", [line], 2, checkpoint_dir=str(tmp_path))
    running.until(running.ended)
    assert any(message in worker.log.read_text() for worker in running.workers), running.logs()


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_a_stop_between_two_optimizers_saves_no_half_of_a_step(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    """The critic has been stepped when the generator's loss is NaN."""
    line = json.dumps({"strategy": strategy, "turns": "within", "steps": 8, "bad": [3]})
    options: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "checkpoint_every": 2}
    running = pool.start(HERE / "training_gan.py", [line], 2, **options)
    running.until(running.ended)
    messages = [failed.message for worker in running.workers for failed in worker.all(Failed)]
    assert any("step 4 was not applied" in message for message in messages), running.logs()
    newest = newest_good(open_directory(str(tmp_path)))
    assert newest in (2, 3)
    assert_equal(tmp_path, plain_turns(newest, "within"))
