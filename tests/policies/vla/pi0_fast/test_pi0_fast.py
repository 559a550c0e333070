"""pi0-FAST with a small random model: answers, their likelihood, imitation, and weights in LeRobot's layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tensordict import TensorDict
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from embodied.contract import Contract
from embodied.errors import UserError
from embodied.policy import EXECUTED
from policies.vla.computing import _compiled
from policies.vla.openvla.parallel import untrained
from policies.vla.pi0_fast.policy import NOTHING, Pi0FastConfig, Pi0FastPolicy
from policies.vla.sizes import Size
from tests.policies.vla.pi0_fast.test_fast import chunks, published
from tests.policies.vla.test_pi0 import SEEING, seen

SPREAD = torch.tensor([1.0, 2.0, 3.0])


def policy(contract: Contract = SEEING, **options: object) -> Pi0FastPolicy:
    torch.manual_seed(0)
    made = Pi0FastConfig(**{"hidden": 16, **options}).build(contract)
    for parameter in made.parameters():  # so that no layer has its special initial weights
        parameter.data += 0.05 * torch.randn_like(parameter)
    made.fit(seen(64), torch.rand(64, contract.horizon, 3) * SPREAD)
    return made


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_the_likelihood_is_that_of_each_token_given_those_before() -> None:
    """Acting reads the answer token by token, scoring all at once; by hand each token has a pass of its own."""
    made, observation = policy(temperature=1.3), seen(3)
    decision = made.act(observation, generator=generator())
    answer = decision.sample["tokens"]
    assert answer.shape == (3, 13)  # twelve numbers and the end
    with torch.no_grad():
        scored = made.evaluate(observation, decision.sample)
    torch.testing.assert_close(scored.log_prob, decision.log_prob, atol=1e-3, rtol=1e-5)
    vocabulary = made.model.native.get_input_embeddings().weight[made.drawn]
    used = int((made.pairs[:, 0] >= 0).sum()) + 256 - len(made.pairs)
    for row in range(3):
        tokens = [each for each in answer[row].tolist() if each != NOTHING]
        assert tokens.index(256) == len(tokens) - 1 if 256 in tokens else len(tokens) == 13
        total = entropy = 0.0
        for place, token in enumerate(tokens):
            before = torch.cat((made.lead, made.drawn[torch.tensor([tokens[:place]], dtype=torch.long)]), 1)
            with torch.no_grad():
                hidden, _ = made._answered(observation[row : row + 1], before)
                scores = (hidden[0, -1] @ vocabulary.T / 1.3).double()
            scores[used:256] = -torch.inf  # pairs that do not exist
            shares = scores.softmax(-1)
            total += float(shares[token].log())
            entropy -= float(torch.special.xlogy(shares, shares).sum())
        assert float(scored.log_prob[row]) == pytest.approx(total, abs=2e-3)
        assert float(scored.entropy[row]) == pytest.approx(entropy, abs=2e-3)


def test_chunks_of_a_compiled_model_leave_nothing_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled functions are kept: one that is new for every answer would keep that answer's keys and values."""
    monkeypatch.setattr(torch, "compile", lambda function: function)
    made, observation = policy(), seen(2)
    made.config.compile = True
    made.act(observation, generator=generator())
    before = _compiled.cache_info().currsize
    made.act(observation, generator=generator())
    assert _compiled.cache_info().currsize == before
    _compiled.cache_clear()


def test_all_of_the_likelihood_belongs_to_the_first_action() -> None:
    made, observation = policy(), seen(2)
    decision = made.act(observation, generator=generator())
    assert decision.log_prob_terms.shape == (2, 2, 1)
    assert not decision.log_prob_terms[:, 1].any()
    cut = decision.sample.clone().set(EXECUTED, torch.tensor([[True, False], [False, False]]))
    scored = made.evaluate(observation, cut).log_prob.squeeze(1).detach()
    assert float(scored[0]) == pytest.approx(float(decision.log_prob[0]), abs=1e-3)
    assert float(scored[1]) == 0.0


