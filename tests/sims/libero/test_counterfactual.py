"""Counterfactual episodes: which object is asked for, and that goal, reward and demonstration are that object's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from embodied.data.episodes import FOLDER, read
from embodied.environments.engine import STARTS_PER_SEED
from embodied.errors import UserError
from embodied.text import decode
from sims.libero.assets import find_assets
from sims.libero.counterfactual import Aims, with_other_objects
from sims.libero.environment import LiberoEnvironment
from sims.libero.language import Wordings
from sims.libero.scene.placement import Placement
from sims.libero.scene.scene import build_scene
from sims.libero.suite import load_tasks
from sims.libero.task import LiberoTask

ASSETS = find_assets("stand-in")
(SOUP,) = load_tasks("libero_object", [0])
OTHERS = ["salad_dressing_1", "cream_cheese_1", "milk_1", "tomato_sauce_1", "butter_1"]


def make(**options: object) -> LiberoEnvironment:
    options = {"distribution": "areas", "counterfactual_share": 0.5, "executed": 1, "horizon": 1} | options
    return LiberoEnvironment([SOUP], 4, assets=ASSETS, threads=1, **options)  # type: ignore[arg-type]


def put_into_basket(env: LiberoEnvironment, row: int, name: str) -> None:
    """Put the object `name` of environment `row` into the basket, where nothing else is, at rest."""
    scene, simulation = env.scenes[0], env.simulation
    qpos = simulation.data[row].qpos.copy()
    address = scene.object_qposadr[scene.objects.index(name)]
    site = simulation.models[row].site("basket_1_contain_region").id
    qpos[address : address + 3] = simulation.data[row].site_xpos[site]
    simulation.write(row, qpos, np.zeros(scene.model.nv))


def instructions(observation: object) -> list[str]:
    return [decode(row) for row in observation["instruction"].numpy()]  # type: ignore[index]


def test_every_other_object_of_the_scene_can_be_asked_for() -> None:
    tasks = with_other_objects(SOUP)
    assert [task.problem.goal for task in tasks] == [[("in", name, "basket_1_contain_region")] for name in OTHERS]
    assert tasks[1].language == "pick up the cream cheese and place it in the basket"
    assert tasks[1].problem.language == "pick the cream cheese and place it in the basket"
    assert tasks[1].problem.obj_of_interest == ["cream_cheese_1", "basket_1"]
    assert (tasks[1].name, tasks[1].problem.objects) == (SOUP.name, SOUP.problem.objects)


def test_objects_that_have_no_name_of_their_own_are_not_asked_for() -> None:
    """libero_spatial's two bowls are told apart by their places, and drawers are no objects."""
    assert all(with_other_objects(task) == [] for task in load_tasks("libero_spatial"))
    assert with_other_objects(load_tasks("libero_goal", [0])[0]) == []


def test_of_two_objects_of_a_kind_none_is_asked_for_and_others_have_the_names_of_libero() -> None:
    scene = "LIVING_ROOM_SCENE4"
    names = [f"{scene}_pick_up_the_{name}_and_put_it_in_the_tray" for name in ("chocolate_pudding", "salad_dressing")]
    pudding, dressing = (with_other_objects(task) for task in load_tasks("libero_90", names))
    assert [task.language for task in pudding] == ["pick up the salad dressing and put it in the tray"]
    assert [task.problem.goal for task in pudding] == [[("in", "new_salad_dressing_1", "wooden_tray_1_contain_region")]]
    assert [task.language for task in dressing] == ["pick up the chocolate pudding and put it in the tray"]


def test_a_quarter_of_the_starts_ask_for_the_others_in_turn() -> None:
    aims = Aims(build_scene(SOUP, ASSETS), "name", 0.25)
    asked = [aims(start).task.problem.goal[0][1] for start in range(28)]
    own = ["alphabet_soup_1"] * 3
    in_order = [each for name in [*OTHERS, *OTHERS[:2]] for each in (*own, name)]
    # in blocks of seven, turned by one more in each
    turned = [in_order[7 * block + (place + block) % 7] for block in range(4) for place in range(7)]
    assert asked == turned
    later = STARTS_PER_SEED * 7
    assert [aims(later + start).task.problem.goal[0][1] for start in range(28)] == asked
    never = Aims(build_scene(SOUP, ASSETS), "name")
    assert all(never(start) is never.own for start in range(24))


@pytest.mark.parametrize("share", [0.1, 0.2, 0.25, 0.4, 0.5])
def test_other_objects_are_asked_for_as_often_in_areas_as_elsewhere(share: float) -> None:
    scene = build_scene(SOUP, ASSETS)
    aims, count = Aims(scene, "name", share), 1400
    placement = Placement(scene, "wide", "train", 0.2)
    others = [start for start in range(count) if aims(start) is not aims.own]
    assert len(others) == pytest.approx(share * count, abs=1)
    in_areas = sum(placement.in_areas(start) for start in others)
    assert in_areas == pytest.approx(0.2 * share * count, rel=0.25)


