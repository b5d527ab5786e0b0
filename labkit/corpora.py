"""Text to calibrate on and text to evaluate on, kept apart."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from labkit import _check
from labkit.hardware import describe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAMES = ("pydoc", "python-source", "wikitext-2")
SPLITS = ("calibration", "eval")
# Whole topics, in this order: prose on several subjects that hardly repeats what other topics say. 24 to 26 k tokens
# of the default model on Python 3.11 to 3.13, which leaves 85 to 91 k for calibration.
_EVAL_TOPICS = (
    "objects",
    "comparisons",
    "import",
    "execmodel",
    "strings",
    "assignment",
    "raise",
    "calls",
    "debugger",
    "typesmapping",
)
# Whole modules of the standard library, in this order, that are Python source in every release from 3.11 to 3.13.
_EVAL_MODULES = ("textwrap", "heapq", "fractions", "shlex", "string", "queue", "contextlib")
_CALIBRATION_MODULES = ("argparse", "ast", "calendar", "configparser", "csv", "difflib", "functools", "gettext")
_CALIBRATION_MODULES += ("gzip", "html.parser", "http.cookies", "json.decoder", "json.encoder", "mailbox", "optparse")
_CALIBRATION_MODULES += ("pprint", "random", "sched", "socketserver", "statistics", "tarfile", "timeit", "zipfile")
# A learner's own file: this share of it, from its start, is for calibration.
_CALIBRATION_SHARE = 0.8


class CorpusUnavailable(RuntimeError):
    """A text cannot be had here and now; the message says what to do."""


def load_text(name: str | Path = "pydoc", split: str = "eval") -> str:
    """A text. The two splits of one name share no paragraph.

    name: "pydoc", the help topics that every CPython carries (English, 0.46 MB; it differs a little between Python
    versions: record `text_sha256`); "python-source", modules of the standard library as they lie on disk (code; it
    differs between versions too); "wikitext-2", through the package `datasets` and a network, as the GPTQ paper reads
    it (Frantar et al. 2023; the raw set, its lines joined with two newlines; "eval" is its test part and "calibration"
    its training part); or a path to a UTF-8 text of your own, whose first four fifths are "calibration".
    Errors: ValueError for another name or split and for a file that is not text; CorpusUnavailable (a RuntimeError).
    """
    _check.choice("split", split, SPLITS)
    if name == "pydoc":
        return _pydoc()[split]
    if name == "python-source":
        return _python_source()[split]
    if name == "wikitext-2":
        return _wikitext(split)
    takes = f"{_check.near(name, NAMES)}, or the path of a text file"
    # os.path, since pathlib raises for a name that is too long.
    _check.require(isinstance(name, str | Path) and os.path.isfile(name), "name", str(name), takes)
    return _own_file(Path(name), split)


def text_sha256(text: str) -> str:
    """Hex SHA-256 of a text in UTF-8: put it into a measurement, since "pydoc" differs between Python versions."""
    _check.require(isinstance(text, str), "text", type(text).__name__, "a string")
    return hashlib.sha256(text.encode()).hexdigest()


def token_batches(tokenizer: PreTrainedTokenizerBase, text: str, n_samples: int, seq_len: int, seed: int = 0) -> Tensor:
    """Token ids of random windows, (n_samples, seq_len), int64: exactly n_samples, no two from the same place.

    The text is tokenized whole, without special tokens; windows may overlap. The same seed gives the same windows.
    Errors: ValueError if the text is too short for so many windows, with the numbers.
    """
    _check.require(callable(tokenizer), "tokenizer", type(tokenizer).__name__, "a tokenizer of transformers")
    _check.require(isinstance(text, str), "text", type(text).__name__, "a string")
    n_samples, seq_len = _check.integer("n_samples", n_samples, 1), _check.integer("seq_len", seq_len, 1)
    seed = _check.seed("seed", seed)
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids, dtype=torch.int64)
    places = ids.numel() - seq_len + 1
    takes = f"at least {seq_len + n_samples - 1} tokens for {n_samples} windows of {seq_len} from different places"
    _check.require(places >= n_samples, "text", f"{ids.numel()} tokens", takes)
    needed, free = 8 * n_samples * seq_len, describe("cpu").free_bytes
    takes = f"windows that fit in memory: these take {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free"
    _check.require(needed <= free, "n_samples", f"{n_samples} windows of {seq_len}", takes)
    starts = torch.randperm(places, generator=torch.Generator().manual_seed(seed))[:n_samples]
    return torch.stack([ids[start : start + seq_len] for start in starts.tolist()])


def _paragraphs(text: str) -> list[str]:
    return [paragraph.strip("\n") for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]


def _cleaned(topic: str) -> str:
    """A topic without the rules under its headings and the space at its lines' ends."""
    lines = (line.rstrip() for line in topic.splitlines())
    return "\n".join(line for line in lines if not re.fullmatch(r"([*=\-~^+\"#])\1{3,}", line))