def test_the_prompt_ends_where_the_answer_begins_and_padding_changes_nothing() -> None:
    made, observation = policy(), seen(2)
    prompts = made.inputs.prompts(observation)
    assert prompts[0].startswith("Task: pick the milk, State: ")
    assert prompts[0].endswith(";\n")
    assert bytes((made.lead[0, 1:] - 2).tolist()) == b"Action: "
    pictures, (tokens, real) = made._read(observation)
    with torch.no_grad():
        hidden, mean = made.model(pictures, tokens, real, made.lead.expand(2, -1))
        longer = [torch.nn.functional.pad(each, (0, 5)) for each in (tokens, real)]
        other, other_mean = made.model(pictures, *longer, made.lead.expand(2, -1))
    torch.testing.assert_close(hidden, other, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(mean, other_mean, atol=1e-5, rtol=1e-4)


def test_the_loss_is_the_cross_entropy_of_lead_tokens_and_end() -> None:
    made, observation, actions = policy(), seen(2), torch.rand(2, 4, 3) * SPREAD
    valid = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]])
    held = actions.clone()
    held[1, 2:] = actions[1, 1]
    total, weights = 0.0, 0.0
    for row, weight in enumerate((1.0, 0.5)):
        ids = made.fast.encode(made.normalised(held[row : row + 1]))[0]
        whole = torch.tensor([[*made.lead[0].tolist(), *(int(made.drawn[each]) for each in ids), 2 + ord("|")]])
        with torch.no_grad():
            hidden, _ = made._answered(observation[row : row + 1], whole[:, :-1])
            log_probs = made.model.logits(hidden).log_softmax(-1)[0]
        total -= weight * float(log_probs.gather(1, whole[0, 1:, None]).sum())
        weights += weight * (whole.shape[1] - 1)
    assert float(made.loss(observation, actions, valid).detach()) == pytest.approx(total / weights, rel=1e-4)


def test_imitation_learns_which_chunk_belongs_to_which_words() -> None:
    made = policy()
    observation = seen(8)
    actions = torch.where(torch.arange(8).view(8, 1, 1) % 2 == 0, 0.25, 0.75) * SPREAD.expand(8, 4, 3)
    made.fit(observation, actions)
    optimiser = torch.optim.Adam(made.actor_parameters(), 3e-3)
    for _ in range(60):
        optimiser.zero_grad()
        loss = made.loss(observation, actions, torch.ones(8, 4))
        loss.backward()
        optimiser.step()
    assert float(loss.detach()) < 0.1
    decided = made.act(observation, deterministic=True).actions
    limited = actions.clamp(made.action_low, made.action_high)
    assert (decided - limited).abs().max() < 0.2
    # a policy gradient makes a drawn chunk likelier
    sample = made.act(observation, generator=generator()).sample
    before = made.evaluate(observation, sample).log_prob
    optimiser = torch.optim.SGD(made.actor_parameters(), 1e-3)
    (-before.sum()).backward()
    optimiser.step()
    after = made.evaluate(observation, sample).log_prob
    assert float(after.sum().detach()) > float(before.sum().detach())


def test_pairs_are_fitted_to_rows_in_their_order_and_saved_with_the_weights() -> None:
    made, other = policy(), policy(vocabulary=256)
    rows = torch.linspace(0.0, 1.0, 64).unsqueeze(1) * SPREAD
    made.fit(seen(64), rows)
    assert (made.pairs[:, 0] >= 0).any()
    assert not torch.equal(made.pairs, other.pairs)
    chunk = made.normalised(rows[:4].unsqueeze(0))
    other.load_state_dict(made.state_dict())
    assert other.fast.encode(chunk) == made.fast.encode(chunk)
    assert made.with_new_weights().fast.encode(chunk) == made.fast.encode(chunk)
    alone = policy(replace(SEEING, horizon=8, executed=2))
    alone.fit(seen(2), rows[:3])  # fewer than a chunk: every number has a token
    assert alone.act(seen(2)).actions.shape == (2, 8, 3)


