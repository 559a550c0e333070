"""Wordings of instructions: both of LIBERO's, and paraphrases that do not occur in training."""

import os
import re

import pytest
import torch

from embodied.text import decode
from sims.libero.assets import find_assets
from sims.libero.environment import LiberoEnvironment
from sims.libero.language import INSTRUCTION_BYTES, LIFT, PUT, SYNONYMS, VERBS, Wordings, paraphrases
from sims.libero.suite import SUITES, load_tasks
from sims.libero.task import LiberoTask

MILK = load_tasks("libero_object", ["pick_up_the_milk_and_place_it_in_the_basket"])[0]
ALL = [task for suite in SUITES for task in load_tasks(suite)]
pytestmark = pytest.mark.assets
ASSETS = find_assets(os.environ.get("LIBERO_ASSETS") or "stand-in")


def texts(instructions: torch.Tensor) -> list[str]:
    return [decode(row) for row in instructions.numpy()]


def test_wordings_are_those_of_libero() -> None:
    assert Wordings(MILK, "name")(7) == "pick up the milk and place it in the basket"
    assert Wordings(MILK, "bddl")(7) == "pick the milk and place it in the basket"
    with pytest.raises(
        ValueError, match="unknown wording 'nope'; expected one of name, bddl, held_out, held_out_words, training"
    ):
        Wordings(MILK, "nope")


def test_paraphrases_by_hand() -> None:
    training, held_out = paraphrases(MILK, "training"), paraphrases(MILK, "held_out")
    assert {"please take the carton of milk then put it into the basket", "in basket set milk"} <= {*training}
    assert {"grab the milk and drop it inside the basket", "in that basket goes that milk pack"} <= {*held_out}
    sauce = load_tasks("libero_90", ["KITCHEN_SCENE3_turn_on_the_stove_and_put_the_frying_pan_on_it"])[0]
    assert "switch on the stove and set the frying pan on it" in paraphrases(sauce, "training")
    assert "kindly activate that stove and lay that frying pan on it" in paraphrases(sauce, "held_out")
    assert "quickly deliver this dairy drink within this hamper" in paraphrases(MILK, "held_out_words")
    assert "ignite the cooker and bring the skillet on it" in paraphrases(sauce, "held_out_words")


@pytest.mark.parametrize("task", ALL, ids=[f"{task.suite} {task.index}" for task in ALL])
def test_every_task_has_paraphrases_that_training_never_says(task) -> None:
    training, held_out = paraphrases(task, "training"), paraphrases(task, "held_out")
    assert len(training) >= 8
    assert len(held_out) >= 4
    assert not {*held_out} & {*training, task.language, task.problem.language}
    assert max(len(text.encode()) for text in (*training, *held_out)) <= INSTRUCTION_BYTES
    # all of them name object and target
    said = re.findall("milk|soup|sauce|bowl|plate|stove|drawer|mug|book|microwave|pot", task.language)
    assert all(word in text for word in said for text in (*training, *held_out))


WORD = re.compile(r"[a-z]+")


def test_words_that_are_held_out_occur_in_no_text_of_training() -> None:
    """Names, files' texts and training's paraphrases of all 130 tasks, as a policy of any of them reads them."""
    training = {task.language for task in ALL} | {task.problem.language.lower() for task in ALL}
    training.update(text for task in ALL for text in paraphrases(task, "training"))
    known = {word for text in training for word in WORD.findall(text)}
    assert {"pick", "up", "milk", "basket", "into", "please"} <= known
    nouns = {word for noun in SYNONYMS.values() for word in noun.split()}
    verbs = {
        word for verb in (*LIFT[2], *PUT[2], *(column[2][0] for column in VERBS.values())) for word in verb.split()
    }
    assert not known & (nouns | verbs | {"belongs", "want", "quickly", "this", "within", "atop"})
    # of libero_object, nothing but words without a meaning of their own is left
    for task in load_tasks("libero_object"):
        words = {word for text in paraphrases(task, "held_out_words") for word in WORD.findall(text)}
        assert words & known <= {"the", "it", "and"}
    # elsewhere no verb of training is, and no noun that has another one
    for task in ALL:
        texts = paraphrases(task, "held_out_words")
        assert len(texts) >= 4
        assert max(len(text.encode()) for text in texts) <= INSTRUCTION_BYTES
        words = {word for text in texts for word in WORD.findall(text)}
        assert not words & {
            "pick",
            "put",
            "place",
            "open",
            "close",
            "turn",
            "push",
            "milk",
            "bowl",
            "plate",
            "stove",
            "mug",
        }


def test_training_says_everything_and_a_number_always_says_the_same() -> None:
    training, again = Wordings(MILK, "training"), Wordings(MILK, "training")
    texts = [training(number) for number in range(2000)]
    assert texts == [again(number) for number in range(2000)]
    for own in ("name", "bddl"):
        assert 0.2 < texts.count(Wordings(MILK, own)(0)) / 2000 < 0.32
    assert len({*texts}) > 400
    assert not {*texts} & {*paraphrases(MILK, "held_out")}


def test_an_environment_says_what_the_initial_state_draws_and_remembers_it() -> None:
    def environment() -> LiberoEnvironment:
        return LiberoEnvironment([MILK], 3, wording="held_out", assets=ASSETS, threads=1)

    env, said = environment(), Wordings(MILK, "held_out")
    observation = env.reset(starts=torch.tensor([5, 6, 7]))
    assert texts(observation["instruction"]) == [said(start) for start in (5, 6, 7)]
    observation = env.reset(mask=torch.tensor([False, True, False]), starts=torch.tensor([0, 9, 0]))
    assert texts(observation["instruction"]) == [said(start) for start in (5, 9, 7)]
    again = environment().load_state_dict(env.state_dict())
    assert torch.equal(again["instruction"], observation["instruction"])


def test_training_varies_the_words_and_evaluation_says_the_tasks_name_unless_another_is_chosen() -> None:
    task = LiberoTask(tasks=[MILK.name], assets=ASSETS.kind if ASSETS.root is None else str(ASSETS.root))

    def said(distribution: str, split: str) -> list[str]:
        return texts(task.environment(2, distribution, split).reset(starts=torch.tensor([3, 4]))["instruction"])

    assert said("wide", "train") == [Wordings(MILK, "training")(start) for start in (3, 4)]
    assert said("official", "eval") == [MILK.language] * 2
    assert said("official:bddl", "eval") == [MILK.problem.language] * 2
    for held_out in ("held_out", "held_out_words"):
        assert said(f"official:{held_out}", "eval") == [Wordings(MILK, held_out)(start) for start in (3, 4)]
    with pytest.raises(ValueError, match="unknown wording 'nope'"):
        said("official:nope", "eval")


def test_a_demonstration_has_all_training_wordings(tmp_path) -> None:
    task = LiberoTask(tasks=[MILK.name], assets=ASSETS.kind if ASSETS.root is None else str(ASSETS.root), noise=0.0)
    instructions = task.demonstrations(tmp_path, 0).expanded().observation["instruction"]
    said = {*texts(instructions)}
    assert {MILK.language, MILK.problem.language} < said
    assert len(said) > 20
    assert torch.equal(instructions, task.demonstrations(tmp_path, 0).expanded().observation["instruction"])
