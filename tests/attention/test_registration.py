"""`attn_implementation="labkit_flash"` computes what eager does, in every mode of a model, or says that it does not."""

import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForSeq2SeqLM, DynamicCache, StaticCache, modeling_utils

from labkit.attention import register
from labkit.attention.registration import flash_attention_forward
from labkit.kv_cache import HeavyHitterCache, PagedKVCache, PagedQuantizedCache, QuantizedCache, SinkCache, SnapKVCache
from labkit.models import load_model
from tests.attention.families import BART, DECODERS, PEGASUS_X, encoders, padded, pair, tokens

FAMILIES = pytest.mark.parametrize("name", DECODERS)
PADDINGS = pytest.mark.parametrize("padding", ["left", "right", "holes"])


def close(a: torch.Tensor, b: torch.Tensor, factor: float = 1.0) -> None:
    """Within the rounding of float32 sums, of numbers whose size is b's."""
    assert a.isfinite().all()
    assert (a - b).abs().max() <= factor * 2e-5 * max(1.0, b.abs().max().item())


@pytest.fixture(scope="module")
def llama():
    return pair(DECODERS["llama"])


# Registering


def test_nothing_is_registered_by_an_import_and_registering_twice_changes_nothing():
    program = """
import labkit.attention, transformers
from transformers import modeling_utils, AttentionInterface, AttentionMaskInterface
before = modeling_utils.lazy_import_flash_attention
assert "labkit_flash" not in AttentionInterface() and "labkit_flash" not in AttentionMaskInterface()
assert labkit.attention.register() is None
def now():
    interfaces = AttentionInterface(), AttentionMaskInterface()
    return *(i["labkit_flash"] for i in interfaces), modeling_utils.lazy_import_flash_attention
once = now()
labkit.attention.register()
assert now() == once and once[2].__wrapped__ is before
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_another_flash_attention_is_still_looked_for(llama):
    flash, eager = llama
    # Back and forth, so that what transformers remembers of the last one does not matter.
    for name in ("my_own_flash", "another_flash"):
        with pytest.raises((ValueError, ImportError), match="flash"):
            flash.set_attn_implementation(name)
        with pytest.raises(ValueError, match=name):
            modeling_utils.lazy_import_flash_attention(name)
        assert flash.config._attn_implementation == "labkit_flash"
        flash.set_attn_implementation("sdpa")
        flash.set_attn_implementation("labkit_flash")
    close(flash(tokens(1, 9)).logits, eager(tokens(1, 9)).logits)


def test_load_model_takes_it():
    register()
    model = load_model("smollm2-135m", dtype=torch.float32, device="cpu", attn_implementation="labkit_flash").model
    assert model.config._attn_implementation == "labkit_flash"
    ids = tokens(1, 7)
    with torch.no_grad():
        ours = model(ids).logits
        model.set_attn_implementation("eager")
        close(ours, model(ids).logits, 4)


# Logits


@FAMILIES
def test_logits_are_eagers(name):
    flash, eager = pair(DECODERS[name])
    ids = tokens(3, 33)
    with torch.no_grad():
        close(flash(ids).logits, eager(ids).logits)
        moved = flash(ids[:, [*range(31, -1, -1), 32]]).logits[:, -1]
        assert (moved - eager(ids).logits[:, -1]).abs().max() > 0.05  # attention is far from uniform


@PADDINGS
@FAMILIES
def test_logits_of_padded_batches_are_eagers(name, padding):
    flash, eager = pair(DECODERS[name])
    mask, ids = padded(padding), tokens(4, 21)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        ours, theirs = (m(ids, attention_mask=mask, position_ids=positions).logits for m in (flash, eager))
        unmasked = flash(ids, position_ids=positions, attention_mask=torch.ones_like(mask)).logits
    assert ours.isfinite().all()
    close(ours[mask.bool()], theirs[mask.bool()])
    if padding != "right":  # which causal attention does not see in any case
        assert (unmasked - theirs)[mask.bool()].abs().max() > 0.05


def test_a_row_of_padding_alone_gives_finite_logits_and_gradients(llama):
    flash, _ = llama
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[1] = 0
    logits = flash(tokens(3, 12), attention_mask=mask).logits
    logits.square().sum().backward()
    assert logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in flash.parameters() if p.grad is not None)
    close(logits[[0, 2]], flash(tokens(3, 12)[[0, 2]]).logits)
    flash.zero_grad()


def test_a_query_that_sees_nothing_gives_zeros():
    q, kv = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    mask = torch.tensor([[True] * 5, [False] * 5])
    out, weights = flash_attention_forward(torch.nn.Module(), q, kv, kv, mask)
    assert weights is None and out.shape == (2, 5, 4, 8)
    assert out[1].eq(0).all() and out[0].ne(0).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_errs_no_more_than_eager_does(dtype):
    flash, eager = pair(DECODERS["llama"])
    mask, ids = padded("left"), tokens(4, 21)
    seen = mask.bool()
    with torch.no_grad():
        # Not eager's own: in float64 its mask becomes -inf in a float32 softmax, and rows of padding NaN.
        eager.set_attn_implementation("sdpa")
        exact = eager.double()(ids, attention_mask=mask).logits[seen]
        eager.set_attn_implementation("eager")
        ours = flash.to(dtype)(ids, attention_mask=mask).logits.double()[seen]
        theirs = eager.to(dtype)(ids, attention_mask=mask).logits.double()[seen]
    assert (ours - exact).norm() <= 2 * (theirs - exact).norm()


@pytest.mark.parametrize("padding", [None, "left", "right", "holes"])
def test_an_encoder_sees_both_ways(padding):
    flash, eager = encoders()
    mask = None if padding is None else padded(padding)
    ids = tokens(4, 21)
    with torch.no_grad():
        ours, theirs = (m(ids, attention_mask=mask).last_hidden_state for m in (flash, eager))
    seen = torch.ones(4, 21, dtype=torch.bool) if mask is None else mask.bool()
    close(ours[seen], theirs[seen])
    with torch.no_grad():
        changed = ids.clone()
        changed[:, 20] = (ids[:, 20] + 1) % 97
        first = flash(changed, attention_mask=None).last_hidden_state[:, 0] - flash(ids).last_hidden_state[:, 0]
    assert first.abs().max() > 1e-3


def test_a_causal_mask_is_causal_whatever_the_module_says():
    flash, eager = pair(PEGASUS_X, auto=AutoModelForSeq2SeqLM)
    ids, changed = tokens(2, 9), tokens(2, 9)
    changed[:, -1] = (changed[:, -1] + 5) % 90 + 3
    with torch.no_grad():
        ours, theirs = (model(input_ids=ids, decoder_input_ids=ids).logits for model in (flash, eager))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        later = flash(input_ids=ids, decoder_input_ids=changed).logits
    torch.testing.assert_close(ours[:, :-1], later[:, :-1])


@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_encoder_and_decoder_with_cross_attention(padding):
    flash, eager = pair(BART, auto=AutoModelForSeq2SeqLM)
    mask = None if padding is None else padded(padding)
    asked = {"input_ids": tokens(4, 21), "attention_mask": mask, "decoder_input_ids": tokens(4, 6, seed=5)}
    with torch.no_grad():
        close(flash(**asked).logits, eager(**asked).logits)
        written = [
            m.generate(tokens(4, 21), attention_mask=mask, max_new_tokens=7, do_sample=False, num_beams=2)
            for m in (flash, eager)
        ]
    assert torch.equal(*written)


def test_a_decoder_made_bidirectional_by_its_config():
    flash, eager = pair(DECODERS["llama"], is_causal=False)
    for mask in (None, padded("left")):
        seen = torch.ones(4, 21, dtype=torch.bool) if mask is None else mask.bool()
        with torch.no_grad():
            ours, theirs = (m(tokens(4, 21), attention_mask=mask).logits for m in (flash, eager))
        close(ours[seen], theirs[seen])


# Decoding


def generate(model, ids, mask=None, new: int = 16, **options):
    mask = torch.ones_like(ids) if mask is None else mask
    asked = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(ids, attention_mask=mask, **asked)


@pytest.mark.parametrize("padding", [None, "left"])
@FAMILIES
def test_greedy_tokens_are_eagers(name, padding):
    flash, eager = pair(DECODERS[name])
    mask = None if padding is None else padded(padding)
    ours, theirs = (generate(m, tokens(4, 21), mask) for m in (flash, eager))
    assert torch.equal(ours, theirs)
    assert len(set(ours[0, 21:].tolist())) > 3  # not one token over and over


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "wide window"])
def test_greedy_tokens_on_a_static_cache(name, padding):
    flash, eager = pair(DECODERS[name])
    mask = None if padding is None else padded(padding)
    ours = generate(flash, tokens(4, 21), mask, cache_implementation="static")
    assert torch.equal(ours, generate(eager, tokens(4, 21), mask))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "wide window"])
def test_a_prompt_in_chunks(name, padding, kind):
    flash, eager = pair(DECODERS[name])
    ids = tokens(4, 21)
    mask = None if padding is None else padded(padding)
    positions = torch.arange(21).expand(4, -1) if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=flash.config)
    if kind == "static":
        cache = StaticCache(config=flash.config, max_cache_len=40)
    found = []
    with torch.no_grad():
        expected = eager(ids, attention_mask=mask, position_ids=positions).logits
        for start, stop in ((0, 7), (7, 15), (15, 16), (16, 18), (18, 21)):
            part = None if mask is None else mask[:, :stop]
            asked = {"attention_mask": part, "position_ids": positions[:, start:stop], "past_key_values": cache}
            found.append(flash(ids[:, start:stop], **asked).logits)
    seen = torch.ones(4, 21, dtype=torch.bool) if mask is None else mask.bool()
    close(torch.cat(found, 1)[seen], expected[seen])


def test_assisted_decoding():
    flash, eager = pair(DECODERS["llama"])
    helper, _ = pair(DECODERS["llama"], num_hidden_layers=1)
    ours = generate(flash, tokens(1, 21), assistant_model=helper)
    assert torch.equal(ours, generate(eager, tokens(1, 21)))
    ours = generate(flash, tokens(1, 21), prompt_lookup_num_tokens=3)
    assert torch.equal(ours, generate(eager, tokens(1, 21)))


def caches(model) -> dict[str, object]:
    """This course's own caches: how to make each."""
    config, blocks = model.config, {"num_blocks": 64, "dtype": torch.float32, "device": "cpu"}
    return {
        "paged": lambda: PagedKVCache(config, block_size=4, **blocks),
        "quantized": lambda: QuantizedCache(config, nbits=4, q_group_size=8, residual_length=4),
        "paged quantized": lambda: PagedQuantizedCache(config, nbits=8, residual_length=16, block_size=16, **blocks),
        "sinks": lambda: SinkCache(config, window_length=14, num_sink_tokens=2),
        "heavy hitters": lambda: HeavyHitterCache(model, budget=12),
        "snapkv": lambda: SnapKVCache(model, budget=12, window=4),
    }


