"""Heads with random weights for tiny targets."""

import torch

from labkit.speculative.eagle_model import EagleConfig, EagleModel


def head_for(target, draft_ids=None, seed: int = 0) -> EagleModel:
    """A random head of the target's shape; it drafts from all tokens unless `draft_ids` says which."""
    config = target.config
    if draft_ids is None:
        draft_ids = torch.arange(config.vocab_size)
    shape = EagleConfig(
        target="tiny",
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        draft_vocab_size=len(draft_ids),
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=10_000.0,
        max_position_embeddings=config.max_position_embeddings,
    )
    generator = torch.Generator().manual_seed(seed)
    model = EagleModel(shape, torch.as_tensor(draft_ids))
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms too: a head whose norms are all 1 could forget them.
            size = parameter.shape[1] ** -0.5 if parameter.ndim == 2 else 0.3
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * size + (parameter.ndim == 1))
    return model.eval().requires_grad_(False)
