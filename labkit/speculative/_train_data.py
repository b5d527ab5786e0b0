"""What a drafter learns from: the target's own answers, with the hidden states that it had on the way."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from labkit import _check
from labkit._progress import say
from labkit.engine.decode import Decoder
from labkit.engine.sampling import sample, seeded_generator
from labkit.models import LoadedModel
from labkit.speculative._train_prompts import ChatTemplate, not_held_out, passage_prompts, self_prompts, written_prompts

_ROWS = 96
# Prompts of a round: the target's own, requests of the kinds that people type, tasks over a passage.
_OWN, _WRITTEN, _PASSAGES = 140, 200, 40
_MAX_PROMPT = 180
# Most answers are what greedy decoding will ask the drafter for; the others keep it right off that path.
_GREEDY_SHARE, _TEMPERATURES = 0.6, (0.6, 1.0)
# A batch ends when so many rows have: the last ones would be decoded nearly alone.
_DONE_SHARE = 0.95


@dataclass(frozen=True)
class Sample:
    """A prompt and its answer: `tokens (n,)`, the first `prompt` of them the prompt's; `hidden (n - 1, hidden_size)`,
    after the target's final norm, at all places but the last."""

    tokens: Tensor
    hidden: Tensor
    prompt: int


@torch.inference_mode()
def answers(
    decoder: Decoder, prompts: list[list[int]], eos: int, generator: torch.Generator, *, length: int, temperature: float
) -> list[Sample]:
    """The target's answer to each of `prompts`, of any lengths, by up to `length` tokens."""
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    decoder.reset()
    padded = torch.tensor([[*prompt, *[eos] * (longest - len(prompt))] for prompt in prompts], device=decoder.device)
    _, before = decoder.forward(padded, return_hidden=True, logits_to_keep=1)
    decoder.crop(lengths)
    rows, ends = torch.arange(len(prompts), device=decoder.device), torch.tensor(lengths, device=decoder.device) - 1
    logits = decoder.model.get_output_embeddings()(before[rows, ends])
    done, tokens, hidden = torch.zeros_like(rows, dtype=torch.bool), [], []
    while True:
        token = sample(logits, temperature, 0, 1.0, generator)
        done |= token == eos
        tokens.append(token)
        if len(tokens) == length or float(done.float().mean()) > _DONE_SHARE:
            break
        logits, state = decoder.forward(token[:, None], return_hidden=True, logits_to_keep=1)
        logits = logits[:, -1]
        hidden.append(state)
    # A generation of one step has no state after the prompt's.
    after = torch.cat([before[:, :0], *hidden], dim=1).cpu()
    said, before = torch.stack(tokens, 1).tolist(), before.cpu()
    return [
        _sample(prompt, row, torch.cat((before[b, : lengths[b]], after[b])), eos)
        for b, (prompt, row) in enumerate(zip(prompts, said, strict=True))
    ]


def _sample(prompt: list[int], answer: list[int], hidden: Tensor, eos: int) -> Sample:
    answer = answer[: answer.index(eos) + 1] if eos in answer else answer
    tokens = torch.tensor([*prompt, *answer], dtype=torch.int32)
    return Sample(tokens, hidden[: len(tokens) - 1].clone(), len(prompt))


def make_rounds(target: LoadedModel, folder: Path, tokens: int, *, seed: int, length: int) -> int:
    """Make data in `folder` until its answers hold `tokens` tokens; returns how many they hold. What lies there is
    kept: a round is a file, made whole or not at all, and hangs on the seed and its number alone.

    Errors: ValueError for a folder with data of another target, seed or length.
    """
    _check.integer("tokens", tokens, 1)
    _check.integer("length", length, 2, target.model.config.max_position_embeddings // 2)
    folder.mkdir(parents=True, exist_ok=True)
    identity = {"target": target.name, "seed": seed, "length": length}
    decoder, template = Decoder(target), ChatTemplate(target.tokenizer)
    held = sum(_answer_tokens(path, identity) for path in _files(folder))
    while held < tokens:
        index = next(number for number in itertools.count() if not _path(folder, number).exists())
        samples = list(_round(decoder, template, seed, index, length))
        _write(_path(folder, index), samples, identity)
        held += sum(len(sample.tokens) - sample.prompt for sample in samples)
        say(f"training data: {held:,} of {tokens:,} tokens")
    return held


def _round(decoder: Decoder, template: ChatTemplate, seed: int, index: int, length: int) -> Iterator[Sample]:
    rng = random.Random(f"{seed} {index}")
    generator = seeded_generator(decoder.device, rng.getrandbits(63))
    prompts = self_prompts(decoder, template, _OWN, generator)
    prompts += [*written_prompts(_WRITTEN, rng), *passage_prompts(template, _PASSAGES, rng)]
    ids = [ids for prompt in not_held_out(prompts) if len(ids := template(prompt)) <= _MAX_PROMPT]
    ids.sort(key=len)
    for start in range(0, len(ids), _ROWS):
        temperature = 0.0 if rng.random() < _GREEDY_SHARE else rng.choice(_TEMPERATURES)
        options = {"length": length, "temperature": temperature}
        yield from answers(decoder, ids[start : start + _ROWS], template.tokenizer.eos_token_id, generator, **options)


def _path(folder: Path, index: int) -> Path:
    return folder / f"round_{index:04d}.safetensors"


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("round_*.safetensors"))


def _write(path: Path, samples: list[Sample], identity: dict[str, object]) -> None:
    tensors = {
        "tokens": torch.cat([sample.tokens for sample in samples]),
        "hidden": torch.cat([sample.hidden for sample in samples]),
        "lengths": torch.tensor([len(sample.tokens) for sample in samples], dtype=torch.int32),
        "prompts": torch.tensor([sample.prompt for sample in samples], dtype=torch.int32),
    }
    part = path.with_suffix(".part")
    save_file(tensors, part, metadata={"drafter_data": json.dumps(identity)})
    part.replace(path)


def _answer_tokens(path: Path, identity: dict[str, object]) -> int:
    takes = f"an empty folder, or one with data of {identity}"
    try:
        with safe_open(path, "pt") as file:
            found = json.loads((file.metadata() or {}).get("drafter_data", "{}"))
            held = int((file.get_tensor("lengths") - file.get_tensor("prompts")).sum())
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"data: got {path}, which cannot be read ({error}); takes {takes}") from error
    _check.require(found == identity, "data", f"{path.parent} with data of {found}", takes)
    return held


def read_samples(folder: Path) -> list[Sample]:
    """All that lies in `folder`, in the order it was made."""
    samples = []
    for path in _files(folder):
        with safe_open(path, "pt") as file:
            tokens, hidden, lengths, prompts = map(file.get_tensor, ("tokens", "hidden", "lengths", "prompts"))
        lengths = lengths.tolist()
        pieces = zip(tokens.split(lengths), hidden.split([n - 1 for n in lengths]), prompts.tolist(), strict=True)
        samples += [Sample(*piece) for piece in pieces]
    return samples
