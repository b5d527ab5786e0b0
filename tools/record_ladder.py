"""`make record-ladder`: the ladder on the default model that chapter 06 shows as RECORDED, measured on this machine.

Writes `data/recorded/ladders.json`. Ten minutes on two quiet cores, of which AWQ takes two.
"""

import sys

import torch

from labkit.corpora import load_text, token_batches
from labkit.engine.ladder import RUNGS, StackModels, measure_ladder, write_ladder
from labkit.hardware import measure_ceilings, set_threads
from labkit.models import DEFAULT_MODEL, load_model
from labkit.quantization import AWQConfig, RTNConfig
from labkit.speculative import EagleHead
from labkit.speculative.prompts import load_prompts, prompt_ids
from tools.recording import machine, short_commit

PROMPTS, NEW_TOKENS, REPEATS, GAMMA = 6, 64, 3, 2
WINDOWS, LENGTH = 6, 512
CALIBRATION = (32, 512)
# All that pays at a short prompt on a CPU: a quantized cache takes less memory there, and more time.
PAYING = tuple(rung for rung in RUNGS if rung not in ("int8", "quantized_kv"))
ALSO = {
    "transformers as it comes, float32": ("attention",),
    "transformers as it comes, bfloat16": ("bfloat16", "attention"),
    "all rungs that pay": PAYING,
    "float32 step": ("step", "attention"),
    "float32 step, drafts": ("step", "attention", "speculation"),
    "all that pay, without drafts": tuple(rung for rung in PAYING if rung != "speculation"),
}


def main() -> int:
    """Measure, show, write."""
    threads = set_threads()
    loaded = load_model(device="cpu", dtype=torch.float32)
    tokenizer = loaded.tokenizer
    calibration = token_batches(tokenizer, load_text("pydoc", "calibration"), *CALIBRATION, seed=0)
    ids = tokenizer(load_text("pydoc", "eval"), add_special_tokens=False, verbose=False).input_ids
    configs = {8: RTNConfig(bits=8, group_size=64), 4: AWQConfig(bits=4, group_size=64)}
    found = measure_ladder(
        StackModels(loaded, configs=configs, calibration=calibration),
        prompts=[prompt_ids(tokenizer, text) for text in load_prompts("chat")[:PROMPTS]],
        proposer=EagleHead.load(),
        num_assistant_tokens=GAMMA,
        also=ALSO,
        max_new_tokens=NEW_TOKENS,
        repeats=REPEATS,
        eval_ids=torch.tensor(ids[: WINDOWS * LENGTH]),
        context_length=LENGTH,
        read_bandwidth=measure_ceilings("cpu").read_bandwidth,
    )
    print(found)
    where = machine(threads) | {"commit": short_commit()}
    where |= {"evaluation": f"{WINDOWS} x {LENGTH} tokens of pydoc", "weights": "AWQ at 4 bits, RTN at 8, groups of 64"}
    where |= {"prompts": f"{PROMPTS} chat prompts", "num_assistant_tokens": GAMMA}
    write_ladder(f"{DEFAULT_MODEL}, cpu", found, where)
    return 0


if __name__ == "__main__":
    sys.exit(main())