@pytest.mark.parametrize("compiled", [True, False])
def test_the_reward_is_for_the_object_that_is_asked_for(compiled: bool) -> None:
    """At a share of a half start 3 asks for the cream cheese, start 8 for the butter."""
    env = make()
    if not compiled:
        env.simulation.close()
    observation = env.reset(starts=torch.tensor([0, 3, 3, 8]))
    expected = ["alphabet soup", "cream cheese", "cream cheese", "butter"]
    wordings = [env.aims[0](start).wordings(start) for start in (0, 3, 3, 8)]
    assert instructions(observation) == wordings
    assert all(noun in text for noun, text in zip(expected, wordings, strict=True))
    assert instructions(observation)[0] == Wordings(SOUP, "name")(0)
    for row, name in enumerate(("alphabet_soup_1", "alphabet_soup_1", "cream_cheese_1", "butter_1")):
        put_into_basket(env, row, name)
    transition = env.step(torch.zeros(4, 1, 7))
    assert transition.success.tolist() == [True, False, True, True]
    assert transition.reward.flatten().tolist() == [1.0, 0.0, 1.0, 1.0]
    assert env.simulation.achieved(1) == [False]
    env.close()


def test_an_environment_asks_anew_in_every_episode_and_a_saved_one_for_the_same() -> None:
    env, other = make(), make(seed=9)
    env.reset(starts=torch.tensor([3, 3, 3, 3]))
    observation = env.reset(mask=torch.tensor([True, False, False, True]), starts=torch.tensor([0, 0, 0, 8]))
    nouns = ["alphabet soup", "cream cheese", "cream cheese", "butter"]
    assert all(noun in text for noun, text in zip(nouns, instructions(observation), strict=True))
    restored = other.load_state_dict(env.state_dict())
    assert instructions(restored) == instructions(observation)
    for each in (env, other):
        for row in range(4):
            put_into_basket(each, row, "cream_cheese_1")
        assert each.step(torch.zeros(4, 1, 7)).success.tolist() == [False, True, True, False]


def test_initial_states_do_not_depend_on_the_share_and_evaluations_have_none() -> None:
    starts = torch.tensor([0, 1, 2, 3])
    plain, asked = make(counterfactual_share=0.0).reset(starts=starts), make().reset(starts=starts)
    assert torch.equal(plain["object_position"], asked["object_position"])
    assert instructions(make(split="eval").reset(starts=starts)) == [SOUP.language] * 4


def test_the_cause_of_a_failure_is_that_of_the_object_that_is_asked_for() -> None:
    env = make(step_limit=1)
    env.reset(starts=torch.tensor([1, 1, 0, 0]))
    dressing = env.scenes[0].objects.index("salad_dressing_1")
    env._handling.grasped[[0, 2], dressing] = True  # it was held, and lies elsewhere again
    env._handling.in_hand[:] = False
    env._handling.judge(0, [False])
    env._handling.judge(2, [False])
    failures = env._handling.failures()
    assert failures["dropped"].tolist() == [True, False, False, False]
    assert failures["wrong object"].tolist() == [False, False, True, False]


def test_demonstrations_show_what_they_ask_for(tmp_path) -> None:
    task = LiberoTask(tasks=["0"], starts="areas", episodes=4, counterfactual_share=0.5, assets="stand-in", noise=0.0)
    episodes = task.demonstrations(tmp_path, 0).expanded()
    starts = read(tmp_path / FOLDER)[2]["start"]
    aims = Aims(build_scene(SOUP, ASSETS), "training", 0.5)
    begin, texts = 0, episodes.observation["instruction"]
    for start, end in zip(starts, episodes.ends.tolist(), strict=True):
        noun = aims(start).task.problem.goal[0][1].removesuffix("_1").replace("_", " ")
        said = {decode(row) for row in texts[begin:end].numpy()}
        assert all(noun in text for text in said)
        assert len(said) > 10
        names = [decode(row) for row in episodes.observation["object_names"][begin].numpy()]
        moved = (
            episodes.observation["object_position"][end - 1] - episodes.observation["object_position"][begin]
        ).norm(dim=-1)
        assert names[int(moved.argmax())] == f"{noun.replace(' ', '_')}_1"
        begin = end
    assert {start % 2 for start in starts} == {0, 1}


def test_what_cannot_be_asked_for_is_refused_in_a_line() -> None:
    with pytest.raises(UserError, match=r"needs task[.]sim=mujoco, got mjwarp"):
        make(sim=next(sim for sim in type(LiberoTask().sim) if sim.value == "mjwarp"))
    goal = LiberoTask(suite="libero_object", tasks=["0"], counterfactual_share=0.25, assets="stand-in")
    assert goal.environment(1, "wide", "train").aims[0].share == 0.25
    with pytest.raises(UserError, match="counterfactual_share"):
        LiberoTask(counterfactual_share=1.5)
