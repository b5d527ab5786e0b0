"""`generate`: the target's own output, whoever drafts, and counts that are known beforehand."""

import pytest
import torch

from labkit.engine import Decoder
from labkit.kv_cache import PagedKVCache, QuantizedCache
from labkit.models import tiny_model
from labkit.speculative import DraftTree, EagleHead, PromptLookup, Proposal, generate
from tests.speculative.distribution import chi_square_p_value, counted
from tests.speculative.drafters import Listening, ListeningTree, RandomDrafts, Scripted, ScriptedTree
from tests.speculative.heads import head_for

VOCAB, NEW = 256, 24


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def prompts():
    return torch.randint(0, VOCAB, (3, 7), generator=torch.Generator().manual_seed(3))


def plain(model, ids, new=NEW, **options):
    return Decoder(model).generate(ids, max_new_tokens=new, **options).sequences


def scripts(model, ids, new=NEW):
    return plain(model, ids, new + 16)[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_a_perfect_drafter_is_accepted_whole(model, prompts, gamma, tree):
    ids, kind = prompts[:1], ScriptedTree if tree else Scripted
    new = 1 + 4 * (gamma + 1)  # the first is the prompt's
    calls = []
    drafter = kind(scripts(model, ids), VOCAB)
    out = generate(model, ids, drafter, max_new_tokens=new, num_assistant_tokens=gamma, watch=calls.append)
    assert torch.equal(out.sequences, plain(model, ids, new))
    stats = out.stats
    assert (stats.n_target_calls, stats.n_emitted) == (4, new - 1)
    assert stats.tokens_per_target_call == gamma + 1
    assert (stats.n_tested, stats.n_matches, stats.acceptance_rate) == (4 * gamma, 4 * gamma, 1.0)
    assert stats.n_drafted == 4 * gamma * (2 if tree else 1)
    assert (calls[0].kind, calls[0].drafted, len(calls[0].emitted)) == ("prompt", (), 1)
    assert [(call.n_accepted, len(call.emitted), call.kind) for call in calls[1:]] == [(gamma, gamma + 1, "bonus")] * 4


@pytest.mark.parametrize("kind", [Scripted, ScriptedTree])
def test_a_drafter_that_is_never_right_costs_nothing_but_time(model, prompts, kind):
    ids = prompts[:1]
    # Two wrong children of a tree: the right token is neither.
    drafter = kind(scripts(model, ids), VOCAB, wrong=lambda place: True)
    out = generate(model, ids, drafter, max_new_tokens=NEW, num_assistant_tokens=3)
    assert torch.equal(out.sequences, plain(model, ids))
    assert out.stats.tokens_per_target_call == 1.0
    # The last call may draft nothing: one token is left, and it is the target's.
    assert (out.stats.n_matches, out.stats.n_tested, out.stats.n_target_calls) == (0, NEW - 2, NEW - 1)


@pytest.mark.parametrize("kind", [Scripted, ScriptedTree])
@pytest.mark.parametrize("every", [2, 3, 5])
def test_rows_that_accept_different_numbers(model, prompts, kind, every):
    """Row b goes wrong at other places than its neighbours; each must be what it is alone."""
    drafter = kind(scripts(model, prompts), VOCAB)
    original = drafter.token
    drafter.token = lambda row, place: (original(row, place) + (1 if (place + row) % (every + row) == 0 else 0)) % VOCAB
    calls = []
    out = generate(model, prompts, drafter, max_new_tokens=NEW, num_assistant_tokens=4, watch=calls.append)
    assert torch.equal(out.sequences, plain(model, prompts))
    assert len({call.n_accepted for call in calls}) > 2
    by_row = [[call for call in calls if call.row == row] for row in range(3)]
    assert len({len(row) for row in by_row}) > 1, "rows that take the same number of calls prove little"
    stats = out.stats
    # Each row's first call is the prompt's, which is not counted.
    assert stats.n_target_calls == max(map(len, by_row)) - 1 < stats.n_row_calls == sum(map(len, by_row)) - 3
    assert stats.n_emitted == 3 * (NEW - 1) == sum(len(call.emitted) for call in calls) - 3
    for row, made in enumerate(by_row):
        assert [t for call in made for t in call.emitted] == out.sequences[row, prompts.shape[1] :].tolist()


def test_the_acceptance_rate_counts_verdicts_and_not_the_targets_own_tokens(model, prompts):
    """Wrong at each third place, drafts of five: two kept, one refused, nothing known of the others."""
    ids = prompts[:1]
    drafter = Scripted(scripts(model, ids), VOCAB, wrong=lambda place: place % 3 == 0)
    stats = generate(model, ids, drafter, max_new_tokens=NEW + 1, num_assistant_tokens=5).stats
    # The last call drafts the two tokens that there is room for, and both are right.
    assert (stats.n_target_calls, stats.n_matches, stats.n_tested) == (8, 16, 16 + 7)
    assert stats.n_drafted == 6 * 5 + 5 * 0 + 2 + 5
    assert stats.acceptance_rate == 16 / 23
    assert stats.tokens_per_target_call == 3.0


def test_gamma_zero_is_plain_decoding(model, prompts):
    drafter = Scripted(scripts(model, prompts), VOCAB)
    out = generate(model, prompts, drafter, max_new_tokens=9, num_assistant_tokens=0)
    assert torch.equal(out.sequences, plain(model, prompts, 9))
    assert (out.stats.n_drafted, out.stats.n_target_calls, out.stats.tokens_per_target_call) == (0, 8, 1.0)
    assert out.stats.acceptance_rate != out.stats.acceptance_rate  # nothing was tested


@pytest.mark.parametrize("new", [1, 2, 3])
def test_gamma_beyond_what_is_left(model, prompts, new):
    ids = prompts[:1]
    drafted = []
    drafter = Scripted(scripts(model, ids), VOCAB)
    out = generate(
        model, ids, drafter, max_new_tokens=new, num_assistant_tokens=9, watch=lambda c: drafted.append(len(c.drafted))
    )
    assert torch.equal(out.sequences, plain(model, ids, new))
    assert drafted == [0, new - 2][:new]


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("kind", [Scripted, Listening])
def test_a_prompt_of_one_token(model, prompts, length, kind):
    ids = prompts[:, :length]
    out = generate(model, ids, kind(scripts(model, ids), VOCAB), max_new_tokens=NEW, num_assistant_tokens=3)
    assert torch.equal(out.sequences, plain(model, ids))


@pytest.mark.parametrize("place", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("kind", [Scripted, ScriptedTree])
def test_an_end_of_text_inside_a_draft(model, prompts, place, kind):
    """At place 0 it is the prompt's token, at 1 the first drafted one, at 4 the bonus of a draft of three, then in the
    next draft."""
    ids = prompts[:1]
    script = scripts(model, ids)
    eos = script[0][place]
    assert eos not in script[0][:place]
    calls = []
    out = generate(
        model,
        ids,
        kind(script, VOCAB),
        max_new_tokens=NEW,
        num_assistant_tokens=3,
        eos_token_id=eos,
        watch=calls.append,
    )
    assert out.sequences[0, ids.shape[1] :].tolist() == script[0][: place + 1]
    assert torch.equal(out.sequences, plain(model, ids, eos_token_id=eos))
    assert calls[-1].kind == {0: "prompt", 4: "bonus"}.get(place, "cut")
    assert out.stats.n_emitted == place
    assert out.stats.n_matches == out.stats.n_tested == place - (place >= 4)


def test_rows_that_end_early_are_padded_and_do_not_disturb_the_others(model, prompts):
    script = scripts(model, prompts)
    eos = [script[0][4], script[1][11]]
    alone = [plain(model, prompts[row : row + 1], eos_token_id=eos)[0].tolist() for row in range(3)]
    out = generate(
        model, prompts, Scripted(script, VOCAB), max_new_tokens=NEW, num_assistant_tokens=3, eos_token_id=eos
    )
    longest = max(map(len, alone))
    assert out.sequences.tolist() == [row + [row[-1]] * (longest - len(row)) for row in alone]
    assert len({len(row) for row in alone}) > 1


def test_the_maximum_length_inside_a_draft_of_a_batch(model, prompts):
    """Row 0 is always right and reaches the end first, while row 1 drafts on."""
    drafter = Scripted(scripts(model, prompts), VOCAB)
    original = drafter.token
    drafter.token = lambda row, place: (original(row, place) + (row > 0)) % VOCAB
    out = generate(model, prompts, drafter, max_new_tokens=7, num_assistant_tokens=4)
    assert torch.equal(out.sequences, plain(model, prompts, 7))
    assert out.stats.n_row_calls == 2 + 6 + 6


def test_the_models_last_position(model):
    small = tiny_model(max_position_embeddings=24)
    ids = torch.tensor([[5, 6, 7], [9, 8, 7]])
    drafter = Scripted(scripts_of_room(small, ids, 21), VOCAB, wrong=lambda place: place % 4 == 3)
    out = generate(small, ids, drafter, max_new_tokens=21, num_assistant_tokens=6)
    assert torch.equal(out.sequences, plain(small, ids, 21))
    with pytest.raises(ValueError, match="max_new_tokens"):
        generate(small, ids, drafter, max_new_tokens=22, num_assistant_tokens=6)


def test_a_tree_at_the_models_last_position(model):
    """Every node takes a place of the cache, where a path of it takes fewer."""
    small = tiny_model(max_position_embeddings=24)
    ids = torch.tensor([[5, 6, 7]])
    head = EagleHead(head_for(small), DraftTree.of_ranks([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)]))
    for gamma in (1, 2):
        out = generate(small, ids, head, max_new_tokens=21, num_assistant_tokens=gamma)
        assert torch.equal(out.sequences, plain(small, ids, 21))


def scripts_of_room(model, ids, new):
    return plain(model, ids, new)[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize("kind", [Listening, ListeningTree])
def test_it_tells_the_hidden_states_of_what_is_verified(model, prompts, kind):
    drafter = kind(scripts(model, prompts), VOCAB)
    original = drafter.token
    drafter.token = lambda row, place: (original(row, place) + ((place + row) % (2 + row) == 0)) % VOCAB
    out = generate(model, prompts, drafter, max_new_tokens=NEW, num_assistant_tokens=4)
    _, wanted = Decoder(model).forward(out.sequences[:, :-1], return_hidden=True)
    for row in range(3):
        heard = torch.cat(drafter.heard[row])
        torch.testing.assert_close(heard, wanted[row, : len(heard)], atol=2e-5, rtol=2e-5)
        assert len(heard) == out.sequences.shape[1] - 1


@pytest.mark.parametrize("tree", [False, True])
def test_over_a_quantized_cache(model, prompts, tree):
    """Eight bits and a window as long as the answer: what the draft's steps round is what single steps round."""
    ids, options = prompts[:1], {"nbits": 8, "q_group_size": 16, "residual_length": 64}
    reference = Decoder(model, cache=QuantizedCache(model.config, **options)).generate(ids, max_new_tokens=NEW)
    kind = ScriptedTree if tree else Scripted
    drafter = kind(scripts(model, ids), VOCAB, wrong=lambda place: place % 4 == 1)
    cache = QuantizedCache(model.config, **options)
    out = generate(model, ids, drafter, max_new_tokens=NEW, num_assistant_tokens=3, cache=cache)
    assert torch.equal(out.sequences, reference.sequences)
    assert cache.length == out.sequences.shape[1] - 1


def test_over_a_quantized_cache_that_has_rounded(model, prompts):
    """A window of four tokens: drafts reach across what is rounded and are cropped there. The reference runs over the
    same cache, a token at a time."""
    ids, options = prompts[:1], {"nbits": 8, "q_group_size": 8, "residual_length": 4}
    reference = Decoder(model, cache=QuantizedCache(model.config, **options)).generate(ids, max_new_tokens=48)
    drafter = Scripted(scripts(model, ids, 48), VOCAB, wrong=lambda place: place % 5 == 3)
    cache = QuantizedCache(model.config, **options)
    out = generate(model, ids, drafter, max_new_tokens=48, num_assistant_tokens=4, cache=cache)
    assert torch.equal(out.sequences, reference.sequences)
    assert cache.layers[0].n_quantized >= 40


def test_over_a_paged_cache_with_a_prefix_at_hand(model, prompts):
    ids = prompts[:1].repeat(1, 6)
    cache = PagedKVCache(model.config, num_blocks=32, block_size=8, dtype=torch.float32)
    decoder = Decoder(model, cache=cache)
    drafter = Listening(scripts(model, ids), VOCAB, wrong=lambda place: place % 4 == 1)
    first = generate(decoder, ids, drafter, max_new_tokens=NEW, num_assistant_tokens=3).sequences
    again = generate(decoder, ids, drafter, max_new_tokens=NEW, num_assistant_tokens=3).sequences
    assert torch.equal(first, plain(model, ids))
    assert torch.equal(again, first)


def test_what_a_cache_cannot_hold_is_refused_before_the_first_pass(model, prompts):
    quantized, streamer = QuantizedCache(model.config, 8, 16, 32), Recorder()
    with pytest.raises(ValueError, match="^cache: got 'a QuantizedCache for 3 rows'; takes a StaticKVCache, or one"):
        generate(model, prompts, PromptLookup(), max_new_tokens=9, num_assistant_tokens=3, cache=quantized)
    with pytest.raises(ValueError, match="^cache: got 'a QuantizedCache for 3 rows'"):
        generate(
            model, prompts, PromptLookup(), max_new_tokens=9, num_assistant_tokens=0, cache=quantized, eos_token_id=3
        )
    paged = PagedKVCache(model.config, num_blocks=32, block_size=8, dtype=torch.float32)
    head = EagleHead(head_for(model), DraftTree.of_ranks([(0,), (1,)]))
    with pytest.raises(ValueError, match="^cache: got 'PagedKVCache'; takes a StaticKVCache or a QuantizedCache"):
        generate(model, prompts[:1], head, max_new_tokens=9, num_assistant_tokens=1, cache=paged, streamer=streamer)
    assert streamer.put_values == []


def test_one_token_is_the_prompts_alone_and_asks_nothing_of_the_cache(model, prompts):
    quantized = QuantizedCache(model.config, 8, 16, 32)
    out = generate(model, prompts, PromptLookup(), max_new_tokens=1, num_assistant_tokens=3, cache=quantized)
    assert torch.equal(out.sequences, plain(model, prompts, 1))


STEPS = {
    "generate": lambda decoder, ids: decoder.generate(ids, max_new_tokens=2),
    "forward": lambda decoder, ids: decoder.forward(ids),
    "crop": lambda decoder, ids: decoder.crop(1),
    "reset": lambda decoder, ids: decoder.reset(),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("told", [1, 3])
@pytest.mark.parametrize("how", ["speculative", "plain"])
def test_a_streamer_that_steps_the_decoder_that_feeds_it_is_refused(model, prompts, how, told, step):
    decoder, ids = Decoder(model), prompts[:1]

    class Stepping(Recorder):
        def put(self, value):
            super().put(value)
            if len(self.put_values) == told:
                STEPS[step](decoder, ids)

    def run(streamer):
        if how == "plain":
            return decoder.generate(ids, max_new_tokens=9, streamer=streamer)
        return generate(decoder, ids, PromptLookup(), max_new_tokens=9, num_assistant_tokens=2, streamer=streamer)

    with pytest.raises(ValueError, match="decoder: got .* takes another Decoder"):
        run(Stepping())
    assert torch.equal(run(None).sequences, plain(model, ids, 9))


@pytest.mark.parametrize("step", STEPS)
def test_a_watch_that_steps_the_decoder_it_watches_is_refused(model, prompts, step):
    decoder, ids = Decoder(model), prompts[:1]

    def run(watch):
        return generate(decoder, ids, PromptLookup(), max_new_tokens=9, num_assistant_tokens=2, watch=watch)

    with pytest.raises(ValueError, match="decoder: got .* takes another Decoder"):
        run(lambda call: STEPS[step](decoder, ids))
    assert torch.equal(run(None).sequences, plain(model, ids, 9))


class Recorder:
    def __init__(self):
        self.put_values, self.ended = [], False

    def put(self, value):
        self.put_values.append(value.flatten().tolist())

    def end(self):
        self.ended = True


def test_it_streams_call_by_call(model, prompts):
    ids, streamer = prompts[:1], Recorder()
    drafter = Scripted(scripts(model, ids), VOCAB)
    out = generate(model, ids, drafter, max_new_tokens=10, num_assistant_tokens=2, streamer=streamer)
    assert streamer.ended
    assert streamer.put_values[0] == ids[0].tolist()
    assert list(map(len, streamer.put_values[1:])) == [1, 3, 3, 3]
    assert sum(streamer.put_values, []) == out.sequences[0].tolist()
    with pytest.raises(ValueError, match="streamer"):
        generate(model, prompts, drafter, max_new_tokens=9, num_assistant_tokens=2, streamer=streamer)


def test_seeds(model, prompts):
    drafter = RandomDrafts(torch.full((VOCAB,), 1 / VOCAB))
    options = {"max_new_tokens": 12, "num_assistant_tokens": 3, "temperature": 1.0}
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    one, same, other = (generate(model, prompts, drafter, seed=seed, **options).sequences for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_decoder_is_used_as_it_is_and_again(model, prompts):
    decoder = Decoder(model)
    drafter = Scripted(scripts(model, prompts), VOCAB, wrong=lambda place: place % 3 == 0)
    for _ in range(2):
        out = generate(decoder, prompts, drafter, max_new_tokens=NEW, num_assistant_tokens=3)
        assert torch.equal(out.sequences, plain(model, prompts))
    assert torch.equal(decoder.generate(prompts, max_new_tokens=NEW).sequences, plain(model, prompts))


def test_threads_that_share_a_decoder_take_turns(model, prompts):
    from concurrent.futures import ThreadPoolExecutor

    decoder, ids = Decoder(model), prompts[:1]

    def run(seed):
        drafter = Scripted(scripts(model, ids), VOCAB, wrong=lambda place: place % (2 + seed) == 0)
        return generate(decoder, ids, drafter, max_new_tokens=NEW, num_assistant_tokens=3).sequences

    with ThreadPoolExecutor(4) as pool:
        for sequences in pool.map(run, range(8)):
            assert torch.equal(sequences, plain(model, ids))


TINY = 5
DRAWS = 100_000


@pytest.fixture(scope="module")
def five_tokens():
    """A model over five tokens, the exact distribution of the first three after a prompt, and that prompt."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "max_position_embeddings": 32}  # a cache holds them all
    model = tiny_model(vocab_size=TINY, initializer_range=0.6, **sizes)
    ids = torch.tensor([[1, 3, 2]])
    return model, ids, exact_distribution(model, ids)


def exact_distribution(model, ids):
    """Of the three tokens after `ids (1, n)`: `(TINY,) * 3`, float64."""
    exact, sequences = torch.ones(1, dtype=torch.float64), ids
    for _ in range(3):
        probs = Decoder(model).forward(sequences, logits_to_keep=1)[:, -1].double().softmax(-1)
        exact = (exact[:, None] * probs).flatten()
        following = torch.arange(TINY).repeat(len(sequences))[:, None]
        sequences = torch.cat((sequences.repeat_interleave(TINY, 0), following), 1)
    return exact.view(TINY, TINY, TINY)


def drawn(model, ids, drafter, gamma, **options):
    """Counts of the three tokens after `ids`, over 100,000 draws."""
    rows = 2_000  # of more, the processor waits for its memory
    found = []
    for seed in range(DRAWS // rows):
        out = generate(
            model,
            ids.expand(rows, -1),
            drafter,
            max_new_tokens=3,
            num_assistant_tokens=gamma,
            temperature=1.0,
            seed=seed,
            **options,
        )
        found.append(out.sequences[:, ids.shape[1] :])
    return counted(torch.cat(found), TINY)


@pytest.mark.parametrize(
    ("q", "points"),
    [
        ([0.2, 0.2, 0.2, 0.2, 0.2], False),
        ([0.01, 0.01, 0.01, 0.01, 0.96], False),
        ([0.0, 0.5, 0.5, 0.0, 0.0], False),
        ([0.0, 0.0, 0.0, 1.0, 0.0], True),
    ],
    ids=["even", "set on one", "some never", "a point mass"],
)
def test_sampled_output_has_the_targets_distribution(five_tokens, q, points):
    model, ids, exact = five_tokens
    counts = drawn(model, ids, RandomDrafts(torch.tensor(q), points), 2)
    assert chi_square_p_value(counts, exact) > 1e-3


def test_an_adversary_that_drafts_what_the_target_hates(five_tokens):
    model, ids, exact = five_tokens
    least = torch.zeros(TINY)
    least[exact.sum((1, 2)).argmin()] = 1.0
    counts = drawn(model, ids, RandomDrafts(least * 0.98 + 0.004), 2)
    assert chi_square_p_value(counts, exact) > 1e-3


def test_what_prompt_lookup_finds_leaves_the_distribution_alone(five_tokens):
    """A prompt that repeats itself, so that each row has something to look up."""
    model = five_tokens[0]
    ids = torch.tensor([[1, 3, 2, 4, 1, 3, 2, 4, 1, 0, 3]])
    counts = drawn(model, ids, PromptLookup(), 2)
    assert chi_square_p_value(counts, exact_distribution(model, ids)) > 1e-3
    stats = generate(
        model, ids.expand(500, -1), PromptLookup(), max_new_tokens=3, num_assistant_tokens=2, temperature=1.0, seed=0
    ).stats
    assert 0 < stats.n_matches < stats.n_tested


def test_temperature_top_k_and_top_p_are_the_targets(five_tokens):
    """Against `Decoder.generate` with the same settings, which has its own tests."""
    model, ids, _ = five_tokens
    rows = ids.expand(20_000, -1)
    options = {"max_new_tokens": 2, "temperature": 0.7, "top_k": 4, "top_p": 0.9}
    wanted = Decoder(model).generate(rows, seed=5, **options).sequences[:, ids.shape[1] :]
    drafter = RandomDrafts(torch.full((TINY,), 1 / TINY))
    got = generate(model, rows, drafter, num_assistant_tokens=2, seed=6, **options).sequences[:, ids.shape[1] :]
    wanted, got = counted(wanted, TINY), counted(got, TINY)
    assert torch.equal(wanted > 0, got > 0)
    # Two samples of one size: their difference has twice the variance of either.
    mean = (wanted + got).double() / 2
    assert chi_square_p_value(mean + (got - mean) / 2**0.5, mean) > 1e-3
    assert int((wanted > 0).sum()) < TINY**2


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_assistant_tokens": -1}, "num_assistant_tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"eos_token_id": VOCAB}, "eos_token_id"),
        ({"seed": "x", "temperature": 1.0}, "seed"),
    ],
)
def test_arguments_out_of_range(model, prompts, options, named):
    drafter = Scripted(scripts(model, prompts), VOCAB)
    with pytest.raises(ValueError, match=named):
        generate(model, prompts, drafter, **({"max_new_tokens": 4, "num_assistant_tokens": 2} | options))


def test_what_is_no_proposer_or_has_a_cache_twice(model, prompts):
    with pytest.raises(ValueError, match="proposer"):
        generate(model, prompts, "eagle", max_new_tokens=4, num_assistant_tokens=2)
    cache = QuantizedCache(model.config, q_group_size=16)
    with pytest.raises(ValueError, match="cache"):
        generate(
            Decoder(model),
            prompts,
            Scripted([[]], VOCAB),
            max_new_tokens=4,
            num_assistant_tokens=2,
            cache=cache,
        )


def test_an_empty_proposal_is_a_plain_step(model, prompts):
    class Silent(Scripted):
        def propose(self, rows, n):
            return Proposal(torch.zeros(len(rows), 0, dtype=torch.int64))

    out = generate(model, prompts, Silent([], VOCAB), max_new_tokens=5, num_assistant_tokens=2)
    assert torch.equal(out.sequences, plain(model, prompts, 5))
