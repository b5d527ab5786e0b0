"""`python -m labkit.speculative.train`: a drafter for a target, from the target's own answers."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from labkit import _check
from labkit._progress import say
from labkit._threads import set_threads
from labkit.hardware import detect_device
from labkit.models import DEFAULT_MODEL, LoadedModel, load_model
from labkit.speculative._train_data import make_rounds, read_samples
from labkit.speculative._train_eval import HeldOut, evaluate, held_out_table
from labkit.speculative._train_head import HeadTrainingConfig, train_head
from labkit.speculative._train_state import HeadTraining
from labkit.speculative.eagle import EagleHead
from labkit.speculative.eagle_file import save_model_file

_EVALUATED = (2, 3, 4, 6)


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    defaults = HeadTrainingConfig()
    parser = argparse.ArgumentParser(
        prog="python -m labkit.speculative.train",
        description="Train an EAGLE-style head for a model: it makes its data from the model's own answers, trains on "
        "a CPU or a GPU, goes on where it was interrupted, draws its curve, and measures acceptance on held-out "
        "prompts. Run it again with the same folder to go on.",
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder for the data, the state and the head")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the target: a catalogue name, a folder or a Hub id")
    parser.add_argument("--tokens", type=int, default=300_000, help="answer tokens to train on (default 300000)")
    parser.add_argument("--answer-length", type=int, default=160, help="most tokens of an answer (default 160)")
    parser.add_argument("--dtype", default="bfloat16", help="the target's, in which data is made (default bfloat16)")
    for name, value in asdict(defaults).items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(value), default=value, help=f"default {value}")
    parser.add_argument("--threads", type=int, help="of a CPU (default: as many as a decode step is fastest with)")
    parser.add_argument("--prompts", type=int, help="held-out prompts to measure on (default all)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Make data, train, measure. Returns the exit status: 0 done, 2 it could not be asked for like that."""
    args = parser().parse_args(arguments)
    try:
        return _run(args)
    except (ValueError, OSError) as error:
        print(f"train: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    config = HeadTrainingConfig(**{name: getattr(args, name) for name in asdict(HeadTrainingConfig())})
    # All before the target is loaded, and long before the head is trained.
    _check.integer("--tokens", args.tokens, 1)
    _check.integer("--answer-length", args.answer_length, 1)
    if args.prompts is not None:
        _check.integer("--prompts", args.prompts, 1)
    if args.threads is not None:
        _check.integer("--threads", args.threads, 1, os.cpu_count() or 1)
    args.out.mkdir(parents=True, exist_ok=True)
    device = detect_device()
    if device.type == "cpu":
        set_threads(None if args.threads is None else [args.threads])
    target = load_model(args.model, dtype=args.dtype, device=device)
    data = args.out / "data"
    held = make_rounds(target, data, args.tokens, seed=args.seed, length=args.answer_length)
    model, training, share = train_head(target, read_samples(data), config, args.out / "state.safetensors")
    save_model_file(model, args.out / "head.safetensors")
    say(f"the head is in {args.out / 'head.safetensors'}; now on held-out prompts")
    runs = held_out_runs(target, EagleHead(model), args.prompts)
    print(held_out_table(runs))
    record = {
        "model": target.name,
        "settings": asdict(config) | {"answer_tokens": held, "answer_length": args.answer_length},
        "draft_vocabulary_share": share,
        "seconds": training.state.seconds,
        "losses": training.state.losses,
        "checked": [asdict(look) for look in training.checked],
        "held_out": [asdict(run) for run in runs],
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    draw(training, args.out / "curve.html")
    return 0


def held_out_runs(target: LoadedModel, head: EagleHead, most: int | None = None) -> list[HeldOut]:
    """The head's chains of several lengths on the chat prompts, and of one on the others."""
    from labkit.engine.decode import Decoder
    from labkit.speculative.prompts import KINDS, load_prompts

    decoder = Decoder(target)
    asked = [("chat", gamma) for gamma in _EVALUATED] + [(kind, 4) for kind in KINDS if kind != "chat"]
    return [
        evaluate(decoder, head, target.tokenizer, kind, num_assistant_tokens=gamma, prompts=load_prompts(kind)[:most])
        for kind, gamma in asked
    ]


def draw(training: HeadTraining, path: Path) -> None:
    """The learning curve: of each step of a draft, how often the head's likeliest token was the target's."""
    from labkit.labs.charts import curves

    steps = [look.step for look in training.checked]
    lines = {
        f"token {place + 1} of a draft": [look.matches[place] for look in training.checked]
        for place in range(len(training.checked[0].matches))
    }
    chart = curves(
        steps,
        lines,
        title="Learning curve, answers kept apart",
        x_title="step",
        y_title="share that the target would have said",
        log_x=False,
        log_y=False,
    )
    chart.figure.write_html(path, include_plotlyjs=True)
    print(chart.text)
    say(f"the curve is in {path}")


if __name__ == "__main__":
    sys.exit(main())
