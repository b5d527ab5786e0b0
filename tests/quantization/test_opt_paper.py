"""On a connected machine: OPT-125M by the GPTQ paper's protocol, against its table of OPT on WikiText-2."""

import itertools

import huggingface_hub
import pytest
import torch
import transformers

from labkit.corpora import CorpusUnavailable, load_text
from labkit.quality import perplexity
from labkit.quantization import GPTQConfig, RTNConfig, quantize_

MODEL, LENGTH, SAMPLES = "facebook/opt-125m", 2048, 128
# WikiText-2, context 2048, one grid a row, calibrated on 128 samples of C4.
PAPER = {"float": 27.65, "RTN": 37.28, "GPTQ": 31.12}


def c4_samples(tokenizer) -> torch.Tensor:
    """`(SAMPLES, LENGTH)`: the start of the first texts of C4 that are long enough."""
    datasets = pytest.importorskip("datasets")
    texts = datasets.load_dataset("allenai/c4", "en", split="train", streaming=True)
    ids = (tokenizer(row["text"], add_special_tokens=False).input_ids for row in texts)
    long = itertools.islice((i for i in ids if len(i) >= LENGTH), SAMPLES)
    return torch.tensor([i[:LENGTH] for i in long])


def fresh_model():
    """Read by transformers itself: the repository may hold no safetensors, and the course's loader reads no other."""
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def skip_without_the_hub() -> None:
    """At once: the libraries that fetch try again and again for most of a minute."""
    if isinstance(huggingface_hub.try_to_load_from_cache(MODEL, "config.json"), str):
        return
    try:
        huggingface_hub.HfApi().model_info(MODEL, timeout=10)
    except Exception as error:  # of whatever library the client asks by
        pytest.skip(f"takes a network once, for the model and two texts: {error}")


@pytest.fixture(scope="module")
def texts():
    skip_without_the_hub()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
        evaluation = load_text("wikitext-2", "eval")
        calibration = c4_samples(tokenizer)
        fresh_model()
    except (CorpusUnavailable, OSError) as error:
        pytest.skip(f"takes a network once, for the model and two texts: {error}")
    ids = torch.tensor(tokenizer(evaluation, add_special_tokens=False, verbose=False).input_ids)
    return ids, calibration


@pytest.mark.slow
@pytest.mark.parametrize("method", PAPER)
def test_opt_125m_is_within_3_percent_of_the_papers_table(texts, method):
    ids, calibration = texts
    model = fresh_model()
    if method == "RTN":
        quantize_(model, RTNConfig(bits=4, group_size=-1))
    if method == "GPTQ":
        quantize_(model, GPTQConfig(bits=4, group_size=-1, desc_act=False, damp_percent=0.01), calibration)
    assert perplexity(model, ids, LENGTH) == pytest.approx(PAPER[method], rel=0.03)
