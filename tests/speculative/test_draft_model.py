"""A draft model: the output stays the target's, the caches stay in step, and tokenizers must agree."""

from __future__ import annotations

import pytest
import torch

from labkit.engine.decode import Decoder
from labkit.models import LoadedModel, tiny_model
from labkit.speculative import DraftModel, generate
from labkit.speculative.interface import Proposal, Sampling
from tests.speculative.distribution import chi_square_p_value, counted
from tests.speculative.test_tokenizers import WORDS, made

TARGET = tiny_model()
# The target's own weights, shaken: it agrees with the target often and not always.
SHAKEN = tiny_model()
with torch.no_grad():
    for weight in SHAKEN.parameters():
        weight += 0.05 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))


def prompts(batch: int, length: int = 12, vocab: int = 256) -> torch.Tensor:
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(2))


def begun(draft: DraftModel, ids: torch.Tensor, sampling: Sampling | None = None, seed: int = 0) -> DraftModel:
    draft.begin(Decoder(TARGET), ids, sampling or Sampling(), torch.Generator().manual_seed(seed))
    return draft


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("gamma", [1, 3])
def test_greedy_output_is_the_targets(batch: int, gamma: int) -> None:
    ids = prompts(batch)
    out = generate(TARGET, ids, DraftModel(SHAKEN), max_new_tokens=40, num_assistant_tokens=gamma)
    assert torch.equal(out.sequences, Decoder(TARGET).generate(ids, max_new_tokens=40).sequences)
    # Both happen, or the caches would not have been tried.
    assert 0.1 < out.stats.acceptance_rate < 1


@pytest.mark.parametrize("batch", [1, 3])
def test_the_target_as_its_own_draft_is_accepted_whole(batch: int) -> None:
    out = generate(TARGET, prompts(batch), DraftModel(TARGET), max_new_tokens=41, num_assistant_tokens=4)
    assert out.stats.acceptance_rate == 1
    assert out.stats.n_target_calls == 8 and out.stats.tokens_per_target_call == 5


def test_a_draft_in_another_dtype() -> None:
    ids = prompts(2)
    out = generate(TARGET, ids, DraftModel(tiny_model().bfloat16()), max_new_tokens=40, num_assistant_tokens=3)
    assert torch.equal(out.sequences, Decoder(TARGET).generate(ids, max_new_tokens=40).sequences)
    assert out.stats.acceptance_rate > 0.5


def test_rows_that_end_early_keep_the_others_right() -> None:
    ids = prompts(4)
    alone = Decoder(TARGET).generate(ids, max_new_tokens=30).sequences
    eos = int(alone[1, 15])
    wanted = Decoder(TARGET).generate(ids, max_new_tokens=30, eos_token_id=eos).sequences
    out = generate(TARGET, ids, DraftModel(SHAKEN), max_new_tokens=30, num_assistant_tokens=3, eos_token_id=eos)
    assert torch.equal(out.sequences, wanted)


def test_a_prompt_of_one_token() -> None:
    ids = torch.tensor([[7]])
    out = generate(TARGET, ids, DraftModel(SHAKEN), max_new_tokens=20, num_assistant_tokens=3)
    assert torch.equal(out.sequences, Decoder(TARGET).generate(ids, max_new_tokens=20).sequences)


def test_what_it_drafts_is_its_own_greedy_continuation_after_any_number_of_accepted_tokens() -> None:
    ids = prompts(1)
    draft, row = begun(DraftModel(SHAKEN), ids), ids[0].tolist()
    for kept in (0, 2, 4, 1, 4, 3):
        drafted = draft.propose([list(row)], 4)
        alone = Decoder(SHAKEN).generate(torch.tensor([row]), max_new_tokens=4).sequences[0, len(row) :]
        assert drafted.tokens[0].tolist() == alone.tolist()
        row += drafted.tokens[0, :kept].tolist() + [(int(drafted.tokens[0, min(kept, 3)]) + 1) % 256]


def test_a_row_that_went_on_with_none_of_its_tokens_is_read_anew() -> None:
    # As where something between it and the target drafts in its place.
    ids = prompts(1)
    draft, row = begun(DraftModel(SHAKEN), ids), ids[0].tolist()
    row += [(token + 1) % 256 for token in draft.propose([list(row)], 4).tokens[0].tolist()]
    alone = Decoder(SHAKEN).generate(torch.tensor([row]), max_new_tokens=3).sequences[0, len(row) :]
    assert draft.propose([list(row)], 3).tokens[0].tolist() == alone.tolist()


def test_it_reads_one_token_after_a_rejection_and_two_after_a_whole_draft() -> None:
    ids = prompts(1)
    draft, row = begun(DraftModel(SHAKEN), ids), ids[0].tolist()
    fed: list[int] = []
    forward = draft.decoder.forward
    draft.decoder.forward = lambda tokens, **options: fed.append(tokens.shape[1]) or forward(tokens, **options)
    tokens = draft.propose([list(row)], 3).tokens[0].tolist()
    assert fed == [12, 1, 1]
    fed.clear()
    row += [*tokens, 5]
    tokens = draft.propose([list(row)], 3).tokens[0].tolist()
    assert fed == [2, 1, 1]
    fed.clear()
    row += [tokens[0], (tokens[1] + 1) % 256]
    draft.propose([list(row)], 3)
    assert fed == [1, 1, 1]