def save(folder: Path, **fields: object) -> dict[str, torch.Tensor]:
    """A small model in LeRobot's layout with FAST's files below `fast`; returns its tensors by our names."""
    (folder / "fast").mkdir()
    published(folder / "fast", chunks(horizon=4))
    torch.manual_seed(1)
    native = untrained(Size.TINY, 500)
    for parameter in native.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    tensors = {name: value.clone() for name, value in native.state_dict().items()}
    prefix = "model.paligemma_with_expert.paligemma."
    stored = {f"{prefix}model.{name}".replace("vision_tower.", "vision_tower.vision_model."): value
              for name, value in tensors.items() if "embed_tokens" not in name}  # fmt: skip
    stored[f"{prefix}lm_head.weight"] = tensors["language_model.embed_tokens.weight"]
    save_file({name: value.contiguous() for name, value in stored.items()}, folder / "model.safetensors")
    config = {"type": "pi0_fast", "chunk_size": 4, "fast_skip_tokens": 20, "max_state_dim": 4,
              "vlm_config": native.config.to_dict()}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | fields))
    said = {"observation.state.q01": [0.0, 0.0], "observation.state.q99": [1.0, 2.0]}
    said |= {"action.q01": [0.0, 0.0, 0.0], "action.q99": [1.0, 2.0, 3.0]}
    save_file(
        {name: torch.tensor(value) for name, value in said.items()},
        folder / "policy_preprocessor_step_2_normalizer_processor.safetensors",
    )
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3, "Action": 4, ":": 5, "|": 6, "Task": 7, "State": 8}
    words |= {f"w{number}": number for number in range(len(words), 1024)}
    found = Tokenizer(models.WordLevel(words, "<unk>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=found, **special).save_pretrained(folder)
    return tensors


def test_weights_statistics_and_tokens_of_lerobots_layout(tmp_path: Path) -> None:
    tensors = save(tmp_path)
    made = Pi0FastConfig(weights=str(tmp_path), action_tokenizer=str(tmp_path / "fast"), hidden=16).build(SEEING)
    found = made.model.native.state_dict()
    assert [name for name, value in tensors.items() if not torch.equal(found[name], value)] == []
    torch.testing.assert_close(made.action_mean, torch.tensor([0.5, 1.0, 1.5]))
    torch.testing.assert_close(made.action_std, torch.tensor([0.5, 1.0, 1.5]))
    assert made.lead.tolist() == [[1, 4, 5]]
    assert (made.drawn[-1], made.after) == (6, [2])
    assert made.drawn[:3].tolist() == [1024 - 1 - 20, 1024 - 2 - 20, 1024 - 3 - 20]
    assert made.inputs.prompts(seen(1))[0].endswith(" 128 128;\n")
    made.fit(seen(8), torch.rand(8, 4, 3))
    torch.testing.assert_close(made.action_mean, torch.tensor([0.5, 1.0, 1.5]))
    shares = made._log_probs(torch.zeros(1, made.model.width)).exp()
    torch.testing.assert_close(shares, torch.full((1, made.size + 1), 1.0 / (made.size + 1)))  # every token may come
    decision = made.act(seen(2), generator=generator())
    assert decision.actions.shape == (2, 4, 3)
    torch.testing.assert_close(
        made.evaluate(seen(2), decision.sample).log_prob, decision.log_prob, atol=1e-2, rtol=1e-4
    )


def test_what_does_not_fit_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"name their folder in policy\.action_tokenizer"):
        Pi0FastConfig(weights=str(tmp_path))
    with pytest.raises(UserError, match=r"have 41 numbers: policy\.vocabulary=10 has to be at least as large"):
        Pi0FastConfig(vocabulary=10).build(SEEING)
    with pytest.raises(UserError, match="policy=pi0_fast needs action limits"):
        Pi0FastConfig().build(replace(SEEING, action=replace(SEEING.action, low=(), high=())))
    save(tmp_path, use_relative_actions=True)
    options = {"weights": str(tmp_path), "action_tokenizer": str(tmp_path / "fast")}
    with pytest.raises(UserError, match="its actions are relative to the state, which is not supported"):
        Pi0FastConfig(**options).build(SEEING)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"type": "pi0"}))
    with pytest.raises(UserError, match="it is of type pi0"):
        Pi0FastConfig(**options).build(SEEING)
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"use_relative_actions": False, "fast_skip_tokens": 1000})
    )
    with pytest.raises(UserError, match="which do not fit into the vocabulary"):
        Pi0FastConfig(**options).build(SEEING)


def test_a_chunk_of_an_empty_answer_is_the_middle_of_the_range() -> None:
    made = policy()
    answer = torch.full((1, 13), NOTHING)
    answer[0, 0] = made.size
    middle = made.to_robot(torch.zeros(1, 4, 3))
    torch.testing.assert_close(made.to_robot(made._decoded(answer)), middle)
    sample = TensorDict({"tokens": answer}, [1])
    assert made.evaluate(seen(1), sample).log_prob.shape == (1, 1)
