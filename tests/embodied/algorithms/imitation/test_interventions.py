"""HG-DAgger and intervention weighted regression: batches by hand, learning from a person, resuming."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch

from embodied.algorithms.imitation.interventions import HGDAgger, HGDAggerConfig, IWRConfig
from embodied.algorithms.imitation.sft import SFTConfig
from embodied.data.episodes import FAILED, SUCCEEDED, UNKNOWN
from embodied.data.store import EpisodeStore
from embodied.errors import UserError
from embodied.rollout.rollout import Collector, Rollout
from policies.mlp import MLPConfig, MLPPolicy
from tests.embodied.algorithms.off_policy.test_interventions import helped
from tests.embodied.algorithms.off_policy.test_sac import episodes
from tests.embodied.reach import Reach


def make(
    config: HGDAggerConfig,
    seed: int = 0,
    *,
    demonstrations: bool = True,
    outcomes: tuple[int, int] = (UNKNOWN, UNKNOWN),
    running_statistics: bool = False,
) -> tuple[MLPPolicy, HGDAgger, Collector]:
    torch.manual_seed(seed)
    env = Reach(32)
    policy = MLPConfig(hidden=[32], initial_std=0.1, running_statistics=running_statistics).build(env.contract)
    policy.fit(env.reset(starts=torch.arange(32)), torch.zeros(1, 1))
    generator = torch.Generator().manual_seed(seed)
    config = replace(config, updates=0.25, sft=SFTConfig(batch=1200, learning_rate=3e-3))
    recorded = replace(episodes(math.nan), success=torch.tensor(outcomes, dtype=torch.int8))
    learner = config.build(policy, recorded if demonstrations else None, env, generator)
    return policy, learner, Collector(env, policy, generator)


def counts(learner: HGDAgger) -> tuple[int, int, int]:
    """Numbers of interventions, of the policy's decisions and of demonstrated ones in a batch."""
    own, recorded = learner._draw(*learner._pools())
    by_person = torch.isin(own, learner.replay.own.intervened())
    return int(by_person.sum()), int((~by_person).sum()), len(recorded)


def test_batches_are_demonstrations_of_unknown_reward_and_interventions_in_proportion() -> None:
    _, learner, collector = make(HGDAggerConfig())
    assert counts(learner) == (0, 0, 1200)
    for _ in range(4):
        learner.replay.add(helped(collector.collect(2), 0, 3))
    # four decisions of the person, eight that were demonstrated
    human, own, recorded = counts(learner)
    assert own == 0
    assert human == pytest.approx(1200 * 4 / 12, rel=0.15)
    assert human + recorded == 1200


def test_failed_demonstrations_are_not_imitated() -> None:
    _, learner, _ = make(HGDAggerConfig(), outcomes=(SUCCEEDED, FAILED))
    rows = learner._draw(*learner._pools())
    assert (learner.replay.chunks(rows, 2)["observation", "position"] > 0.0).all()  # those of the first episode
    with pytest.raises(UserError, match="all 2 episodes of the demonstrations failed; imitation needs others"):
        make(HGDAggerConfig(), outcomes=(FAILED, FAILED))


def test_half_of_a_batch_is_interventions_and_the_rest_all_other_decisions() -> None:
    _, learner, collector = make(IWRConfig())
    learner.replay.add(helped(collector.collect(2), 0, 3))
    known = len(learner.replay)
    human, own, recorded = counts(learner)
    assert human == 600
    assert own == pytest.approx(600 * (known - 1) / (known - 1 + 8), rel=0.05)
    assert own + recorded == 600


def test_with_a_share_of_zero_interventions_are_not_imitated() -> None:
    _, learner, collector = make(IWRConfig(intervention_share=0.0))
    learner.replay.add(helped(collector.collect(2), 0, 3))
    human, own, recorded = counts(learner)
    assert human == 0
    assert own > 0
    assert own + recorded == 1200


