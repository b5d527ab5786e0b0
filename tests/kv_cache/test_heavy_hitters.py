"""H2O: the tokens kept and the outputs are those of a whole cache behind a mask; hooks act for one cache and go."""

import copy
import gc
import threading

import pytest
import torch
from transformers import DynamicCache

from labkit.kv_cache.heavy_hitters import HeavyHitterCache
from labkit.models import tiny_model
from tests.kv_cache.evicting_models import check_generate, check_two_calls, family, logits_in_steps, storage_bytes
from tests.kv_cache.masked_reference import by_kv_head, heaviest_alive, masked_step, one_layer


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def n_hooks(model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("budget, recent", [(12, 6), (12, 12), (12, 0), (9, 2)])
@pytest.mark.parametrize("steps", [[1], [4], [30, 1], [30, 5, 1, 9]])
def test_outputs_and_tokens_kept_are_those_of_a_mask_over_the_whole_past(budget, recent, steps):
    model, tokens = one_layer(), torch.randint(0, 256, (1, 48))
    cache, whole = HeavyHitterCache(model, budget=budget, recent=recent), DynamicCache()
    mass, alive = torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool)
    start = turn = 0
    while start < 48:
        step = tokens[:, start : start + steps[min(turn, len(steps) - 1)]]
        q_len, held = step.shape[1], int(alive.sum(1)[0])
        if held + q_len > budget:
            kept = min(held, max(budget - q_len, budget - recent))
            alive = heaviest_alive(mass, alive, kept, min(max(recent - q_len, 0), kept))
        expected, weights = masked_step(model, step, whole, alive)
        found = logits_in_steps(model, step, cache, [q_len])
        assert torch.allclose(found, expected, atol=1e-4)
        mass = torch.cat((mass, torch.zeros(2, q_len)), 1) + by_kv_head(weights)
        alive = torch.cat((alive, torch.ones(2, q_len, dtype=torch.bool)), 1)
        if int(alive.sum(1)[0]) > budget:
            alive = heaviest_alive(mass, alive, budget, recent)
        kept_at = torch.stack([row.nonzero()[:, 0] for row in alive])
        assert torch.equal(cache.positions(0)[0].long(), kept_at)
        start, turn = start + q_len, turn + 1
    assert cache.get_seq_length() == 48
    assert not torch.equal(*cache.positions(0)[0]) or recent == budget, "heads choose for themselves"


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "llama3", "yarn"])
def test_the_queries_watched_are_the_models_own(name):
    """Scores of a prompt add up to the attention that the model itself reports, in every layer and family."""
    model, tokens = family(name), torch.randint(0, 256, (2, 20))
    cache = HeavyHitterCache(model, budget=50)
    logits_in_steps(model, tokens, cache, [20])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(tokens, output_attentions=True).attentions
    for layer, weights in zip(cache.layers, attentions, strict=True):
        expected = weights.reshape(2, 2, 2, 20, 20).sum((2, 3))
        assert torch.allclose(layer.scores, expected, atol=1e-4)


@pytest.mark.parametrize("steps", [[1], [7], [60, 1], [3, 40, 2]])
def test_bytes_are_gone_and_known_beforehand(model, steps):
    cache = HeavyHitterCache(model, budget=16)
    for n in (2, 14, 1, 40):
        logits_in_steps(model, torch.randint(0, 256, (1, n)), cache, steps)
        assert storage_bytes(cache) == cache.nbytes == cache.bytes_at(cache.get_seq_length())
        held = min(16, cache.get_seq_length())
        assert cache.layers[1].keys.shape == cache.layers[1].values.shape == (1, 2, held, 16)
    assert cache.nbytes == 2 * 2 * 16 * (2 * 16 * 4 + 8)


@pytest.mark.parametrize("budget", [34, 500])
def test_a_budget_as_long_as_the_text_is_a_dynamic_cache(model, budget):
    check_generate(model, lambda: HeavyHitterCache(model, budget=budget), DynamicCache)


