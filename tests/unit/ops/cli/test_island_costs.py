"""What `plan --link` says of rounds of islands, beside a count of what each island sends."""

from __future__ import annotations

import json

import pytest

from elasticzero.cli.main import main
from elasticzero.ops.cli.island_costs import SHARE, RoundSetting, round_cost, round_costs

LINK = 8e6
"""A megabyte a second."""


def sent_by_each(islands: int, fragments: int) -> list[float]:
    """The megabytes that each island sends in a round of a model of a megabyte."""
    sent = [0.0] * islands
    for fragment in range(fragments):
        owner = fragment % islands
        for island in range(islands):
            if island != owner:
                sent[island] += 1 / fragments  # its contribution
                sent[owner] += 1 / fragments  # the mean
    return sent


@pytest.mark.parametrize("islands", [2, 3, 5, 8])
@pytest.mark.parametrize("fragments", [1, 2, 3, 8, 20])
def test_a_link_is_as_busy_as_what_it_carries(islands: int, fragments: int) -> None:
    cost = round_cost(islands, 250_000, LINK, 0.5, RoundSetting(every=40, fragments=fragments))
    assert cost.busy == pytest.approx(max(sent_by_each(islands, fragments)) / 20)
    assert cost.exchange_s == pytest.approx(2 * (islands - 1) / fragments)
    assert cost.steps == pytest.approx(cost.exchange_s / 0.5)
    short = round_cost(
        islands, 250_000, LINK, 0.5, RoundSetting(every=40, fragments=fragments, wire="bf16")
    )
    assert short.exchange_s == pytest.approx(cost.exchange_s / 2)


def test_the_first_setting_that_fits_is_recommended() -> None:
    costs = round_costs(2, 10_000_000, 100e6, 0.2)
    best = costs["recommended"]
    wires = {row["every"]: row["wire"] for row in costs["rows"]}
    assert wires[10] == "int8" and wires[20] == "bf16", "the most exact one that fits"
    assert wires[50] == wires[500] == "fp32"
    assert best["busy"] <= SHARE and best["steps"] <= SHARE * best["every"]
    assert not any(row["fits"] for row in costs["rows"] if row["every"] < best["every"])
    assert all(row["fits"] for row in costs["rows"] if row["every"] >= best["every"])
    faster = round_costs(2, 10_000_000, 10e9, 0.2)["recommended"]
    assert (faster["every"], faster["fragments"], faster["wire"]) == (10, 1, "fp32")
    assert round_costs(8, 7_000_000_000, 1e8, 0.2)["recommended"] is None


def test_plan_shows_it_where_a_step_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--params", "10M", "--nodes", "2", "--link", "100mbit"]
    assert main([*plan, "--step-time", "0.2"]) == 0
    shown = capsys.readouterr().out
    setting = "every=10,fragments=2,wire=int8"
    assert f"--strategy diloco --diloco {setting}, which takes 152.6 MiB" in shown
    assert main([*plan, "--step-time", "0.2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["islands"]["recommended"]["every"] == 10
    assert main([*plan, "--json"]) == 0
    assert "islands" not in json.loads(capsys.readouterr().out)
    assert main([*plan[:2], "7B", *plan[3:], "--step-time", "0.2"]) == 0
    assert "None fits" in capsys.readouterr().out
