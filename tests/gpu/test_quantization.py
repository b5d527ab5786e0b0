"""What quantizing gives on a GPU is what it gives on the CPU, and packed weights move between the two unchanged."""

import pytest
import torch

from labkit.models import tiny_model
from labkit.quality import sqnr_db
from labkit.quantization import AWQConfig, GPTQConfig, QuantLinear, RTNConfig, quantize_, weight_bytes

pytestmark = pytest.mark.gpu

CONFIGS = [RTNConfig(4, 16), RTNConfig(3, 16, sym=True), GPTQConfig(4, 16), GPTQConfig(2, 32), AWQConfig(4, 16)]


@pytest.fixture
def ids():
    return torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_gpu_quantizes_as_the_cpu_does(config, ids, device):
    models = [tiny_model(), tiny_model().to(device)]
    reports = [quantize_(model, config, ids, progress=False) for model in models]
    for a, b in zip(reports[0].matrices, reports[1].matrices, strict=True):
        # Sums in another order may tip a weight that lies between two codes, and what GPTQ makes of the rest.
        assert a.nbytes == b.nbytes and b.error == pytest.approx(a.error, rel=0.25)
    with torch.no_grad():
        logits = [model(input_ids=ids.to(model.device)).logits.float().cpu() for model in models]
    assert sqnr_db(*logits) > 15


def test_packed_weights_go_to_a_gpu_and_back_bit_by_bit(ids, device):
    model = tiny_model()
    quantize_(model, GPTQConfig(4, 16), ids, progress=False)
    layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
    before = [{name: t.clone() for name, t in layer.portable().tensors.items()} for layer in layers]
    size = weight_bytes(model)
    model.to(device, torch.bfloat16)
    assert all(layer.portable().device == device for layer in layers)
    model(input_ids=ids.to(device))
    model.to("cpu", torch.float32)
    assert weight_bytes(model) == size
    for layer, known in zip(layers, before, strict=True):
        now = layer.portable().tensors
        assert now.keys() == known.keys() and all(torch.equal(now[name], known[name]) for name in known)
