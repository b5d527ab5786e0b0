"""Tiny random models of several families, each by "labkit_flash" and by "eager", with the same weights."""

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from labkit.attention import register

_COMMON = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 97}
_COMMON |= {"max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
_GQA = _COMMON | {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
_GPT2 = {
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 97,
    "n_positions": 512,
    "scale_attn_by_inverse_layer_idx": True,
}
_GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}

DECODERS = {
    "llama": ("llama", _GQA),
    "multi-query": ("llama", _GQA | {"num_key_value_heads": 1, "head_dim": 24}),
    "qwen2": ("qwen2", {k: v for k, v in _GQA.items() if k != "head_dim"}),
    "qwen3": ("qwen3", _GQA | {"head_dim": 16}),
    "mistral": ("mistral", _GQA | {"sliding_window": None}),
    "wide window": ("mistral", _GQA | {"sliding_window": 256}),
    "gpt2": ("gpt2", _GPT2),
}
BERT = ("bert", _COMMON | {"num_attention_heads": 6, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
_BART = {"d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 6, "vocab_size": 97}
_BART |= {"decoder_attention_heads": 6, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0}
_BART |= {"max_position_embeddings": 128, "forced_eos_token_id": None}
BART = ("bart", _BART)
# Its decoder's modules say that they are not causal, and leave it to the mask.
PEGASUS_X = ("pegasus_x", _BART | {"block_size": 4, "attention_dropout": 0.0})


def config_of(family: tuple[str, dict], **changes: object) -> PreTrainedConfig:
    kind, fields = family
    return AutoConfig.for_model(kind, **(fields | changes))


def pair(family: tuple[str, dict], *, auto=AutoModelForCausalLM, **changes: object):
    """The model with "labkit_flash" and with "eager". Large weights, so that attention is far from uniform."""
    register()
    torch.manual_seed(1)
    config = config_of(family, **changes)
    eager = auto.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in eager.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight.mul_(6)
    flash = auto.from_config(config_of(family, **changes), attn_implementation="labkit_flash").eval()
    flash.load_state_dict(eager.state_dict())
    return flash, eager


def encoders() -> tuple[PreTrainedModel, PreTrainedModel]:
    return pair(BERT, auto=AutoModel)


def tokens(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(1, 97, shape, generator=torch.Generator().manual_seed(seed))


def padded(kind: str, batch: int = 4, length: int = 21) -> torch.Tensor:
    """A (batch, length) attention mask of rows of different lengths."""
    mask = torch.ones(batch, length, dtype=torch.long)
    if kind == "left":
        for row in range(batch):
            mask[row, : 5 * row] = 0
    elif kind == "right":
        for row in range(batch):
            mask[row, length - 5 * row :] = 0
        mask[0] = 1
    elif kind == "holes":
        mask[1, 3:7], mask[2, ::4], mask[3, 11:13] = 0, 0, 0
        mask[2, 1] = 1
    return mask