def test_without_demonstrations_learning_begins_with_the_first_intervention() -> None:
    for config, batch in ((HGDAggerConfig(), 1200), (IWRConfig(own_decisions=False), 600)):
        _, learner, collector = make(config, demonstrations=False)
        rollout = collector.collect(2)
        alone = replace(rollout, signals={"human": torch.zeros_like(rollout.executed)})
        assert learner.update(alone, 0.0) == {"interventions": 0.0}
        assert learner.gradient_steps == 0
        metrics = learner.update(helped(collector.collect(2), 1, 3), 0.0)
        assert metrics["interventions"] == 1.0
        assert math.isfinite(metrics["loss"])
        assert counts(learner) == (batch, 0, 0)
        assert learner.gradient_steps == 16  # a quarter of 64 decisions


def corrected(rollout: Rollout, action: float) -> Rollout:
    """`rollout` in which a person acted by `action` in the first world, as its transitions would have it."""
    human = torch.zeros_like(rollout.executed)
    human[:, 0] = rollout.executed[:, 0]
    actions = torch.where(human.unsqueeze(-1), torch.full_like(rollout.actions, action), rollout.actions)
    return replace(rollout, signals={"human": human}, actions=actions)


@pytest.mark.parametrize("config", [HGDAggerConfig(), IWRConfig()])
def test_the_policy_does_as_the_person_did(config: HGDAggerConfig) -> None:
    policy, learner, collector = make(config, demonstrations=False)
    for _ in range(6):
        learner.update(corrected(collector.collect(8), 0.1), 0.0)
    rows = learner.replay.own.intervened()
    observation = learner.replay.own.chunks(rows, 2)["observation"]
    actions = policy.act(observation, deterministic=True).actions
    torch.testing.assert_close(actions, torch.full_like(actions, 0.1), rtol=0.0, atol=0.05)


def test_of_a_decision_in_which_a_person_took_over_their_actions_alone_are_imitated() -> None:
    """The first action is the one that they corrected, and so is what the policy does after they hand back."""
    _, learner, collector = make(HGDAggerConfig())
    rollout = collector.collect(4)
    assert rollout.executed.shape[2] == 2
    human = torch.zeros_like(rollout.executed)
    human[1, 0, 1] = human[2, 1] = True
    learner.replay.add(replace(rollout, signals={"human": human}))
    rows = learner.replay.own.intervened()
    recorded = torch.arange(2)
    chunks = learner.replay.imitated_chunks((rows, recorded), 2)
    assert chunks["valid"].tolist() == [
        [False, True],
        [True, True],
        *learner.replay.demonstrations.chunks(recorded, 2)["valid"].tolist(),
    ]
    unaided = (learner.replay.own.passed(), recorded)
    assert (learner.replay.imitated_chunks(unaided, 2) == learner.replay.chunks(unaided, 2)).all()


def test_resumed_updates_equal_uninterrupted_ones() -> None:
    policy, learner, collector = make(IWRConfig())
    learner.update(helped(collector.collect(4), 0, 3), 0.0)
    rollout = helped(collector.collect(4), 1, 5)
    other_policy, other, _ = make(IWRConfig(), seed=1)
    other.load_state_dict(copy.deepcopy(learner.state_dict()))
    assert learner.update(rollout, 0.5) == other.update(rollout, 0.5)
    for a, b in zip(policy.parameters(), other_policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_copy_that_learns_reads_observations_by_the_statistics_of_the_policy() -> None:
    policy, learner, collector = make(HGDAggerConfig(), running_statistics=True)
    rollout = helped(collector.collect(2), 0, 3)
    policy.renormalise(rollout.observation.apply(lambda each: each + 3.0))  # as the loop does after each update
    learner.update(rollout, 0.0)
    trained = dict(learner.sft.trained.named_buffers())
    assert all(torch.equal(each, trained[name]) for name, each in policy.named_buffers())


def test_the_pools_of_a_rollout_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, learner, collector = make(IWRConfig())
    counted = []
    passed = EpisodeStore.passed
    monkeypatch.setattr(EpisodeStore, "passed", lambda store: counted.append(store) or passed(store))
    for _ in range(2):
        learner.update(helped(collector.collect(2), 0, 3), 0.0)
    assert learner.gradient_steps == 32
    assert len(counted) == 2


def test_somebody_has_to_stand_beside() -> None:
    _, learner, collector = make(HGDAggerConfig())
    with pytest.raises(UserError, match="robot="):
        learner.update(collector.collect(2), 0.0)
    assert learner.gradient_steps == 0
