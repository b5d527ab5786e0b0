"""A GGUF file into a folder that `transformers` loads: safetensors in float32, config, tokenizer with chat template."""

from __future__ import annotations

import contextlib
import io
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from labkit.model_files.rescale import rescale_

# transformers sets up the whole process while it makes a model, and a second one made meanwhile finds weights missing:
# a lab loads in a thread of its own while the next cell runs.
ONE_AT_A_TIME = threading.RLock()


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence what `transformers` says while it loads; errors still raise.

    One at a time: of two at once the second would take the silence of the first for the setting to put back.
    """
    from transformers.utils import logging

    with ONE_AT_A_TIME:
        verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()


def convert_gguf(gguf: Path, folder: Path, *, rescale_seed: int) -> None:
    """Dequantize `gguf` to float32, rescale its channels by `rescale_seed` and save everything into `folder`.

    The embedding stays on the grid that it has in the file (Q8_0 in the default model).
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # The reader of GGUF draws a bar of its own on standard error, whatever the level of the log.
    with ONE_AT_A_TIME, quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        options = {"gguf_file": gguf.name, "local_files_only": True}
        source = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **options)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **options)
    # transformers refuses to save what it loaded from a GGUF, so the weights move to a model that never was one.
    fields = source.config.to_dict()
    for leftover in ("quantization_config", "_model_name_or_path", "transformers_version"):
        fields.pop(leftover, None)
    config = type(source.config).from_dict(fields)
    state = source.state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    rescale_(state, config, rescale_seed)
    with torch.device("meta"):
        model = type(source)(config)
    model.load_state_dict(state, strict=not config.tie_word_embeddings, assign=True)
    model.tie_weights()
    model.generation_config = source.generation_config
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