@functools.cache
def _pydoc() -> dict[str, str]:
    """Both splits. Topics quote each other: a paragraph that stands in the evaluation part leaves the other."""
    from pydoc_data.topics import topics

    texts = {name: _paragraphs(_cleaned(topics[name])) for name in sorted(topics)}
    evaluation = [paragraph for name in _EVAL_TOPICS for paragraph in texts.pop(name, ())]
    return _kept_apart(evaluation, [paragraph for name in texts for paragraph in texts[name]])


def _kept_apart(evaluation: list[str], others: list[str]) -> dict[str, str]:
    """Both splits; of the others, what stands in the evaluation part too, however it is set, is left out."""
    held_out = {" ".join(paragraph.split()) for paragraph in evaluation}
    calibration = [paragraph for paragraph in others if " ".join(paragraph.split()) not in held_out]
    return {"eval": "\n\n".join(evaluation), "calibration": "\n\n".join(calibration)}


def _source(module: str) -> list[str]:
    """The paragraphs of a module's file, without running it."""
    # Not by find_spec, which imports the package of a submodule.
    path = Path(sysconfig.get_path("stdlib"), *module.split(".")).with_suffix(".py")
    path = path if path.is_file() else path.with_suffix("") / "__init__.py"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        message = f"python-source cannot be had: this Python came without the source of {module} ({path})"
        raise CorpusUnavailable(f'{message}; "pydoc" needs none') from error
    return _paragraphs("\n".join(line.rstrip() for line in lines))


@functools.cache
def _python_source() -> dict[str, str]:
    """Both splits. Modules repeat each other's few-line idioms, and those leave the calibration part."""
    evaluation = [paragraph for module in _EVAL_MODULES for paragraph in _source(module)]
    return _kept_apart(evaluation, [paragraph for module in _CALIBRATION_MODULES for paragraph in _source(module)])


def _wikitext(split: str) -> str:
    offline = '"pydoc" needs no network, and a path to a text file of your own works too'
    try:
        from datasets import load_dataset
    except ImportError as error:
        message = (
            f"wikitext-2 comes through the package `datasets`, which is not installed (pip install datasets); {offline}"
        )
        raise CorpusUnavailable(message) from error
    part = {"eval": "test", "calibration": "train"}[split]
    try:
        lines = load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split=part)["text"]
    except Exception as error:  # `datasets` raises many kinds where there is no network
        why = str(error).strip().splitlines()
        message = f"wikitext-2 cannot be had ({why[0][:160] if why else type(error).__name__}): it takes a network once"
        raise CorpusUnavailable(f"{message}; {offline}") from error
    return "\n\n".join(lines)


def _own_file(path: Path, split: str) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"name: got {str(path)!r}, which is not UTF-8 text; takes a text file") from error
    _check.require("\0" not in text, "name", f"{path}, which holds zero bytes", "a text file")
    paragraphs = _paragraphs(text)
    takes = "a text of at least two paragraphs with an empty line between them, so that it can be split"
    _check.require(len(paragraphs) >= 2, "name", f"{path} with {len(paragraphs)} paragraphs", takes)
    lengths = torch.tensor([len(paragraph) for paragraph in paragraphs]).cumsum(0)
    cut = int((lengths <= _CALIBRATION_SHARE * lengths[-1]).sum())
    cut = min(max(cut, 1), len(paragraphs) - 1)
    return "\n\n".join(paragraphs[:cut] if split == "calibration" else paragraphs[cut:])