def test_sampled_drafts_come_with_the_distribution_that_they_were_drawn_from() -> None:
    ids, sampling = prompts(2), Sampling(0.8, 20, 0.9)
    proposal = begun(DraftModel(SHAKEN), ids, sampling).propose(ids.tolist(), 3)
    assert proposal.probs.shape == (2, 3, 256) and proposal.probs.dtype == torch.float32
    whole = torch.cat((ids, proposal.tokens), dim=1)
    logits = SHAKEN(whole).logits[:, 11:14]
    torch.testing.assert_close(proposal.probs, sampling.probabilities(logits))
    assert bool((proposal.probs.gather(-1, proposal.tokens[..., None]) > 0).all())
    assert begun(DraftModel(SHAKEN), ids).propose(ids.tolist(), 3).probs is None


def test_a_seed_repeats_the_draft() -> None:
    ids, sampling = prompts(1), Sampling(1.5)
    drafts = [begun(DraftModel(SHAKEN), ids, sampling, seed).propose(ids.tolist(), 8).tokens for seed in (1, 1, 2)]
    assert torch.equal(drafts[0], drafts[1]) and not torch.equal(drafts[0], drafts[2])


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.3, 0, 1.0), (0.9, 6, 0.9)])
def test_sampled_output_has_the_targets_distribution(temperature: float, top_k: int, top_p: float) -> None:
    # Few positions: a cache of 100,000 rows is made for all of them.
    small = {"vocab_size": 8, "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16}
    small["max_position_embeddings"] = 8
    target, draft = tiny_model(**small), tiny_model(**small, initializer_range=0.3)
    draws, new, sampling = 100_000, 3, Sampling(temperature, top_k, top_p)
    ids = torch.tensor([[3, 5]]).expand(draws, -1)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": 4}
    out = generate(target, ids, DraftModel(draft), max_new_tokens=new, num_assistant_tokens=2, **options)
    assert 0.05 < out.stats.acceptance_rate < 0.98
    every = torch.cartesian_prod(*[torch.arange(8)] * new)
    p = sampling.probabilities(target(torch.cat((ids[: len(every)], every), dim=1)).logits[:, 1:-1])
    wanted = p.gather(-1, every[..., None]).squeeze(-1).double().prod(1).view((8,) * new)
    assert chi_square_p_value(counted(out.sequences[:, 2:], 8), wanted) > 1e-3


def test_it_stops_where_its_positions_end_and_the_target_goes_on() -> None:
    short = tiny_model(max_position_embeddings=16)
    ids = prompts(1)
    out = generate(TARGET, ids, DraftModel(short), max_new_tokens=30, num_assistant_tokens=4)
    assert torch.equal(out.sequences, Decoder(TARGET).generate(ids, max_new_tokens=30).sequences)
    draft = begun(DraftModel(short), ids)
    assert draft.propose([list(range(15))], 4).tokens.shape == (1, 2)
    assert begun(DraftModel(short), ids).propose([list(range(17))], 4).tokens.shape == (1, 0)
    # A prompt that is longer than that is not even read.
    long = prompts(1, 20)
    out = generate(TARGET, long, DraftModel(short), max_new_tokens=5, num_assistant_tokens=2)
    assert out.stats.n_drafted == 0


@pytest.mark.parametrize("own", [200, 320])
def test_a_vocabulary_padded_to_another_size(own: int) -> None:
    draft = tiny_model(vocab_size=own)
    if own > 256:  # it would draft nothing but what the target does not have
        with torch.no_grad():
            draft.lm_head.weight[256:] *= 50
    both = {"tokenizer": made(), "target_tokenizer": made()}
    ids, sampling = prompts(2, vocab=200), Sampling(1.0)
    for chosen in (Sampling(), sampling):
        proposal = begun(DraftModel(draft, **both), ids, chosen).propose(ids.tolist(), 1)
        assert int(proposal.tokens.max()) < min(own, 256)
    assert proposal.probs.shape == (2, 1, 256)
    torch.testing.assert_close(proposal.probs.sum(-1), torch.ones(2, 1))
    assert own > 200 or float(proposal.probs[..., 200:].abs().max()) == 0
    # Without tokenizers nothing says that the ids mean the same.
    with pytest.raises(ValueError, match=f"draft: got 'a vocabulary of {own}'; takes 256"):
        begun(DraftModel(draft), ids)


def test_other_tokenizers_are_refused_with_the_first_difference() -> None:
    other = made([*WORDS[:2], "slow", *WORDS[3:]])
    with pytest.raises(ValueError, match="draft: got 'slow' as id 2; takes 'quick'"):
        DraftModel(SHAKEN, tokenizer=other, target_tokenizer=made())
    with pytest.raises(ValueError, match="draft: got 'slow' as id 2; takes 'quick'"):
        DraftModel(LoadedModel(SHAKEN, other, "slow"), target_tokenizer=made())


def test_the_targets_own_decoder_cannot_draft() -> None:
    decoder = Decoder(TARGET)
    with pytest.raises(ValueError, match="target: got 'the Decoder that drafts'"):
        generate(decoder, prompts(1), DraftModel(decoder), max_new_tokens=4, num_assistant_tokens=2)


def test_rows_that_begin_was_not_given_are_refused() -> None:
    draft = begun(DraftModel(SHAKEN), prompts(1))
    with pytest.raises(ValueError, match="rows: got '2 rows'; takes 1"):
        draft.propose([[1, 2], [3, 4]], 2)
    assert isinstance(draft.propose([[1, 2]], 2), Proposal)
