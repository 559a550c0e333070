"""The model of collectors and a learner: what it must give by hand, and what it refuses."""

from dataclasses import replace

import pytest

from benchmarks.scale_simulation import Costs, Line, Setting, simulate
from embodied.errors import UserError

# 10 decisions of 4 environments: a collection takes 10 * (0.01 + 0.02 + 0.03) = 0.6 s, an update of its 40 rows 0.4 s.
COSTS = Costs(decisions=10, environments=4, wait_s=0.03, step_s=0.02, act=Line(0.01, 0.0), update=Line(0.0, 0.01))
ROWS, COLLECTION_S, UPDATE_S = 40, 0.6, 0.4


@pytest.mark.parametrize("speeds", [None, (1.0, 2.0)])
def test_one_synchronous_collector_takes_the_sum(speeds: tuple[float, ...] | None) -> None:
    found = simulate(COSTS, Setting(1, speeds=speeds))
    assert found.steps_per_s == pytest.approx(ROWS / (COLLECTION_S + UPDATE_S))
    assert (found.learning, found.collecting) == pytest.approx((0.4, 0.6))
    assert (found.staleness, found.dropped) == (0.0, 0.0)


@pytest.mark.parametrize("update_s", [0.4, 0.6, 1.1])
def test_beside_the_update_one_collector_takes_the_longer(update_s: float) -> None:
    found = simulate(replace(COSTS, update=Line(update_s, 0.0)), Setting(1, max_staleness=1))
    assert found.steps_per_s == pytest.approx(ROWS / max(COLLECTION_S, update_s))
    assert (found.staleness, found.dropped) == (1.0, 0.0)


def test_what_is_sent_takes_its_time() -> None:
    sent = replace(COSTS, publish_s=0.1, ask_s=0.02, receive_s=0.03, transit_s=0.05)
    found = simulate(sent, Setting(2))  # the second comes while the learner takes what the first gave
    took = 0.1 + 0.02 + 0.05 + COLLECTION_S + 2 * 0.03 + 2 * UPDATE_S
    assert found.steps_per_s == pytest.approx(2 * ROWS / took)


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_many_collectors_saturate_at_the_learner(staleness: int) -> None:
    """Each adds 40 rows, which take the learner 0.4 s: 100 steps/s; a synchronous one waits for a collection, too."""
    found = simulate(COSTS, Setting(50, max_staleness=staleness))
    collection_s = 0.0 if staleness else COLLECTION_S
    assert found.steps_per_s == pytest.approx(50 * ROWS / (collection_s + 50 * UPDATE_S))
    assert found.learning == pytest.approx(50 * UPDATE_S / (collection_s + 50 * UPDATE_S))


@pytest.mark.parametrize(("collectors", "cores", "slower"), [(2, 2, 1), (4, 2, 2), (8, 2, 4)])
def test_collectors_share_cores(collectors: int, cores: int, slower: int) -> None:
    """Without a device of its own a simulator takes as much longer as there are more collectors than cores."""
    costs = replace(COSTS, wait_s=0.0, update=Line(0.2, 0.0))
    speeds = tuple(float(min(busy, cores)) for busy in range(1, 9))
    found = simulate(costs, Setting(collectors, speeds=speeds))
    assert found.steps_per_s == pytest.approx(collectors * ROWS / (slower * 0.3 + 0.2))


def test_inference_for_all_is_in_batches() -> None:
    """All step at the same time: one batch for each decision, 0.01 s + 0.001 s for each of 3 * 4, and the way."""
    costs = replace(COSTS, act=Line(0.01, 0.001), round_trip_s=0.008)
    found = simulate(costs, Setting(3, central=True))
    took = 10 * (0.008 + 0.01 + 0.012 + 0.02 + 0.03) + 3 * UPDATE_S
    assert found.steps_per_s == pytest.approx(3 * ROWS / took)
    assert found.inferring == pytest.approx(10 * 0.022 / took)


def test_a_synchronous_learner_waits_for_the_slowest_and_a_stale_one_does_not() -> None:
    costs = replace(COSTS, spread=0.5, update=Line(0.0, 0.001))
    waiting, going_on = (simulate(costs, Setting(20, max_staleness=each), updates=100) for each in (0, 4))
    even = simulate(replace(costs, spread=0.0), Setting(20))
    assert waiting.steps_per_s < 0.7 * even.steps_per_s
    assert going_on.steps_per_s > 1.5 * waiting.steps_per_s
    assert 0.0 < going_on.staleness <= 4.0


def test_a_setting_repeats_itself() -> None:
    costs = replace(COSTS, spread=0.3)
    first, again, other = (simulate(costs, Setting(5, max_staleness=1), seed=seed) for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: replace(COSTS, wait_s=-1.0), "expected wait_s of at least 0, got -1"),
        (lambda: replace(COSTS, update=Line(0.0, float("nan"))), "expected update of at least 0"),
        (lambda: replace(COSTS, environments=0), "expected decisions and environments"),
        (lambda: Setting(0), "expected collectors"),
        (lambda: Setting(1, max_staleness=-1), "expected collectors"),
        (lambda: Setting(1, speeds=(1.0, 0.0)), "expected speeds above 0"),
        (lambda: Setting(1, speeds=()), "expected speeds above 0"),
        (lambda: simulate(COSTS, Setting(1), updates=0), "expected updates of at least 1"),
    ],
)
def test_impossible_numbers_are_refused(wrong, message: str) -> None:
    with pytest.raises(UserError, match=message):
        wrong()
