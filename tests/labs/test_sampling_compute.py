import pytest
import torch

from labkit.engine.decode import Decoder
from labkit.labs._result import Progress
from labkit.labs._sampling_result import DRAFTED, SamplingResult
from labkit.labs._speculative_models import Targets
from labkit.speculative.decode import generate
from labkit.speculative.prompts import prompt_ids
from tests.labs.sampling_fixtures import NEW, PROMPTS, Even, computed, distributions, params, run
from tests.labs.speculative_fixtures import CPU, Scripted, continuation, loaded


@pytest.fixture(scope="module")
def model():
    return loaded()


@pytest.fixture(scope="module")
def compute(model):
    """One for all tests that need nothing else: what it keeps is the prompt's logits and a thread count."""
    return computed(model)


@pytest.fixture(scope="module")
def greedy(compute):
    return run(compute, 0.0)[-1]


def test_temperature_0_is_greedy_decoding(model, greedy):
    ids = prompt_ids(model.tokenizer, PROMPTS[0])
    plain = Decoder(model).generate(ids, max_new_tokens=NEW).sequences[0, ids.shape[1] :].tolist()
    assert [list(text.tokens) for text in greedy.texts] == [plain] * 3
    assert "".join(greedy.texts[0].pieces) == model.tokenizer.decode(plain)
    assert greedy.next_token.kept == 1 and greedy.next_token.bits == 0.0
    assert (greedy.different_texts, greedy.likeliest_share, greedy.alike) == (1, 1.0, NEW)
    assert greedy.distinct_share == len(set(plain)) / (3 * NEW)


@pytest.mark.parametrize("temperature", [0.4, 2.0])
def test_top_k_1_is_temperature_0_at_any_temperature(compute, greedy, temperature):
    one = run(compute, temperature, 1)[-1]
    assert [text.tokens for text in one.texts] == [text.tokens for text in greedy.texts]
    assert one.next_token.kept == 1 and one.next_token.bits == 0.0 and one.likeliest_share == 1.0
    assert one.alpha == greedy.alpha and 0 < one.alpha < 1, "the draft is sampled in the same way"
    assert one.next_token.cut_by_top_k == pytest.approx(1 - one.next_token.likeliest[0].uncut)


def test_of_one_token_it_is_certain_whether_it_is_accepted(greedy):
    assert set(greedy.texts[0].chances) == {0.0, 1.0} and greedy.expected_alpha == greedy.alpha


@pytest.mark.parametrize("setting", [{"temperature": 1.0}, {"temperature": 1.4, "top_k": 20, "top_p": 0.7}])
def test_the_texts_are_those_of_generate(model, compute, setting):
    last = run(compute, **setting, seed=4)[-1]
    targets = Targets(model, CPU)
    proposer = computed(model)._proposer(params(**setting))
    for text in last.texts:
        ids = prompt_ids(model.tokenizer, PROMPTS[0])
        out = generate(
            targets.decoder("float32"),
            ids,
            proposer,
            max_new_tokens=NEW,
            num_assistant_tokens=DRAFTED,
            seed=text.seed,
            **setting,
        )
        assert list(text.tokens) == out.sequences[0, ids.shape[1] :].tolist() and text.stats == out.stats
    assert [text.seed for text in last.texts] == [4, 5, 6] and last.different_texts == 3


def test_a_seed_repeats_its_text_and_another_draws_another(compute):
    first, again, next_ = (run(compute, seed=seed)[-1] for seed in (0, 0, 1))
    assert first.texts == again.texts and first.texts[1:] == next_.texts[:2]
    assert len({text.tokens for text in first.texts + next_.texts}) == 4


def test_the_prompt_is_the_one_asked_for(model, compute):
    last = run(compute, 0.0, prompt=1)[-1]
    ids = prompt_ids(model.tokenizer, "xyz")
    assert last.prompt_text == "xyz" and last.prompt_tokens == 3
    p = distributions(model.model, ids[0].tolist(), 1.0)[-1]
    best = last.next_token.likeliest
    assert [one.text for one in best] == [model.tokenizer.decode([i]) for i in p.topk(12).indices.tolist()]
    assert [one.own for one in best] == pytest.approx(p.topk(12).values.tolist(), rel=1e-4)


def test_a_token_that_is_not_the_likeliest_is_told_from_one_that_is(model, compute):
    last = run(compute, 0.5)[-1]
    prompt = prompt_ids(model.tokenizer, PROMPTS[0])[0].tolist()
    for text in last.texts:
        best = distributions(model.model, prompt + list(text.tokens), 1.0).argmax(-1)[len(prompt) - 1 : -1]
        assert list(text.likeliest) == [a == b for a, b in zip(text.tokens, best.tolist(), strict=True)]
    assert 0 < last.likeliest_share < 1
    assert last.likeliest_share == sum(sum(text.likeliest) for text in last.texts) / (3 * NEW)


