"""`make record-ladder`: the ladder on the default model that chapter 06 shows as RECORDED, measured on this machine.

Writes `data/recorded/ladders.json`: after chat prompts, and after a long one. Ten minutes on two quiet cores, of which
AWQ takes two.
"""

import sys
from dataclasses import replace

import torch

from labkit.corpora import load_text, token_batches
from labkit.engine.ladder import RUNGS, Ladder, StackModels, measure_ladder, write_ladder
from labkit.hardware import measure_ceilings, set_threads
from labkit.models import DEFAULT_MODEL, load_model
from labkit.quantization import AWQConfig, RTNConfig
from labkit.speculative import EagleHead
from labkit.speculative.prompts import load_prompts, prompt_ids
from tools.recording import machine, short_commit

PROMPTS, NEW_TOKENS, REPEATS, GAMMA = 4, 64, 3, 2
WINDOWS, LENGTH = 6, 512
CALIBRATION = (32, 512)
# INT4 takes INT8's place; a quantized cache takes less memory and, at a short prompt on a CPU, more time.
MOST = tuple(rung for rung in RUNGS if rung not in ("int8", "quantized_kv"))
ALSO = {
    "transformers as it comes, float32": ("attention",),
    "transformers as it comes, bfloat16": ("bfloat16", "attention"),
    "all but INT8 and the KV cache": MOST,
    "the same without drafts": tuple(rung for rung in MOST if rung != "speculation"),
    "float32 step": ("step", "attention"),
    "float32 step, drafts": ("step", "attention", "speculation"),
}
# A long prompt is of prose: what costs is its length.
LONG_PROMPT, LONG_NEW, LONG_REPEATS = 1024, 32, 2


def main() -> int:
    """Measure, show, write."""
    threads = set_threads()
    loaded = load_model(device="cpu", dtype=torch.float32)
    tokenizer = loaded.tokenizer
    calibration = token_batches(tokenizer, load_text("pydoc", "calibration"), *CALIBRATION, seed=0)
    ids = torch.tensor(tokenizer(load_text("pydoc", "eval"), add_special_tokens=False, verbose=False).input_ids)
    configs = {8: RTNConfig(bits=8, group_size=64), 4: AWQConfig(bits=4, group_size=64)}
    models = StackModels(loaded, configs=configs, calibration=calibration)
    common = {"proposer": EagleHead.load(), "num_assistant_tokens": GAMMA, "also": ALSO}
    common["read_bandwidth"] = measure_ceilings("cpu").read_bandwidth
    short = measure_ladder(
        models,
        prompts=[prompt_ids(tokenizer, text) for text in load_prompts("chat")[:PROMPTS]],
        max_new_tokens=NEW_TOKENS,
        repeats=REPEATS,
        eval_ids=ids[: WINDOWS * LENGTH],
        context_length=LENGTH,
        **common,
    )
    where = machine(threads) | {"commit": short_commit()}
    where |= {"evaluation": f"{WINDOWS} x {LENGTH} tokens of pydoc", "weights": "AWQ at 4 bits, RTN at 8, groups of 64"}
    where |= {"num_assistant_tokens": GAMMA}
    print(short)
    write_ladder(f"{DEFAULT_MODEL}, cpu", short, where | {"prompts": f"{PROMPTS} chat prompts, {REPEATS} turns"})
    prompts = [ids[None, -LONG_PROMPT:]]
    long = measure_ladder(models, prompts=prompts, max_new_tokens=LONG_NEW, repeats=LONG_REPEATS, **common)
    long = _with_quality_of(short, long)
    print(long)
    prompts = f"{LONG_PROMPT} tokens of prose, {LONG_REPEATS} turns"
    write_ladder(f"{DEFAULT_MODEL}, cpu, long prompt", long, where | {"prompts": prompts})
    return 0


def _with_quality_of(short: Ladder, long: Ladder) -> Ladder:
    """Perplexity does not hang on the prompt: it is taken over, set by set."""
    known = {step.rungs: step.perplexity for step in (*short.measured(), *short.also)}
    steps, also = (
        tuple(replace(step, perplexity=known.get(step.rungs)) for step in some) for some in (long.steps, long.also)
    )
    return replace(long, steps=steps, also=also)


if __name__ == "__main__":
    sys.exit(main())
