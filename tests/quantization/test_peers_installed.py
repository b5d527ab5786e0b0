"""The libraries themselves, in the environments of `make quantlibs`, on a tiny model. Skipped where they are not."""

import copy

import pytest
import torch

from labkit.models import tiny_model
from labkit.quality import sqnr_db
from labkit.quantization import AWQConfig, GPTQConfig, RTNConfig, quantize_
from labkit.quantization._peer_checkpoint import dequantized, read_checkpoint
from labkit.quantization.checkpoint import save_quantized
from labkit.quantization.linear import QuantLinear
from labkit.quantization.peers import OURS, PEERS, missing, read_back, run_peer

pytestmark = pytest.mark.slow

CALIBRATION = torch.randint(0, 256, (8, 64), generator=torch.Generator().manual_seed(0))
IDS = CALIBRATION[:2]
RUNS = [(peer.name, method) for peer in (OURS, *PEERS) for method in peer.methods]


def needs(peer: str) -> None:
    if missing(peer):
        pytest.skip(missing(peer))


@pytest.mark.parametrize(("peer", "method"), RUNS)
def test_a_library_quantizes_and_its_checkpoint_is_close_to_the_float_model(peer, method, tmp_path):
    needs(peer)
    # GPTQModel's clipping search takes matrices of a multiple of 64 rows.
    model = tiny_model(num_key_value_heads=4)
    result = run_peer(peer, model, CALIBRATION, IDS, method=method, group_size=32, folder=tmp_path, timeout_s=300.0)
    found = dequantized(model, read_checkpoint(tmp_path / "checkpoint"))
    # Random weights of two layers: 4 bits leave 8 to 15 dB of the logits; a layout read wrong leaves less than none.
    assert sqnr_db(model(IDS).logits, found(IDS).logits) > 5
    assert result.version and result.seconds > 0 and result.nbytes > 40_000
    assert (result.notes != ()) is (peer in ("autogptq", "autoawq") and not torch.cuda.is_available())


def floats_in_bfloat16(model):
    """The model that a compressed-tensors checkpoint stands for: matrices exact, the rest in bfloat16."""
    plain = copy.deepcopy(model)
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            linear = torch.nn.Linear(module.in_features, module.out_features, bias=False)
            linear.weight.data = module.portable().dequantize(torch.float32)
            parent, _, field = name.rpartition(".")
            setattr(plain.get_submodule(parent), field, linear)
        elif isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            plain.get_submodule(name).weight.data = module.weight.data.bfloat16().float()
    return plain


def difference(model, logits):
    return (model(IDS).logits.float() - logits).abs().max().item()


@pytest.mark.parametrize(
    ("layout", "config"),
    [
        ("gptq", GPTQConfig(group_size=32)),
        ("gptq", GPTQConfig(group_size=32, sym=True, desc_act=False)),
        ("gptq", RTNConfig(bits=8, group_size=32, sym=True)),
        ("awq", AWQConfig(group_size=32)),
        ("awq", RTNConfig(group_size=32, sym=True)),
        ("compressed-tensors", RTNConfig(group_size=32, sym=True)),
        ("compressed-tensors", RTNConfig(group_size=32)),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
@torch.no_grad()
def test_what_is_saved_here_has_the_same_logits_elsewhere(layout, config, tmp_path):
    needs("gptqmodel")
    base = tiny_model()
    model = copy.deepcopy(base)
    quantize_(model, config, None if isinstance(config, RTNConfig) else CALIBRATION, progress=False)
    folder = save_quantized(model, None, tmp_path / "made", format=layout)
    if layout == "compressed-tensors":
        assert difference(floats_in_bfloat16(model), read_back(folder, IDS).logits) < 1e-4
        return
    exact = dequantized(base, read_checkpoint(folder))
    expected = exact(IDS).logits
    # The plain kernel rounds weights to float16 in places, the one that it chooses on a CPU sums in bfloat16: the bound
    # is what the same model loses when all of it is in that type.
    for backend, dtype in (("torch", torch.float16), ("auto", torch.bfloat16)):
        found = read_back(folder, IDS, backend=backend)
        assert found.kernels
        assert difference(exact, found.logits) <= difference(copy.deepcopy(exact).to(dtype), expected)
