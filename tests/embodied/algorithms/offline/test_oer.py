"""OER: selection by hand, two tasks in turn that plain fine-tuning forgets, minibatches, resume, refusals."""

import copy
from dataclasses import replace

import pytest
import torch

from embodied.algorithms.critics import CriticConfig
from embodied.algorithms.offline import oer
from embodied.algorithms.offline.dynamics import DynamicsConfig
from embodied.algorithms.offline.iql import Extraction, IQLConfig
from embodied.algorithms.offline.oer import OER, OERConfig, Selection, nearest_rows
from embodied.data.episodes import Episodes
from embodied.errors import UserError
from embodied.evaluation.evaluation import evaluate
from embodied.policy import TrainablePolicy
from policies.flow import FlowConfig
from policies.mlp import MLPConfig
from tests.embodied.recorded_reach import MirroredReach, recorded
from tests.embodied.saving.test_tree import same
from tests.policies.vla.test_pi0 import SEEING

LEARNING = {
    "batch": 64,
    "discount": 0.9,
    "learning_rate": 3e-3,
    "value_learning_rate": 3e-3,
    "critics": CriticConfig(hidden=[32, 32], layer_norm=True),
}
MODEL = DynamicsConfig(models=2, elites=1, hidden=[32, 32], learning_rate=3e-3, batch=64)


def task(number: int) -> Episodes:
    """Episodes of task 0, or of task 1, in which actions have the opposite effect; most of them failed."""
    episodes = recorded(120, mirrored=True)
    first = torch.cat((torch.zeros(1, dtype=torch.long), episodes.ends[:-1]))
    return episodes.selected((episodes.observation["task"][first, 0] == number).nonzero().squeeze(1))


def policy(config: MLPConfig | FlowConfig | None = None) -> TrainablePolicy:
    torch.manual_seed(0)
    made = (config or MLPConfig(hidden=[64])).build(MirroredReach(1).contract)
    made.fit(*task(0).by_weight())
    return made


def learner(of: TrainablePolicy, seed: int = 0, **options) -> OER:
    settings = LEARNING | {"steps": 900, "specialist_share": 0.35, "model_share": 0.1, "dynamics": MODEL} | options
    return OERConfig(**settings).build(of, torch.Generator().manual_seed(seed))


def success(of: TrainablePolicy) -> list[float]:
    """Success in each of both tasks."""
    return evaluate(MirroredReach(44), of, starts_per_task=22).success.float().mean(1).tolist()


@pytest.mark.evidence
def test_two_tasks_in_turn_of_which_fine_tuning_forgets_the_first() -> None:
    tuned, generator = policy(), torch.Generator().manual_seed(0)
    for number in (0, 1):
        IQLConfig(steps=300, **LEARNING).build(tuned, generator).fit(task(number), 300)
    assert success(tuned) == [0.0, 1.0]
    made = policy()
    kept = None
    for number in (0, 1):
        each = learner(made)
        each.remember(kept)
        metrics = each.fit(task(number), 900)
        kept = each.kept(task(number))
    assert metrics["held_out_model_error"] < 0.3
    assert success(each.specialist.policy)[0] == 0.0  # mu_2 learns the second task alone
    assert min(success(made)) > 0.9
    # a tenth of the observations of each task
    assert kept.dataset_index.bincount().tolist() == [round(0.1 * len(task(number))) for number in (0, 1)]
    assert kept.observation["task"][:, 0].tolist() == kept.dataset_index.float().tolist()


def test_the_nearest_observations_by_hand() -> None:
    recorded_ones = torch.tensor([[0.0], [1.0], [2.0], [3.0], [10.0]])
    weight = torch.tensor([1.0, 1.0, 0.0])
    # imagined near 1 and 3; the third is never reached
    imagined = torch.tensor([[1.1], [2.9], [10.0]])
    generator = torch.Generator().manual_seed(0)
    assert set(nearest_rows(imagined, weight, recorded_ones, 2, generator).tolist()) <= {0, 1, 2, 3}
    both = nearest_rows(imagined, weight, recorded_ones, 4, generator)
    assert sorted(both.tolist()) == [0, 1, 2, 3]
    assert sorted(nearest_rows(imagined, weight, recorded_ones, 5, generator).tolist()) == [0, 1, 2, 3, 4]
    one = torch.tensor([1.0, 0.0, 0.0])
    assert nearest_rows(imagined, one, recorded_ones, 3, generator).tolist() == [1, 2, 0]  # at 0.1, 0.9 and 1.1


def test_distances_are_of_a_part_of_the_recorded_observations_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    points, recorded_ones = (torch.randn(count, 2, generator=generator) for count in (9, 25))
    expected = torch.cdist(points, recorded_ones).argmin(1)
    monkeypatch.setattr(oer, "COMPARED", 4)
    cdist, sizes = torch.cdist, []
    monkeypatch.setattr(torch, "cdist", lambda one, other: sizes.append(len(other)) or cdist(one, other))
    assert torch.equal(oer.nearest(points, recorded_ones), expected)
    assert max(sizes) == 4


def test_the_distance_is_in_deviations_of_each_element(monkeypatch: pytest.MonkeyPatch) -> None:
    each = learner(policy())
    episodes = recorded(120, mirrored=True)  # of both tasks
    each.fit(episodes, 0)
    each.dynamics.ensemble.input_std[:2] = torch.tensor([0.01, 100.0])
    position, number = (episodes.observation[name][37] for name in ("position", "task"))
    # of the other task, which is near by its deviation and far by its value
    imagined = torch.cat((position, 1.0 - number)).unsqueeze(0)
    monkeypatch.setattr(each, "_imagined", lambda *_: (imagined, torch.ones(1)))
    assert each._nearest(each.transitions, each.dynamics, 1, torch.Generator()).tolist() == [37]


