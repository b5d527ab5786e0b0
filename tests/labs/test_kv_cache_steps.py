import pytest
import torch

from labkit.kernels import QuantizedKV, decode_attention
from labkit.labs import _kv_cache_steps
from labkit.labs._kv_cache_result import BITS
from labkit.labs._kv_cache_steps import hold, measure_attention
from tests.labs.kv_cache_fixtures import HEAD_DIM, HEADS, LAYERS, Spy, by_hand, loaded, params

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    return loaded()


@pytest.mark.parametrize("bits", BITS)
def test_the_bytes_are_of_tensors_that_share_no_memory(model, bits):
    held = hold(model.model.config, params(256, 1, bits), torch.bfloat16, CPU, LAYERS)
    assert len(held.pairs) == LAYERS and held.recent_tokens == (64 if bits < 16 else 0)
    storages, longest = {}, 0
    for tensor in (t for pair in held.pairs for x in pair for t in (x.tensors.values() if bits < 16 else [x])):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        longest = max(longest, tensor.shape[2] if tensor.ndim == 4 else 0)
        # In every channel something is stored: nothing was only reserved.
        assert tensor.any() and tensor.is_contiguous()
    assert sum(storages.values()) == held.nbytes == by_hand(256, 1, bits)
    assert longest == (192 if bits < 16 else 256)


@pytest.mark.parametrize("bits", BITS)
def test_attention_reads_the_cache_of_the_setting_each_call_from_other_memory(model, monkeypatch, bits):
    seen = []

    def attend(q, k, v, lengths, **_):
        seen.append((q, k, v, lengths.tolist()))
        return decode_attention(q, k, v, lengths)

    monkeypatch.setattr(_kv_cache_steps, "decode_attention", attend)
    monkeypatch.setattr(_kv_cache_steps, "compare_ops", spy := Spy(12))
    setting = params(256, 1, bits)
    held = hold(model.model.config, setting, torch.bfloat16, CPU, LAYERS)
    cold = 5 * held.layer_bytes - 1
    speed = measure_attention(model.model.config, setting, held, torch.bfloat16, 1e9, cold)
    assert spy.names == [["this"] if bits == 16 else ["this", "full"]]
    assert all(q.shape == (1, HEADS, 1, HEAD_DIM) and q.dtype is torch.bfloat16 for q, *_ in seen)
    assert all(lengths == [256] and k.shape[1] == v.shape[1] == 1 for _, k, v, lengths in seen)
    quantized = [(k, v) for _, k, v, _ in seen if isinstance(k, QuantizedKV)]
    full = [(k, v) for _, k, v, _ in seen if not isinstance(k, QuantizedKV)]
    assert (len(quantized), len(full)) == ((0, 12) if bits == 16 else (12, 12))
    assert all(k.shape == (1, 1, 256, HEAD_DIM) for k, _ in full)
    assert all(k.bits == v.bits == bits and (k.axis, v.axis) == ("channel", "token") for k, v in quantized)
    for pairs, size in ((quantized, speed.read_bytes), (full, speed.full_bytes)):
        laps = min(12, max(1, -(-cold // size))) if pairs else 0
        for which in (0, 1):
            at = [getattr(pair[which], "codes", pair[which]).data_ptr() for pair in pairs]
            assert len(set(at)) == laps and at == (at[:laps] * 12)[: len(at)]
    # On a GPU keys and values are taken to hold the same tokens because one tensor counts them.
    assert all(k.n_quantized is v.n_quantized for k, v in quantized)
    assert speed.read_bytes == by_hand(256, 1, bits) // LAYERS and speed.full_bytes == by_hand(256, 1, 16) // LAYERS


def test_the_copies_of_a_layer_attend_alike(model):
    held = hold(model.model.config, params(256, 2, 4), torch.bfloat16, CPU, 1)
    query, lengths = torch.randn(1, HEADS, 1, HEAD_DIM, dtype=torch.bfloat16), torch.tensor([256], dtype=torch.int32)
    copies = _kv_cache_steps._round(held, 3 * held.layer_bytes)
    outputs = [decode_attention(query, *pair, lengths) for pair in copies]
    assert len(outputs) == 3 and outputs[0].any() and all(torch.equal(out, outputs[0]) for out in outputs)
