"""Exercise `fixed_calibration`: a calibration loop that skips short texts, and returns fewer samples than it says.

The form with the fault, as the notebook shows it:

    def calibration_batches(tokenizer, texts, n_samples, seq_len):
        samples = []
        for text in texts[:n_samples]:
            ids = tokenizer(text).input_ids
            if len(ids) < seq_len:
                continue
            samples.append(ids[:seq_len])
        return torch.tensor(samples)

The check's tokenizer is a real one of whole words, in which no word comes twice: a token tells where it stands.
"""

import functools

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from labkit.exercises._exercise import Answer, Exercise, Failed, expect, without_labkit

_SIGNATURE = "fixed_calibration(tokenizer, texts, n_samples, seq_len) -> token ids (n_samples, seq_len)"
_OWN = ("corpora", "quantization/calibration")
_SPECIAL = 2  # ids 0 and 1 are <pad> and <unk>; word i has the id i + 2
_WORDS = 400
_SEQ_LEN = 16


@functools.lru_cache
def _tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<unk>", *(f"w{i}" for i in range(_WORDS))]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<pad>", bos_token="<pad>"
    )


def _texts(lengths: list[int]) -> list[str]:
    """Texts of so many words; each word of them all is another one."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [" ".join(f"w{start + i}" for i in range(n)) + "\n" for start, n in zip(starts, lengths, strict=True)]


def _as_ids(value: object, n_samples: int, what: str) -> Tensor:
    """(n_samples, seq_len) int64 from a tensor, or from a list of windows."""
    listed = isinstance(value, Tensor | list | tuple)
    expect(listed, f"return token ids of the shape (n_samples, seq_len); got {type(value).__name__}")
    found = len(value) if not isinstance(value, Tensor) or value.ndim else 0
    number = f"{what}: asked for {n_samples} windows, your function returned {found}"
    few = "fewer than it was asked for, and it did not say so" if found < n_samples else "more than it was asked for"
    expect(found == n_samples, f"{number}: {few}")
    try:
        windows = [torch.as_tensor(window) for window in value]
    except (TypeError, ValueError, RuntimeError) as error:
        raise Failed(f"{what}: the windows should hold token ids only ({error})") from error
    lengths = sorted({window.numel() if window.ndim == 1 else -1 for window in windows})
    expect(lengths == [_SEQ_LEN], f"{what}: every window should be one row of {_SEQ_LEN} tokens; not all are")
    ids = torch.stack(windows)
    expect(not ids.is_floating_point(), f"{what}: token ids should be integers; got {ids.dtype}")
    return ids.long()


def _expect_real(ids: Tensor, lengths: list[int], what: str) -> None:
    """Only tokens of the texts, none twice, each after the one that it follows in its text."""
    words = ids - _SPECIAL
    foreign = int(((words < 0) | (words >= sum(lengths))).sum())
    filled = f"{what}: {foreign} of {ids.numel()} tokens stand in no text"
    expect(foreign == 0, f"{filled}: padding and separators are not text to calibrate on; join the texts instead")
    twice = ids.numel() - words.unique().numel()
    expect(twice == 0, f"{what}: {twice} tokens come more than once: no two windows should share text")
    ends = torch.tensor(lengths).cumsum(0)
    firsts = torch.cat([torch.tensor([0]), ends[:-1]])
    follows = words[:, 1:] == words[:, :-1] + 1
    joined = torch.isin(words[:, :-1], ends - 1) & torch.isin(words[:, 1:], firsts)
    runs = bool((follows | joined).all())
    expect(runs, f"{what}: a window should be a run of the joined texts; yours leave out words inside a text")


def _windows(answer: Answer, lengths: list[int], n_samples: int) -> object:
    given = (_tokenizer(), _texts(lengths), n_samples, _SEQ_LEN)
    return without_labkit(lambda: answer(*given), _OWN)


def _test_case(answer: Answer, what: str, lengths: list[int], n_samples: int) -> None:
    try:
        value = _windows(answer, lengths, n_samples)
    except Failed as failure:
        if failure.__cause__ is None:
            raise
        raise Failed(f"{what}, {sum(lengths)} tokens for {n_samples} windows of {_SEQ_LEN}: {failure}") from failure
    ids = _as_ids(value, n_samples, what)
    _expect_real(ids, lengths, what)


def _test_too_little(answer: Answer, what: str, lengths: list[int], n_samples: int) -> None:
    """ValueError and nothing else."""
    have, need = sum(lengths), n_samples * _SEQ_LEN
    told = f"{what}, {have} tokens where {n_samples} windows take {need}: raise a ValueError that says so"
    try:
        value = _windows(answer, lengths, n_samples)
    except Failed as failure:
        if isinstance(failure.__cause__, ValueError):
            return
        if failure.__cause__ is None:
            raise
        raise Failed(f"{told}; {failure}") from failure
    found = len(value) if isinstance(value, list | tuple) or isinstance(value, Tensor) and value.ndim else value
    raise Failed(f"{told}; your function returned {found} windows" if isinstance(found, int) else told)


def _test(function: object) -> str:
    answer = Answer(function, _SIGNATURE)
    _test_case(answer, "when every text is long enough", [20, 16, 31], 3)
    _test_case(answer, "when some texts are short", [5, 40, 3, 9, 20], 4)
    _test_case(answer, "when all texts are short", [7] * 12, 5)
    _test_case(answer, "when one long text is all there is", [100], 6)
    _test_case(answer, "when the texts hold exactly enough", [7, 33, 1, 23], 4)
    _test_too_little(answer, "when one token is missing", [7, 33, 1, 22], 4)
    _test_too_little(answer, "when there is hardly any text", [3, 2], 2)
    return "as many windows as it was asked for, of real and new text, or a ValueError where there is too little"


FIXED_CALIBRATION = Exercise(
    name="fixed_calibration",
    chapter=2,
    task="Find the bug: asked for 128 windows to calibrate on, this function may return three. Mend it: exactly "
    "n_samples windows that share no token, short texts joined, or a ValueError where there is too little text.",
    signature=_SIGNATURE,
    hints=(
        "What does the function return if each text is shorter than seq_len? And what of the rest of a long one?",
        "A window need not start where a text starts: put the tokens of all texts into one list, and cut that.",
        "ids = [i for text in texts for i in tokenizer(text).input_ids]; if len(ids) < n_samples * seq_len raise a "
        "ValueError; else return torch.tensor(ids[: n_samples * seq_len]).reshape(n_samples, seq_len).",
    ),
    test=_test,
)