@pytest.mark.parametrize("name", ["paged", "quantized", "paged quantized", "sinks", "heavy hitters", "snapkv"])
def test_the_courses_own_caches(name):
    """Prompt, a step, two steps at once: logits of eager over the same kind of cache."""
    both = pair(("llama", DECODERS["llama"][1] | {"head_dim": 32}))
    ids, made = tokens(1, 27), [caches(m)[name]() for m in both]
    with torch.no_grad():
        for start, stop in ((0, 21), (21, 22), (22, 23), (23, 25), (25, 26)):
            ours, theirs = (
                m(ids[:, start:stop], past_key_values=c, use_cache=True).logits for m, c in zip(both, made, strict=True)
            )
            close(ours, theirs, 4)
    if name == "paged":  # groups of codes hold paddings too, whose keys and values are anything
        written = [generate(m, tokens(4, 21), padded("left"), past_key_values=caches(m)[name]()) for m in both]
        assert torch.equal(*written)


# Training


def gradients(model, ids, mask) -> dict[str, torch.Tensor]:
    model.zero_grad()
    labels = ids
    if mask is not None:  # what stands at a padding is anything, also as what the next token is guessed from
        known = mask.bool()
        known[:, 1:] &= mask[:, :-1].bool()
        labels = ids.masked_fill(~known, -100)
    model(ids, attention_mask=mask, labels=labels).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("padding", [None, "right", "left", "holes"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_gradients_are_eagers(name, padding):
    flash, eager = pair(DECODERS[name])
    mask, ids = None if padding is None else padded(padding), tokens(4, 21)
    ours, theirs = (gradients(m.train(), ids, mask) for m in (flash, eager))
    assert ours.keys() == theirs.keys() and len(ours) > 10
    for parameter, expected in theirs.items():
        assert (ours[parameter] - expected).norm() <= 1e-4 * expected.norm() + 1e-7, parameter


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(reentrant):
    flash, _ = pair(DECODERS["llama"])
    ids, mask = tokens(4, 21), padded("left")
    plain = gradients(flash.train(), ids, mask)
    flash.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    calls = []
    handle = flash.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    again = gradients(flash, ids, mask)
    handle.remove()
    assert len(calls) == 2  # the forward ran again in the backward pass
    for name, expected in plain.items():
        torch.testing.assert_close(again[name], expected, rtol=1e-5, atol=1e-7)


def test_an_optimizer_learns_with_it():
    flash, _ = pair(DECODERS["qwen2"])
    optimizer = torch.optim.AdamW(flash.train().parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = flash(tokens(2, 17), labels=tokens(2, 17)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


# Memory


class Largest(TorchDispatchMode):
    """The most elements that an operation's result has."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor):
                self.most = max(self.most, x.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("padding", [False, True])
def test_no_tensor_grows_with_the_square_of_the_length(padding):
    flash, eager = pair(DECODERS["llama"], max_position_embeddings=4096)

    def largest(model, length: int) -> int:
        mask = torch.ones(1, length, dtype=torch.long)
        mask[0, : 5 * padding] = 0
        with torch.no_grad(), Largest() as seen:
            model(tokens(1, length), attention_mask=mask, logits_to_keep=1)
        return seen.most

    ours = {length: largest(flash, length) for length in (1024, 2048, 4096)}
    assert ours[2048] < 2.2 * ours[1024] and ours[4096] < 2.2 * ours[2048]
    assert ours[2048] < 2048 * 2048  # not even as one byte each
    assert largest(eager, 2048) >= 4 * 2048 * 2048


# Which kernel


def test_steps_over_a_cache_go_to_decode_attention(monkeypatch):
    """Few queries, shared heads, no padding, no gradient; K and V as the cache gave them, not repeated."""
    from labkit.attention import registration

    seen = []
    original = registration.decode_attention

    def watched(q, k, v, lengths, **options):
        seen.append((tuple(q.shape), tuple(k.shape), lengths.tolist()))
        return original(q, k, v, lengths, **options)

    monkeypatch.setattr(registration, "decode_attention", watched)
    flash, _ = pair(DECODERS["llama"])
    ids = tokens(2, 30)

    def run(start: int, stop: int, cache, mask=None, grad: bool = False) -> int:
        seen.clear()
        with torch.set_grad_enabled(grad):
            flash(ids[:, start:stop], past_key_values=cache, attention_mask=mask)
        return len(seen)

    cache = DynamicCache(config=flash.config)
    assert run(0, 12, cache) == 0  # a prompt
    assert run(12, 13, cache) == 2 and seen[0] == ((2, 6, 1, 8), (2, 2, 13, 8), [13, 13])
    assert run(13, 16, cache) == 2 and seen[0] == ((2, 6, 3, 8), (2, 2, 16, 8), [16, 16])
    assert run(16, 28, cache) == 0  # 12 queries of 3 heads: FlashAttention's tile
    left = torch.ones(2, 29, dtype=torch.long)
    left[1, :4] = 0
    assert run(28, 29, cache, left) == 0
    assert run(29, 30, cache, grad=True) == 0
    gpt2, _ = pair(DECODERS["gpt2"])
    cache = DynamicCache(config=gpt2.config)
    flash = gpt2
    assert run(0, 12, cache) == run(12, 13, cache) == 0  # on a CPU heads that are not shared gain nothing


def test_a_mask_is_looked_at_once_a_forward(monkeypatch):
    flash, _ = pair(DECODERS["llama"])
    looked = []
    original = torch.Tensor.__bool__
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda self: looked.append(1) or original(self))
    with torch.no_grad():
        flash.model(tokens(2, 9), attention_mask=torch.ones(2, 9, dtype=torch.long))
    assert len(looked) <= 1


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("q_len", [1, 3, 12])
def test_either_kernel_takes_the_models_scale_and_direction(q_len, causal):
    """As cross-attention calls it, and a model that scales its scores otherwise."""
    q, k, v = torch.randn(2, 6, q_len, 8), torch.randn(2, 2, 12, 8), torch.randn(2, 2, 12, 8)
    place = torch.arange(q_len)[:, None] + 12 - q_len
    sees = torch.arange(12) <= place if causal else torch.ones(q_len, 12, dtype=torch.bool)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, sees, scale=0.9, enable_gqa=True)
    out, _ = flash_attention_forward(torch.nn.Module(), q, k, v, None, scaling=0.9, is_causal=causal)
    torch.testing.assert_close(out.transpose(1, 2), exact)
