"""Models of the dynamics: predictions of a known motion, losses by hand, resumption."""

import copy

import pytest
import torch
from tensordict import TensorDict

from embodied.algorithms.offline.dynamics import Dynamics, DynamicsConfig
from embodied.contract import Contract, TensorSpec
from embodied.data.transitions import Transitions, held_out_episodes
from embodied.errors import UserError
from tests.embodied.reach import Reach
from tests.embodied.recorded_reach import recorded
from tests.embodied.saving.test_tree import same

SMALL = DynamicsConfig(models=3, elites=2, hidden=[32, 32], learning_rate=3e-3, batch=64)


def make(seed: int = 0) -> tuple[Dynamics, Transitions, torch.Generator]:
    torch.manual_seed(seed)
    return Dynamics(Reach(1).contract, SMALL), Transitions(recorded(), 2, 0.9), torch.Generator().manual_seed(seed)


def test_predicts_motion_reward_and_termination() -> None:
    model, transitions, generator = make()
    held_out = held_out_episodes(60, 0.1)
    assert int(held_out.sum()) == 6
    model.fit(transitions.of_episodes(~held_out), 600, generator)
    assert model.choose_elites(transitions.of_episodes(held_out)) < 0.2
    assert len(model.elites) == 2
    position, task = torch.tensor([[0.5], [-0.4], [0.25]]), torch.tensor([[1.0], [0], [0]])
    observation = TensorDict({"position": position, "task": task}, [3])
    actions = torch.tensor([[0.1, 0.05], [-0.2, -0.1], [-0.2, -0.05]]).unsqueeze(-1)
    after, reward, terminated = model.step(observation, actions)
    # the third reaches |x| < 0.1, as 15 of the 60 episodes do
    torch.testing.assert_close(after["position"][:2], torch.tensor([[0.65], [-0.7]]), atol=0.05, rtol=0)
    assert after["task"].tolist() == observation["task"].tolist()
    assert terminated[:2].max() < 0.1 < 0.3 < terminated[2]
    assert reward[:2].max() * transitions.scale < 0.1 < 0.3 < reward[2] * transitions.scale
    generators = [torch.Generator().manual_seed(seed) for seed in (0, 0, 1)]
    sampled = [model.step(observation, actions, each)[0]["position"] for each in generators]
    assert torch.equal(sampled[0], sampled[1])
    assert not torch.equal(sampled[0], sampled[2])
    far = observation.copy().update({"position": torch.full((3, 1), 9.0)})
    assert (model.disagreement(far, actions) > 3 * model.disagreement(observation, actions)).all()


def test_held_out_episodes_are_looked_up_once_for_all_gradient_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model, transitions, generator = make()
    parts, of_episodes = [], Transitions.of_episodes

    def selected(view: Transitions, chosen: torch.Tensor) -> Transitions:
        parts.append((view, chosen))
        return of_episodes(view, chosen)

    monkeypatch.setattr(Transitions, "of_episodes", selected)
    for step in range(3):
        metrics = model.learn(transitions, generator, is_last=step == 2)
    assert [int(chosen.sum()) for _, chosen in parts] == [54, 6]
    assert metrics["held_out_model_error"] > 0.0
    others = Transitions(recorded(), 2, 0.9)
    model.learn(others, generator, is_last=False)
    assert [view for view, _ in parts[2:]] == [others, others]


def test_the_loss_by_hand() -> None:
    model, transitions, _ = make()
    rows = transitions.spaced(1000)
    inputs, targets, weight = model._examples(transitions, rows)
    # changes are unknown after terminations, and everything where a time limit cut a chunk of two actions short
    batch = transitions.take(rows, 2)
    terminated, whole = transitions.terminated[rows], batch["valid"].all(1)
    assert 0 < int((terminated & whole).sum()) < int(whole.sum()) < len(rows)
    assert weight[:, 0].tolist() == (whole & ~terminated).float().tolist()
    assert weight[:, 3].tolist() == (whole | terminated).float().tolist()
    moved = batch["actions"].sum(1)[:, 0][whole & ~terminated]
    torch.testing.assert_close(targets[whole & ~terminated, 0], moved, atol=1e-6, rtol=0)
    model.ensemble.fit_statistics(inputs, targets, weight)
    changes = targets[weight[:, 0] > 0, 0]
    mean, std = changes.mean(), changes.std(correction=0)
    torch.testing.assert_close(model.ensemble.target_std[0], std)
    predicted, log_std = model.ensemble(inputs)
    loss = 0.0
    for target in range(4):
        has_target = weight[:, target] > 0
        own = targets[has_target, target]
        spread = own.std(correction=0) if target != 1 else torch.tensor(1.0)  # the task never changes
        error = predicted[:, has_target, target] - (own - own.mean()) / spread
        variance = (2 * log_std[:, has_target, target]).exp()
        loss = loss + (variance.detach() * (log_std[:, has_target, target] + error.square() / 2 / variance)).sum()
    torch.testing.assert_close(model.ensemble.loss(inputs, targets, weight), loss / weight.sum())
    torch.testing.assert_close(model.ensemble.predicted(inputs)[0][..., 0], mean + std * predicted[..., 0])


def test_a_resumed_model_has_the_weights_of_an_uninterrupted_one() -> None:
    model, transitions, generator = make()
    model.fit(transitions, 2, generator)
    model.choose_elites(transitions)
    other, _, again = make(seed=1)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    again.set_state(generator.get_state())
    assert model.fit(transitions, 2, generator) == other.fit(transitions, 2, again)
    assert same(other.state_dict(), model.state_dict())


def test_observations_that_a_model_cannot_predict_are_refused() -> None:
    specs = {"image": TensorSpec((8, 8, 3), "uint8", names=("r", "g", "b"), camera="top"), "x": TensorSpec((1,))}
    with pytest.raises(UserError, match="fixed size, not image; use a learner without a model"):
        Dynamics(Contract(specs, TensorSpec((1,)), 0.1), SMALL)
    with pytest.raises(UserError, match="at least 2 episodes"):
        held_out_episodes(1, 0.1)
