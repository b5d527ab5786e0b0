"""What the tests of paged caches share: a model, prompts, generations to compare, the largest tensor that is made."""

import functools

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labkit.kv_cache.paged import PagedKVCache
from labkit.models import tiny_model

NEW = 12


@functools.cache
def model():
    return tiny_model()


def prompt(batch: int = 1, length: int = 21, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


def generated(cache, input_ids, **options):
    options = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0} | options
    with torch.no_grad():
        return model().generate(
            input_ids, past_key_values=cache, output_logits=True, return_dict_in_generate=True, **options
        )


def same_generation(ours, theirs):
    assert torch.equal(ours.sequences, theirs.sequences)
    for a, b in zip(ours.logits, theirs.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def scattered(cache: PagedKVCache, seed: int = 0) -> PagedKVCache:
    """The same cache, which now hands its blocks out in random order."""
    sequences = [cache.manager.allocate(1) for _ in range(cache.manager.num_blocks)]
    for i in torch.randperm(len(sequences), generator=torch.Generator().manual_seed(seed)).tolist():
        cache.manager.free(sequences[i])
    return cache


class Largest(TorchDispatchMode):
    """The most elements of a float tensor that an op makes; views of `owned` memory are not made."""

    def __init__(self, *owned: torch.Tensor) -> None:
        super().__init__()
        self.owned, self.elements = {tensor.untyped_storage().data_ptr() for tensor in owned}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for made in tree_leaves(out):
            if isinstance(made, torch.Tensor) and made.is_floating_point():
                if made.untyped_storage().data_ptr() not in self.owned:
                    self.elements = max(self.elements, made.numel())
        return out