@pytest.mark.parametrize("budget", [8, 20, 100])
def test_a_second_call_goes_on_from_the_first(model, budget):
    check_two_calls(model, lambda: HeavyHitterCache(model, budget=budget))


def test_hooks_act_for_their_own_cache_and_go_with_it(model):
    tokens, before = torch.randint(0, 256, (1, 30)), n_hooks(model)
    plain = logits_in_steps(model, tokens, DynamicCache(), [10])
    first, second = (HeavyHitterCache(model, budget=12) for _ in range(2))
    assert torch.equal(logits_in_steps(model, tokens, DynamicCache(), [10]), plain)
    assert first.get_seq_length() == second.get_seq_length() == 0
    logits_in_steps(model, tokens, first, [10])
    assert (first.get_seq_length(), second.get_seq_length()) == (30, 0)
    assert n_hooks(model) == before + 2 * 3 * 2
    del first
    gc.collect()
    assert n_hooks(model) == before + 3 * 2
    expected = logits_in_steps(model, tokens, second, [10])
    again = HeavyHitterCache(model, budget=12)
    assert torch.equal(logits_in_steps(model, tokens, again, [10]), expected)
    del second, again
    gc.collect()
    assert n_hooks(model) == before


def test_a_cache_does_not_keep_its_model_alive():
    import weakref

    model = tiny_model()
    cache, gone = HeavyHitterCache(model, budget=8), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    with pytest.raises(ValueError, match="model is gone"):
        copy.deepcopy(cache)


def test_a_deep_copy_goes_on_by_itself(model):
    tokens, more = torch.randint(0, 256, (1, 30)), torch.randint(0, 256, (1, 9))
    cache = HeavyHitterCache(model, budget=12)
    logits_in_steps(model, tokens, cache, [30])
    copied = copy.deepcopy(cache)
    found = logits_in_steps(model, more, copied, [1])
    assert (cache.get_seq_length(), copied.get_seq_length()) == (30, 39)
    assert torch.equal(logits_in_steps(model, more, cache, [1]), found)


def test_another_model_is_refused(model):
    other, tokens = tiny_model(), torch.randint(0, 256, (1, 5))
    cache = HeavyHitterCache(model, budget=8)
    for wrong in (other, copy.deepcopy(model)):
        with pytest.raises(ValueError, match="past_key_values: got 'a HeavyHitterLayer in another model'"):
            wrong(tokens, past_key_values=cache)
    assert cache.get_seq_length() == 0
    logits_in_steps(model, tokens, cache, [5])
    with pytest.raises(ValueError, match="in another model"):
        other(tokens, past_key_values=cache)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_is_refused_and_nothing_is_changed(attention):
    model = tiny_model(attn_implementation=attention)
    tokens, mask = torch.randint(0, 256, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[1, :3] = 0
    cache = HeavyHitterCache(model, budget=8)
    with pytest.raises(ValueError, match="attention_mask: got 'a mask with padding"):
        model.generate(tokens, attention_mask=mask, past_key_values=cache, max_new_tokens=3)
    assert cache.get_seq_length() == 0
    out = model.generate(
        tokens, attention_mask=torch.ones_like(mask), past_key_values=cache, max_new_tokens=3, do_sample=False
    )
    alone = model.generate(
        tokens[1:], past_key_values=HeavyHitterCache(model, budget=8), max_new_tokens=3, do_sample=False
    )
    assert torch.equal(out[1:], alone)
    tree = torch.eye(4, 12, dtype=torch.bool)[None, None]
    with pytest.raises(ValueError, match="attention_mask"):
        model(tokens[:1, :4], attention_mask=tree, past_key_values=HeavyHitterCache(model, budget=8))


def test_rows_change_places_with_their_scores(model):
    tokens, more, order = torch.randint(0, 256, (3, 30)), torch.randint(0, 256, (3, 6)), torch.tensor([1, 2, 2])
    cache, other = (HeavyHitterCache(model, budget=10) for _ in range(2))
    logits_in_steps(model, tokens, cache, [20, 1])
    logits_in_steps(model, tokens[order], other, [20, 1])
    cache.reorder_cache(order)
    assert torch.allclose(*(logits_in_steps(model, more, c, [1]) for c in (cache, other)), atol=1e-4)
    assert torch.equal(cache.positions(1), other.positions(1))
    beams = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False}
    found = model.generate(tokens[:1], past_key_values=HeavyHitterCache(model, budget=60), **beams)
    assert torch.equal(found, model.generate(tokens[:1], past_key_values=DynamicCache(), **beams))