def test_the_chance_of_a_drafted_token_is_the_overlap_of_p_and_q(model):
    """Against p from `transformers` and a q that is the same everywhere."""
    proposer, temperature = Even(), 0.7
    last = run(computed(model, proposer), temperature)[-1]
    prompt = prompt_ids(model.tokenizer, PROMPTS[0])[0].tolist()
    for text, drafts in zip(last.texts, proposer.rows, strict=True):
        whole = prompt + list(text.tokens)
        p = distributions(model.model, whole, temperature)
        overlap = torch.minimum(p, torch.full_like(p, 1 / p.shape[-1])).sum(-1).tolist()
        ends = [length for length, _ in drafts[1:]] + [len(whole)]
        places = [
            length - 1 + i for (length, n), end in zip(drafts, ends, strict=True) for i in range(min(n, end - length))
        ]
        # Where the last call had no room for a draft, the one before it ends a token earlier.
        places = places[: text.stats.n_tested]
        assert list(text.chances) == pytest.approx([overlap[place] for place in places], rel=1e-4)
    assert len(last.texts[0].chances) == last.texts[0].stats.n_tested > 5


def test_what_was_drafted_without_chance_is_accepted_with_p_of_it(model):
    truth = continuation(model)
    sure = run(computed(model, Scripted(truth)), 0.0)[-1]
    assert sure.alpha == sure.expected_alpha == 1.0 and sure.stats.tokens_per_target_call == DRAFTED + 1
    wrong = run(computed(model, Scripted(truth, wrong_at=1)), 0.0)[-1]
    assert 0 < wrong.alpha == wrong.expected_alpha < 1
    drawn = run(computed(model, Scripted(truth)), 1.0)[-1]
    prompt, said = truth
    p = distributions(model.model, prompt + said, 1.0)
    # The first draft: up to where a text leaves the truth, p is known.
    for text in drawn.texts:
        if text.tokens[0] == said[0]:
            assert text.chances[0] == pytest.approx(float(p[len(prompt), said[1]]), rel=1e-4)
    assert all(0 < chance < 1 for text in drawn.texts for chance in text.chances)


def test_as_many_are_accepted_as_p_and_q_say(model):
    last = run(computed(model), 1.0, max_new_tokens=60)[-1]
    assert last.stats.n_tested > 60 and abs(last.alpha - last.expected_alpha) < 4 * last.alpha_error
    assert last.alpha == last.stats.n_matches / last.stats.n_tested


def test_the_next_token_is_first_then_text_after_text_and_each_result_is_fuller(compute):
    steps = list(compute(params(), lambda: False))
    results = [step for step in steps if isinstance(step, SamplingResult)]
    shown = [(len(r.texts), sum(len(text.tokens) for text in r.texts)) for r in results]
    assert shown[0] == (0, 0) and shown == sorted(shown) and shown[-1] == (3, 3 * NEW)
    assert {r.next_token for r in results} == {results[-1].next_token}
    unfinished = [r for r in results if not r.whole]
    assert {r.alpha for r in unfinished} == {r.different_texts for r in unfinished} == {None}
    fractions = [step.fraction for step in steps if isinstance(step, Progress)]
    assert fractions == sorted(fractions) and fractions[-1] < 1


@pytest.mark.parametrize("after", [0, 1, 2, 3, 6, 12, 20, 26])
def test_a_cancelled_setting_draws_no_more(model, after, monkeypatch):
    looked, late, decoded = [], [], Decoder.forward

    def forward(decoder, *args, **options):
        late.append(len(looked) > after)
        return decoded(decoder, *args, **options)

    def cancelled() -> bool:
        looked.append(None)
        return len(looked) > after

    proposer = Even()
    monkeypatch.setattr(Decoder, "forward", forward)
    steps = list(computed(model, proposer)(params(), cancelled))
    assert sum(late) <= 2 and not any(isinstance(s, SamplingResult) and s.whole for s in steps)


def test_an_end_of_text_ends_a_text():
    model = loaded()
    prompt, said = continuation(model)
    model.tokenizer.eos_token_id = said[4]
    last = run(computed(model), 0.0)[-1]
    assert last.whole and list(last.texts[0].tokens) == said[: said.index(said[4]) + 1]


def test_an_error_is_raised_and_the_thread_count_stays(model):
    proposer = Scripted(continuation(model))
    proposer.on_ask = lambda: 1 / 0
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError):
        run(computed(model, proposer))
    assert torch.get_num_threads() == before


def test_a_draft_that_cannot_be_had_names_those_that_can(model):
    compute = computed(model)
    with pytest.raises(ValueError, match="^(proposer|target|model|hidden_size)"):
        run(compute, proposer="EAGLE head")
    assert run(compute, proposer="prompt lookup")[-1].whole
