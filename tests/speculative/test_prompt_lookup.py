"""Prompt lookup against a plain search, and what it drafts through `generate`."""

from __future__ import annotations

import random
import time

import pytest
import torch

from labkit.engine.decode import Decoder
from labkit.models import tiny_model
from labkit.speculative import PromptLookup, generate
from labkit.speculative.interface import Sampling

TARGET = Decoder(tiny_model())


def begun(rows: list[list[int]], **options: int) -> PromptLookup:
    lookup = PromptLookup(**options)
    lookup.begin(TARGET, torch.tensor([row[:1] for row in rows]), Sampling(), torch.Generator())
    return lookup


def searched(row: list[int], n: int, max_ngram: int, min_ngram: int) -> list[int]:
    """The definition: the first place, of the longest suffix, with something after it; one token after one."""
    for size in range(min(max_ngram, len(row) - 1), min_ngram - 1, -1):
        for end in range(size, len(row)):
            if row[end - size : end] == row[-size:]:
                return row[end : end + (1 if size == 1 else n)]
    return []


@pytest.mark.parametrize(("row", "n", "drafted"), [
    ([1, 2, 3, 4, 9, 1, 2, 3], 2, [4, 9]),
    ([1, 2, 3, 4, 9, 1, 2, 3], 9, [4, 9, 1, 2, 3]),  # up to the end of what is known
    ([5, 6, 7, 8, 5, 6, 9, 5, 6], 2, [7, 8]),  # the first of two matches
    ([1, 2, 3, 7, 0, 2, 3, 8, 1, 2, 3], 1, [7]),  # the longest suffix, not the first of a shorter one
    ([4, 5, 6, 4], 3, [5]),  # one token in common drafts one
    ([6, 6], 4, [6]),  # the suffix overlaps its match
    ([1, 2, 3, 4], 4, []),
    ([1], 4, []),
])  # fmt: skip
def test_what_followed_the_longest_suffix_before(row: list[int], n: int, drafted: list[int]) -> None:
    proposal = begun([row]).propose([row], n)
    assert proposal.tokens.tolist() == [drafted]
    assert proposal.tokens.dtype == torch.int64
    assert proposal.probs is None and proposal.tree is None


@pytest.mark.parametrize("sizes", [(3, 1), (2, 2), (5, 2), (1, 1)])
def test_rows_that_grow_draft_as_a_search_from_the_start_does(sizes: tuple[int, int]) -> None:
    rng = random.Random(3)
    row = [rng.randrange(4)]
    lookup = begun([row], max_ngram=sizes[0], min_ngram=sizes[1])
    found = 0
    while len(row) < 300:
        n = rng.randrange(1, 6)
        drafted = lookup.propose([list(row)], n).tokens[0].tolist()
        assert drafted == searched(row, n, *sizes), row
        found += bool(drafted)
        row += [rng.randrange(4) for _ in range(rng.randrange(1, 5))]
    assert found > 50


def test_rows_of_a_batch_look_in_themselves_and_are_filled_up_to_the_longest() -> None:
    rows = [[1, 2, 3, 1, 2], [7, 8, 9, 1, 2], [4, 5, 4]]
    proposal = begun(rows).propose(rows, 3)
    # The second row knows "1 2" from no place of its own; it and the third are filled up.
    assert proposal.tokens.tolist() == [[3, 1, 2], [2, 2, 2], [5, 4, 4]]


def test_a_new_generation_forgets_the_last_one() -> None:
    lookup = begun([[1, 2, 3, 1, 2]])
    lookup.propose([[1, 2, 3, 1, 2]], 3)
    lookup.begin(TARGET, torch.tensor([[9]]), Sampling(), torch.Generator())
    assert lookup.propose([[9, 1, 2]], 3).tokens.shape == (1, 0)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="max_ngram"):
        PromptLookup(0)
    with pytest.raises(ValueError, match="min_ngram.*from 1 to 2"):
        PromptLookup(2, 3)
    with pytest.raises(ValueError, match="2 rows.; takes 1"):
        begun([[1]]).propose([[1], [2]], 1)
    with pytest.raises(ValueError, match="n: got 0"):
        begun([[1]]).propose([[1]], 0)


def test_a_step_at_2000_tokens_costs_about_what_it_costs_at_20() -> None:
    rng = random.Random(0)
    row = [rng.randrange(50) for _ in range(2300)]

    def seconds(start: int) -> float:
        lookup = begun([row])
        lookup.propose([row[:start]], 4)
        times = []
        for length in range(start + 2, start + 202, 2):
            known = row[:length]
            begin = time.perf_counter()
            lookup.propose([known], 4)
            times.append(time.perf_counter() - begin)
        return min(times)

    # A search through the row would be about a hundred times as slow there.
    assert seconds(2000) < 10 * seconds(20)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("gamma", [1, 4])
def test_greedy_output_is_the_targets(batch: int, gamma: int) -> None:
    prompts = torch.randint(0, 20, (batch, 24), generator=torch.Generator().manual_seed(5))
    alone = TARGET.generate(prompts, max_new_tokens=40).sequences
    ours = generate(TARGET, prompts, PromptLookup(), max_new_tokens=40, num_assistant_tokens=gamma)
    assert torch.equal(ours.sequences, alone)
    assert ours.stats.n_drafted > 0


def test_what_repeats_is_accepted() -> None:
    # A random model of few tokens soon goes round in circles: from then on all that is looked up is right.
    target = Decoder(tiny_model(vocab_size=5, num_hidden_layers=1))
    prompt = torch.tensor([[1, 2]])
    out = generate(target, prompt, PromptLookup(), max_new_tokens=100, num_assistant_tokens=4)
    assert out.stats.tokens_per_target_call > 2
    assert torch.equal(out.sequences, target.generate(prompt, max_new_tokens=100).sequences)


def test_a_prompt_of_one_token() -> None:
    prompt = torch.tensor([[7]])
    ours = generate(TARGET, prompt, PromptLookup(), max_new_tokens=20, num_assistant_tokens=3)
    assert torch.equal(ours.sequences, TARGET.generate(prompt, max_new_tokens=20).sequences)
