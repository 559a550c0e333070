"""pi0 whose prompt says whether actions have a large advantage: tokens, guidance and RECAP."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Words
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from embodied.algorithms.imitation.sft import SFTConfig
from embodied.algorithms.offline.recap import RECAP, RECAPConfig
from embodied.data.episodes import Episodes
from embodied.errors import UserError
from embodied.networks.words import hash_words
from embodied.policy import CONDITION, Condition
from policies.vla.checkpoints.publishing import publish
from policies.vla.critic import Reads
from policies.vla.inputs import Tokenizer
from policies.vla.pi0 import Pi0Policy
from tests.policies.vla.test_pi0 import policy, seen
from tests.policies.vla.test_pi05 import policy as policy_of_pi05

MIXED = torch.tensor([Condition.POSITIVE, Condition.NEGATIVE, Condition.NONE, Condition.POSITIVE])


def test_the_label_follows_the_words_of_the_instruction() -> None:
    made, observation = policy(advantage_guidance=1.5), seen(4)  # "pick the milk", "open", ...
    tokens, real = made.inputs.tokens(observation, MIXED)
    pick, opens = hash_words("pick the milk", 3), hash_words("open", 1)
    positive, negative = hash_words("advantage positive", 2), hash_words("advantage negative", 2)
    assert tokens.tolist() == [
        [*pick, *positive],
        [*opens, *negative, 0, 0],
        [*pick, 0, 0],
        [*opens, *positive, 0, 0],
    ]
    assert torch.equal(real, (tokens != 0).long())


def test_the_label_is_a_line_of_its_own_with_a_tokenizer() -> None:
    made, observation = policy(advantage_guidance=1.5), seen(2)
    words = ["<pad>", "<bos>", "<unk>", "pick", "the", "milk", "open", "Advantage", ":", "positive", "negative"]
    tokenizer = Words(models.WordLevel({word: number for number, word in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    native = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", pad_token="<pad>")
    made.inputs.tokenizer = Tokenizer(native, len(words))
    tokens, real = made.inputs.tokens(observation, MIXED[:2])
    assert tokens.shape == real.shape == (2, 48 + 3)
    assert tokens[:, :8].tolist() == [[1, 3, 4, 5, 7, 8, 9, 0], [1, 6, 7, 8, 10, 0, 0, 0]]
    assert real.sum(1).tolist() == [7, 5]


def test_the_prompt_of_pi05_names_the_advantage_before_the_action() -> None:
    made, observation = policy_of_pi05(advantage_guidance=1.5), seen(3)
    plain, labelled = made.inputs.prompts(observation), made.inputs.prompts(observation, MIXED[:3])
    task, action = plain[0].split("Action: ")
    assert labelled[0] == f"{task}Advantage: positive;\nAction: {action}"
    assert labelled[1] == plain[1].replace("Action: ", "Advantage: negative;\nAction: ")
    assert labelled[2] == plain[2]
    tokens, real = made.inputs.tokens(observation, MIXED[:3])
    assert bytes((tokens[1][real[1].bool()][1:] - 2).tolist()).decode() == labelled[1]
    made.inputs.states_in_prompt = False
    assert made.inputs.prompts(observation, MIXED[:3])[0] == "pick the milk\nAdvantage: positive\n"


@pytest.mark.parametrize("make", [policy, policy_of_pi05])
def test_chunks_are_guided_once_the_label_was_learned(make) -> None:
    observation = seen(4)
    plain, guided = make(critic=Reads.HIDDEN), make(critic=Reads.HIDDEN, advantage_guidance=2.5)
    guided.load_state_dict(plain.state_dict())  # weights of the same policy without a condition
    before = plain.act(observation, deterministic=True)
    assert torch.equal(before.actions, guided.act(observation, deterministic=True).actions)
    guided.start_conditioning()
    state, prefix = guided._inputs_of(observation)
    x, index = torch.randn(4, 4, 32), torch.tensor([0, 1, 2, 3])
    times = guided.grid.times(index)
    velocity = {
        each: guided._velocity(state, guided._prefix(observation, torch.full((4,), each)), x, times)[0]
        for each in (Condition.NONE, Condition.POSITIVE)
    }
    none, positive = velocity[Condition.NONE], velocity[Condition.POSITIVE]
    assert (none - positive).abs().max() > 1e-4
    expected = none + 2.5 * (positive - none)
    torch.testing.assert_close(guided._field(state, prefix)(x, index)[0], expected, atol=1e-4, rtol=1e-4)
    guided.guidance = 1.0
    torch.testing.assert_close(guided._field(state, prefix)(x, index)[0], positive, atol=1e-4, rtol=1e-4)
    guided.guidance = 2.5
    after = guided.act(observation, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(guided.evaluate(observation, after.sample).log_prob, after.log_prob)
    # values do not depend on the label
    torch.testing.assert_close(after.value, plain.value(observation), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(guided.value(observation), plain.value(observation))
    resumed = make(critic=Reads.HIDDEN, advantage_guidance=2.5)
    resumed.load_state_dict(copy.deepcopy(guided.state_dict()))
    assert torch.equal(
        resumed.act(observation, deterministic=True).actions, guided.act(observation, deterministic=True).actions
    )


@pytest.mark.parametrize("make", [policy, policy_of_pi05])
def test_pictures_are_encoded_once_a_decision(make, monkeypatch: pytest.MonkeyPatch) -> None:
    made, observation = make(critic=Reads.HIDDEN, advantage_guidance=2.5), seen(4)
    made.start_conditioning()
    vlm = made.model.native.model.vlm
    encode, counts = vlm.get_image_features, []
    monkeypatch.setattr(vlm, "get_image_features", lambda each: counts.append(len(each)) or encode(each))
    made.act(observation)
    assert counts == [4 * 2]  # two cameras, with and without the label


def test_imitation_reads_the_labels_of_actions_and_none_where_there_are_none() -> None:
    made, observation, actions = policy(advantage_guidance=1.5), seen(4), torch.rand(4, 4, 3)
    made.start_conditioning()
    prefix, read = made.model.prefix, []
    made.model.prefix = lambda pictures, tokens, real: read.append(tokens) or prefix(pictures, tokens, real)
    valid = torch.ones(4, 4, dtype=torch.bool)
    made.loss(observation.copy().update({CONDITION: MIXED}), actions, valid)
    made.loss(observation, actions, valid)  # supervised fine-tuning, which knows no labels
    assert torch.equal(read[0], made.inputs.tokens(observation, MIXED)[0])
    assert torch.equal(read[1], made.inputs.tokens(observation)[0])


def episodes(count: int = 40) -> Episodes:
    """Episodes of two decisions that look alike, whose first action element is -0.5 or 0.5, and is the reward."""
    parts = []
    for number in range(count):
        actions = torch.zeros(4, 3)
        actions[:, 0] = 0.5 if number % 2 else -0.5
        observation = seen(4, seed=number % 3).select("front", "wrist", "fingers", "instruction")
        parts.append(Episodes.of(observation, actions, success=bool(number % 2), reward=actions[:, 0]))
    return Episodes.join(parts)


def learner(seed: int = 0, **options) -> tuple[Pi0Policy, RECAP]:
    made = policy(advantage_guidance=1.5, critic=Reads.HIDDEN, denoising_steps=2)
    sizes = {"steps": 80, "batch": 32, "hidden": [16], "learning_rate": 3e-3, "average": 0.9, "positive_share": 0.5}
    return made, RECAPConfig(**sizes | options).build(made, torch.Generator().manual_seed(seed))


def mean_action(made: Pi0Policy) -> float:
    return float(made.act(seen(30, seed=1), generator=torch.Generator().manual_seed(0)).actions[..., 0].mean())


def test_recap_learns_to_act_as_the_better_half() -> None:
    made, each = learner()
    data = episodes()
    metrics = each.fit(data, 80)
    assert metrics["positive_share"] == pytest.approx(0.5, abs=0.1)
    assert made.is_guided
    assert mean_action(made) > 0.3
    made.guidance = 0.0
    assert mean_action(made) < 0.2
    with pytest.raises(UserError, match=r"use serve\.py"):
        publish(made, Path("unused"), Path("unused"), peft=False)


def test_recap_of_pi0_goes_on_where_it_was_saved() -> None:
    data = episodes(12)
    options = {"steps": 8, "batch": 8, "value_share": 0.25}
    made, each = learner(**options)
    each.fit(data, 4)
    # labels of hidden states that learning has moved since
    each.conditions = each.conditions.roll(1)
    other, again = learner(1, **options)
    other.load_state_dict(copy.deepcopy(made.state_dict()))
    again.load_state_dict(copy.deepcopy(each.state_dict()))
    for part in (each, again):
        torch.manual_seed(0)  # of the noise in a supervised loss
        part.fit(data, 2)
    assert torch.equal(each.conditions, again.conditions)
    assert all(torch.equal(one, two) for one, two in zip(made.parameters(), other.parameters(), strict=True))


def test_a_policy_without_the_option_is_refused() -> None:
    with pytest.raises(UserError, match=r"pi05 or smolvla with policy\.advantage_guidance"):
        RECAPConfig().build(policy(), torch.Generator())
    made = policy(advantage_guidance=1.5)
    SFTConfig(steps=1, batch=4).build(made, torch.Generator().manual_seed(0)).fit(episodes(4), 1)
    assert not made.is_guided  # imitation has not learned the label