def test_threads_that_share_a_model_do_not_see_each_others_queries(model):
    """Another cache's step runs whole while this one's stands in the middle of an attention."""
    tokens, others = torch.randint(0, 256, (1, 20)), torch.randint(0, 256, (1, 30))
    expected = HeavyHitterCache(model, budget=9)
    logits_in_steps(model, tokens, expected, [20])
    cache, other = (HeavyHitterCache(model, budget=9) for _ in range(2))
    begun, go_on, main = threading.Event(), threading.Event(), threading.get_ident()

    def wait(*_: object) -> None:
        if threading.get_ident() != main:
            begun.set()
            go_on.wait(10)

    # Queries are there, keys are not yet in the cache.
    handle = model.model.layers[1].self_attn.v_proj.register_forward_hook(wait)
    thread = threading.Thread(target=logits_in_steps, args=(model, tokens, cache, [20]))
    thread.start()
    try:
        assert begun.wait(10)
        logits_in_steps(model, others, other, [30])
    finally:
        go_on.set()
        thread.join()
        handle.remove()
    assert cache.held == 9
    for layer, alone in zip(cache.layers, expected.layers, strict=True):
        assert torch.equal(layer.positions, alone.positions) and torch.equal(layer.scores, alone.scores)


def test_a_call_that_failed_is_not_taken_up_by_the_next(model):
    tokens, cache = torch.randint(0, 256, (1, 20)), HeavyHitterCache(model, budget=9)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[0].self_attn.v_proj.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        logits_in_steps(model, tokens, cache, [20])
    handle.remove()
    logits_in_steps(model, tokens, DynamicCache(), [20])
    assert cache.held == 0
    with pytest.raises(ValueError, match="in another model"):
        logits_in_steps(tiny_model(), tokens, cache, [20])


def test_a_reset_cache_is_a_new_one(model):
    tokens = torch.randint(0, 256, (1, 30))
    cache = HeavyHitterCache(model, budget=9)
    first = logits_in_steps(model, tokens, cache, [4])
    cache.reset()
    assert (cache.get_seq_length(), cache.held, cache.nbytes) == (0, 0, 0)
    assert torch.equal(logits_in_steps(model, tokens, cache, [4]), first)


def test_what_it_cannot_do_is_refused(model):
    from transformers import GPT2Config, GPT2LMHeadModel

    cache = HeavyHitterCache(model, budget=8)
    assert not cache.is_croppable and not cache.is_compileable
    with pytest.raises(ValueError, match="tokens that were evicted cannot come back"):
        cache.crop(-1)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16))
    with pytest.raises(ValueError, match="config: got 'gpt2'"):
        HeavyHitterCache(gpt2, budget=8)
    changed = tiny_model()
    del changed.model.layers[0].self_attn.q_proj
    with pytest.raises(ValueError, match=r"model: got .* at layers \[1\]"):
        HeavyHitterCache(changed, budget=8)
    compiled = tiny_model()
    compiled.compile()
    for wrong in (compiled, torch.nn.Linear(2, 2)):
        with pytest.raises(ValueError, match="^model: got"):
            HeavyHitterCache(wrong, budget=8)
    for change in ({"budget": 0}, {"recent": 9}, {"recent": -1}):
        with pytest.raises(ValueError, match=f"^{next(iter(change))}: got"):
            HeavyHitterCache(model, **{"budget": 8} | change)
