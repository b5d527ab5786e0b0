"""From codes to a packed weight, and the bytes of a model: counted, and gone from the process."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from labkit.models import LoadedModel, tiny_model
from labkit.quantization import PackedWeight, RTNConfig, quantize_, quantize_embedding_, weight_bytes
from labkit.quantization.packing import pack_weight
from labkit.quantization.primitives import minmax_grid
from labkit.quantization.rtn import round_to_nearest

# hidden 64, inner 128, 2 layers, 4 heads of 16 on 2 KV heads, 256 ids: (rows, columns) of a layer's seven matrices.
MATRICES = ((64, 64), (32, 64), (32, 64), (64, 64), (128, 64), (128, 64), (64, 128))
LAYERS, VOCABULARY, HIDDEN = 2, 256, 64
NORMS = 4 * HIDDEN * (2 * LAYERS + 1)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("group", [16, 48, -1])
def test_rounding_to_nearest_by_hand(bits: int, sym: bool, group: int) -> None:
    weight = torch.randn(6, 96) + 0.2
    packed = round_to_nearest(weight, RTNConfig(bits, group, sym))
    size, top = 96 if group == -1 else group, 2**bits - 1
    for n in range(6):
        for g in range(96 // size):
            mine = [float(value) for value in weight[n, g * size : (g + 1) * size]]
            low, high = min(*mine, 0.0), max(*mine, 0.0)
            low, high = (-max(-low, high), max(-low, high)) if sym else (low, high)
            scale = float(packed.scales[n, g])
            assert (high - low) / top * (1 - 1e-6) <= scale <= (high - low) / top * (1 + 2**-7)
            zero = 2 ** (bits - 1) if sym else round(-low / scale)
            assert sym == (packed.zeros is None) and (sym or int(packed.zeros[n, g]) == zero)
            wanted = [min(max(round(value / scale) + zero, 0), top) for value in mine]
            assert packed.codes()[n, g * size : (g + 1) * size].tolist() == wanted


def test_pack_weight_keeps_codes_grid_and_order() -> None:
    weight = torch.randn(4, 2, 16)
    grid = minmax_grid(weight, 3, sym=False)
    codes = grid.encode(weight)
    g_idx = torch.randperm(32) // 16
    packed = pack_weight(codes.flatten(1), grid, sym=False, g_idx=g_idx)
    assert isinstance(packed, PackedWeight) and packed.group_size == 16 and packed.in_features == 32
    assert torch.equal(packed.codes().float(), codes.flatten(1)) and packed.g_idx.dtype == torch.int32
    assert torch.equal(packed.scales.float(), grid.scales) and torch.equal(packed.zeros.float(), grid.zeros)
    plain = pack_weight(codes.flatten(1), grid, sym=False)
    assert torch.equal(plain.dequantize(), grid.decode(codes).flatten(1))


def stored(bits: int, group: int, sym: bool, rows: int, columns: int) -> int:
    """Words, bfloat16 scales and one byte a zero point."""
    groups = rows * (1 if group == -1 else columns // group)
    return 4 * rows * -(-columns * bits // 32) + 2 * groups + (0 if sym else groups)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("group", [16, 32, -1])
@pytest.mark.parametrize("tied", [True, False])
def test_weight_bytes_written_out(bits: int, sym: bool, group: int, tied: bool) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    table = 4 * VOCABULARY * HIDDEN
    tables = table if tied else 2 * table
    assert weight_bytes(model) == tables + NORMS + LAYERS * sum(4 * n * k for n, k in MATRICES)
    quantize_(model, RTNConfig(bits, group, sym), progress=False)
    packed = LAYERS * sum(stored(bits, group, sym, n, k) for n, k in MATRICES)
    assert weight_bytes(model) == tables + NORMS + packed == weight_bytes(LoadedModel(model, None, "tiny"))
    assert model.get_memory_footprint() - weight_bytes(model) == sum(
        buffer.nbytes for name, buffer in model.named_buffers() if "inv_freq" in name
    )


def test_a_tied_head_and_embedding_count_once_packed_as_they_did_before() -> None:
    model = tiny_model(tie_word_embeddings=True)
    before = weight_bytes(model)
    quantize_embedding_(model, RTNConfig(8, 64))
    packed = stored(8, 64, False, VOCABULARY, HIDDEN)
    assert weight_bytes(model) == before - 4 * VOCABULARY * HIDDEN + packed
    with pytest.raises(ValueError, match="2 modules are quantized, model.embed_tokens first"):
        quantize_(model, RTNConfig(4, 32), progress=False)


def test_bytes_are_those_of_the_packed_matmul_too() -> None:
    model = tiny_model()
    quantize_(model, RTNConfig(4, 32), progress=False)
    portable = weight_bytes(model)
    floats = sum(p.nbytes for p in model.parameters())
    packed = portable - floats
    model.to(torch.bfloat16)
    # A bfloat16 offset beside each scale.
    groups = LAYERS * sum(n * k // 32 for n, k in MATRICES)
    assert weight_bytes(model) == packed + 2 * groups + floats // 2


def test_parameters_that_are_shared_count_once() -> None:
    shared = nn.Linear(8, 8, bias=False)
    assert weight_bytes(nn.Sequential(shared, shared)) == 4 * 64
    with pytest.raises(ValueError, match="^model: got 'Tensor'"):
        weight_bytes(torch.zeros(2))


RESIDENT = """
import torch
torch.set_num_threads(1)
from transformers import LlamaConfig, LlamaForCausalLM
from labkit.quantization import RTNConfig, quantize_, weight_bytes

def resident():
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmRSS"))

shape = dict(vocab_size=64, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=8)
with torch.no_grad(), torch.device("cpu"):
    model = LlamaForCausalLM(LlamaConfig(**shape)).eval()
bytes_before, before = weight_bytes(model), resident()
quantize_(model, RTNConfig(4, 64), progress=False)
print(bytes_before, bytes_before - weight_bytes(model), before - resident())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the resident set from /proc")
def test_the_process_really_takes_less_memory() -> None:
    done = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True, check=True, timeout=60)
    total, saved, gone = (int(number) for number in done.stdout.split())
    assert total >= 200e6 and saved > 0.85 * total
    assert 0.6 * saved <= gone <= 1.2 * saved