def test_rollouts_of_mu_in_the_model_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    each = learner(policy(), starts=3)
    episodes = task(0)
    each.fit(episodes, 0)
    monkeypatch.setattr(each.specialist.policy, "act", lambda observation, deterministic: type("D", (), {"actions": 0}))

    def step(observation, actions, generator):
        after = observation.copy().update({"position": observation["position"] + 1.0})
        return after, torch.zeros(3), torch.full((3,), 0.25)

    monkeypatch.setattr(each.dynamics, "step", step)
    imagined, weight = each._imagined(each.transitions, each.dynamics, torch.Generator())
    # 60 episodes of at most 7 steps: four decisions from the first observations of episodes 0, 20 and 40
    begin = torch.cat((torch.zeros(1, dtype=torch.long), episodes.ends[:-1]))[[0, 20, 40]]
    position = episodes.observation["position"][begin, 0]
    torch.testing.assert_close(imagined[:, 0].view(4, 3), position + torch.arange(4.0).unsqueeze(1))
    torch.testing.assert_close(weight.view(4, 3), (0.75 ** torch.arange(4.0)).unsqueeze(1).expand(4, 3))


def test_rollouts_end_where_the_model_grows_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    each = learner(policy(), starts=3, kept_share=0.2)
    episodes = task(0)
    each.fit(episodes, 0)
    monkeypatch.setattr(each.specialist.policy, "act", lambda observation, deterministic: type("D", (), {"actions": 0}))
    sizes = iter([1e6, 1e30, torch.inf, torch.nan])

    def step(observation, actions, generator):
        after = observation.copy().update({"position": observation["position"] * next(sizes)})
        return after, torch.zeros(3), torch.full((3,), torch.nan)

    monkeypatch.setattr(each.dynamics, "step", step)
    _, weight = each._imagined(each.transitions, each.dynamics, torch.Generator())
    assert weight.view(4, 3).tolist() == [[1.0] * 3, *[[0.0] * 3] * 3]


def test_each_task_has_the_same_share_of_a_minibatch_and_actions_of_mu() -> None:
    made = policy(FlowConfig(width=8, hidden=8, turn_rad=0.0, denoising_steps=2))
    each = learner(made, selection=Selection.RANDOM, kept_share=0.2)
    episodes = task(0)
    each.fit(episodes, 0)
    kept = each.kept(episodes)
    assert len(kept) == round(0.2 * len(episodes))
    actions = each.specialist.policy.act(kept.observation, deterministic=True).actions
    torch.testing.assert_close(kept.actions.view(-1, 2, 1), actions)
    again = each.kept(episodes)  # the same, as after an interruption
    assert torch.equal(kept.observation["position"], again.observation["position"])
    three = replace(kept, dataset_index=(torch.arange(len(kept)) * 3 // len(kept)))
    each.remember(three)
    batch = each._batch(each.transitions)
    assert len(batch) == 64
    assert batch["valid"].all()
    present = batch[:16]
    torch.testing.assert_close(
        present["actions"], each.specialist.policy.act(present["observation"], deterministic=True).actions
    )
    before = torch.cat([each._batch(each.transitions)["observation", "position"][16:, 0] for _ in range(40)])
    task_of = {float(x): int(n) for x, n in zip(three.observation["position"][:, 0], three.dataset_index, strict=True)}
    share = torch.tensor([task_of[float(x)] for x in before]).bincount() / len(before)
    assert (share - 1 / 3).abs().max() < 0.15


@pytest.mark.parametrize("step", [2, 6, 9])
def test_a_resumed_learner_goes_on_alike(step: int) -> None:
    """In the learning of mu_n, of the model, and of pi."""
    kept = learner(policy(), selection=Selection.RANDOM)
    kept.fit(task(0), 0)
    earlier = kept.kept(task(0))
    options = {"steps": 12, "specialist_share": 0.4, "model_share": 0.3}
    made, other = policy(), policy()
    each, again = learner(made, **options), learner(other, 1, **options)
    each.remember(earlier)
    each.fit(task(1), step)
    other.load_state_dict(copy.deepcopy(made.state_dict()))
    again.load_state_dict(copy.deepcopy(each.state_dict()))
    assert same(again.state_dict(), each.state_dict())
    for part in (each, again):
        torch.manual_seed(0)
        part.fit(task(1), 3)
    assert same(dict(other.state_dict()), dict(made.state_dict()))
    assert same(again.state_dict(), each.state_dict())
    first, second = (part.kept(task(1)) for part in (each, again))
    assert torch.equal(first.actions, second.actions)
    assert torch.equal(first.dataset_index, second.dataset_index)


def test_what_oer_cannot_learn_is_refused() -> None:
    with pytest.raises(UserError, match="specialist_share"):
        OERConfig(specialist_share=0.8)
    with pytest.raises(UserError, match="deterministic actions"):
        OERConfig(extraction=Extraction.DDPG_BC).build(
            policy(FlowConfig(width=8, hidden=8, turn_rad=0.0)), torch.Generator()
        )
    seeing = FlowConfig(width=8, hidden=8, turn_rad=0.0).build(SEEING)
    with pytest.raises(UserError, match=r"offline\.selection=random, .*front"):
        OERConfig().build(seeing, torch.Generator())
    each = learner(policy())
    with pytest.raises(UserError, match="learns in one process"):
        each.fit(task(0), 1, type("Two", (), {"size": 2, "rank": 0})())
    unknown = replace(task(0), reward=torch.full_like(task(0).reward, torch.nan))
    with pytest.raises(UserError, match="rewards are unknown"):
        each.fit(unknown, 1)
