import pytest
import torch

from embodied.contract import Contract
from embodied.data.episodes import Episodes, EpisodeWriter, columns, read
from embodied.text import decode
from sims.libero.assets import STAND_IN
from sims.libero.environment import LiberoEnvironment
from sims.libero.expert.demonstrations import collect
from sims.libero.language import Wordings
from sims.libero.suite import load_tasks

TASKS = load_tasks("libero_object", [1, 4])


def make(folder, **options) -> tuple[Episodes, Contract, dict]:
    contract = LiberoEnvironment(TASKS, 2, assets=STAND_IN, threads=1).contract
    given = {"episodes": 2, "assets": STAND_IN, "seed": 3, "threads": 1, "progress": False} | options
    with EpisodeWriter(folder / "made", contract) as writer:
        collect(writer, TASKS, **given)
    return read(folder / "made")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("demonstrations"))


def test_every_task_has_its_episodes_in_order(made):
    episodes, _, origin = made
    assert episodes.task_index.tolist() == [0, 0, 1, 1]
    starts = torch.tensor(origin["start"]).view(2, 2)
    assert (starts[:, 1] > starts[:, 0]).all()
    assert len(episodes) == episodes.steps == episodes.ends[-1]
    assert origin["failed"] == [0, 0]
    assert episodes.actions.abs().max() <= 1


def test_replaying_the_actions_gives_what_was_seen_earned_and_reached(made):
    episodes, _, origin = made
    assert episodes.success.all()
    assert episodes.terminated.all()
    begins, recorded = [0, *episodes.ends[:-1].tolist()], episodes.expanded().observation
    for index in (0, 3):
        task = TASKS[episodes.task_index[index]]
        env = LiberoEnvironment([task], 1, assets=STAND_IN, horizon=1, executed=1, threads=1)
        observation = env.reset(starts=torch.tensor(origin["start"][index : index + 1]))
        steps = range(begins[index], int(episodes.ends[index]))
        for step in steps:
            assert (observation[0].exclude("instruction") == recorded[step].exclude("instruction")).all()
            transition = env.step(episodes.actions[step].view(1, 1, 7))
            observation = transition.observation
            assert bool(transition.success) == (step == steps[-1])
            assert float(transition.reward) == float(episodes.reward[step])
        final = episodes.final_observation[index].exclude("instruction")
        assert (observation[0].exclude("instruction") == final).all()


def test_in_one_episode_a_task_is_said_in_all_the_ways_of_training(made):
    episodes, *_ = made
    begin = int(episodes.ends[2])  # the last one's
    said = [decode(text.numpy()) for text in episodes.expanded().observation["instruction"][begin:]]
    wording = Wordings(TASKS[1], "training")
    assert said == [wording(number) for number in range(begin, episodes.steps)]
    assert len(set(said)) > 10


def test_they_depend_on_the_seed_alone(made, tmp_path):
    for name in ("threads", "seed"):
        (tmp_path / name).mkdir()
    again, _, origin = make(tmp_path / "threads", threads=2)
    pairs = zip(columns(again).items(), columns(made[0]).items(), strict=True)
    assert all(one[0] == other[0] and torch.equal(one[1], other[1]) for one, other in pairs)
    assert origin == made[2]
    assert make(tmp_path / "seed", episodes=1, seed=4)[2]["start"] != made[2]["start"][::2]


def test_a_task_that_the_expert_cannot_do_stops_with_its_name(tmp_path):
    with pytest.raises(ValueError, match="the scripted expert failed in 11 of 11 episodes of pick_up_the_cream_cheese"):
        make(tmp_path, step_limit=5)
    with pytest.raises(ValueError, match="at least one episode"):
        make(tmp_path, episodes=0)
    assert not list(tmp_path.iterdir())


def test_pictures_are_taken_every_stride_steps_from_another_step_on_in_each_episode(tmp_path):
    episodes, _, origin = make(tmp_path, image_size=16, images=("agentview",), stride=4)
    begins = torch.cat((torch.zeros(1, dtype=torch.int64), episodes.ends[:-1]))
    for index, (begin, start) in enumerate(zip(begins.tolist(), origin["start"], strict=True)):
        rows = episodes.episode == index
        assert (episodes.first[rows] - begin).tolist() == list(range(start % 4, episodes.ends[index] - begin, 4))
    index, recorded = 2, episodes.expanded().observation
    env = LiberoEnvironment(
        [TASKS[1]], 1, assets=STAND_IN, horizon=1, executed=1, threads=1, image_size=16, images=("agentview",)
    )
    observation = env.reset(starts=torch.tensor(origin["start"][index : index + 1]))
    for step in range(int(begins[index]), int(episodes.ends[index])):
        for row in (episodes.first == step).nonzero().flatten():
            assert (observation[0].exclude("instruction") == recorded[row].exclude("instruction")).all()
        observation = env.step(episodes.actions[step].view(1, 1, 7)).observation
    final = episodes.final_observation[index].exclude("instruction")
    assert (observation[0].exclude("instruction") == final).all()
