"""Texts: enough of them, kept apart, and windows in the number that was asked for."""

import sys
import types

import pytest
import torch

from labkit import corpora
from labkit.corpora import CorpusUnavailable, load_text, text_sha256, token_batches


class Words:
    """A tokenizer that gives each word the next id: windows show where they were taken."""

    def __call__(self, text, **_):
        return types.SimpleNamespace(input_ids=list(range(len(text.split()))))


def paragraphs(text: str) -> set[str]:
    return {" ".join(paragraph.split()) for paragraph in text.split("\n\n")}


def test_both_splits_hold_enough_for_the_default_model(default_model):
    counts = {
        split: len(default_model.tokenizer(load_text("pydoc", split), verbose=False).input_ids)
        for split in corpora.SPLITS
    }
    assert counts["eval"] >= 20_000 and counts["calibration"] >= 70_000


def test_no_paragraph_stands_in_both_splits():
    evaluation, calibration = paragraphs(load_text("pydoc", "eval")), paragraphs(load_text("pydoc", "calibration"))
    assert len(evaluation) > 300 and len(calibration) > 1000
    assert evaluation & calibration == set()


def test_whole_topics_are_held_out_though_others_quote_them():
    from pydoc_data.topics import topics

    # "naming" repeats most of "execmodel", which is held out.
    held_out = paragraphs(topics["execmodel"])
    assert len(held_out & paragraphs(topics["naming"])) >= 10
    # All but its headings, which lose their rules.
    assert len(held_out & paragraphs(load_text())) > 0.8 * len(held_out)
    assert all(name in topics for name in corpora._EVAL_TOPICS)


def test_the_text_is_plain():
    for split in corpora.SPLITS:
        lines = load_text("pydoc", split).split("\n")
        assert not any(set(line) <= set("*=-~^") and len(line) > 3 for line in lines)
        assert not any(line != line.rstrip() for line in lines) and "\n\n\n" not in "\n".join(lines)
    assert load_text().startswith("Objects, values and types\n\n*Objects* are Python’s abstraction for data.")


def test_a_text_is_the_same_each_time_and_is_told_apart_by_its_digest():
    assert load_text() is load_text("pydoc", "eval")
    assert text_sha256("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert text_sha256(load_text()) != text_sha256(load_text(split="calibration"))


def test_a_file_of_ones_own_is_split_at_a_paragraph(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("\n\n".join(f"paragraph {number:02d}" for number in range(10)), encoding="utf-8")
    calibration, evaluation = load_text(path, "calibration"), load_text(str(path), "eval")
    assert calibration.split("\n\n") == [f"paragraph {number:02d}" for number in range(8)]
    assert evaluation.split("\n\n") == ["paragraph 08", "paragraph 09"]
    path.write_text("short\n\n" + "long " * 500, encoding="utf-8")
    assert load_text(path, "calibration") == "short" and load_text(path, "eval").startswith("long")


def test_a_file_that_cannot_be_split_or_read_is_refused(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("one paragraph", encoding="utf-8")
    with pytest.raises(ValueError, match="with 1 paragraphs'; takes a text of at least two paragraphs"):
        load_text(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="which is not UTF-8 text"):
        load_text(path)


def test_source_code_is_a_text_too_and_its_splits_share_no_paragraph(default_model):
    evaluation, calibration = (paragraphs(load_text("python-source", split)) for split in ("eval", "calibration"))
    assert len(evaluation) > 400 and len(calibration) > 2500 and evaluation & calibration == set()
    text = load_text("python-source")
    assert text.startswith('"""Text wrapping and filling.\n"""') and "\n    def fill(self, text):\n" in text
    assert all(line == line.rstrip() for line in text.split("\n"))
    # Code of other modules than those, and prose of neither: what is another kind of text shares nothing.
    assert evaluation & (paragraphs(load_text("pydoc")) | paragraphs(load_text("pydoc", "calibration"))) == set()
    assert len(default_model.tokenizer(text, verbose=False).input_ids) > 25_000


def test_source_code_is_read_not_run(monkeypatch):
    corpora._python_source.cache_clear()
    missing = {name: sys.modules.pop(name, None) for name in ("mailbox", "sched")}
    load_text("python-source", "calibration")
    assert "class Mailbox" in load_text("python-source", "calibration")
    assert not {"mailbox", "sched"} & set(sys.modules)
    sys.modules.update({name: module for name, module in missing.items() if module})


def test_a_python_without_its_source_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(corpora.sysconfig, "get_path", lambda _: str(tmp_path))
    corpora._python_source.cache_clear()
    with pytest.raises(CorpusUnavailable, match="came without the source of textwrap"):
        load_text("python-source")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("pydocs",),
            "name: got 'pydocs'; takes one of pydoc, python-source, wikitext-2 .*mean pydoc.*path of a text file",
        ),
        ((3,), "name: got '3'; takes one of pydoc"),
        (("pydoc", "test"), "split: got 'test'; takes one of calibration, eval"),
    ],
)
def test_unknown_names_and_splits_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_text(*arguments)


def test_wikitext_is_read_as_in_the_gptq_paper(monkeypatch):
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return {"text": ["", " = Title = \n", " A line . \n"]}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert load_text("wikitext-2", "eval") == "\n\n = Title = \n\n\n A line . \n"
    load_text("wikitext-2", "calibration")
    assert [options["split"] for _, options in asked] == ["test", "train"]
    assert asked[0][0] == ("Salesforce/wikitext", "wikitext-2-raw-v1")


def test_wikitext_without_a_network_or_its_package_says_what_to_do(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("no route to the host\nand much more")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(CorpusUnavailable, match=r"cannot be had \(no route to the host\).*\"pydoc\" needs no network"):
        load_text("wikitext-2")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(CorpusUnavailable, match='`datasets`, which is not installed .*"pydoc" needs no network'):
        load_text("wikitext-2")


def test_windows_are_pieces_of_the_text_in_the_number_asked_for():
    batch = token_batches(Words(), "word " * 100, n_samples=30, seq_len=7, seed=1)
    assert batch.shape == (30, 7) and batch.dtype == torch.int64
    assert torch.equal(batch - batch[:, :1], torch.arange(7).expand(30, 7))
    assert batch[:, 0].unique().numel() == 30  # no window twice


def test_the_seed_decides_and_the_global_state_does_not():
    text = "word " * 1000
    first = token_batches(Words(), text, 20, 5, seed=3)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert torch.equal(token_batches(Words(), text, 20, 5, seed=3), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(token_batches(Words(), text, 20, 5, seed=4), first)


def test_windows_come_from_everywhere():
    starts = token_batches(Words(), "word " * 64, n_samples=60, seq_len=5, seed=0)[:, 0]
    assert starts.sort().values.tolist() == list(range(60))  # all places that there are, first and last among them


def test_a_text_too_short_is_refused_not_padded():
    assert token_batches(Words(), "a b c d e", n_samples=3, seq_len=3, seed=0).shape == (3, 3)
    message = "text: got '5 tokens'; takes at least 6 tokens for 4 windows of 3 from different places"
    with pytest.raises(ValueError, match=message):
        token_batches(Words(), "a b c d e", n_samples=4, seq_len=3, seed=0)
    with pytest.raises(ValueError, match="text: got '0 tokens'"):
        token_batches(Words(), "", n_samples=1, seq_len=1, seed=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_samples": 0}, "n_samples: got 0; takes an integer of at least 1"),
        ({"n_samples": True}, "n_samples: got True"),
        ({"seq_len": 2.0}, "seq_len: got 2.0; takes an integer"),
        ({"seed": -1}, "seed: got -1"),
        ({"seed": 2**64}, "seed: got 18446744073709551616"),
        (
            {"text": "word " * 10**6, "n_samples": 500_000, "seq_len": 500_000},
            "these take 2000.0 GB and .* GB are free",
        ),
        ({"text": b"bytes"}, "text: got 'bytes'; takes a string"),
        ({"tokenizer": "gpt2"}, "tokenizer: got 'str'; takes a tokenizer"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = {"tokenizer": Words(), "text": "word " * 50, "n_samples": 2, "seq_len": 4, "seed": 0} | change
    with pytest.raises(ValueError, match=message):
        token_batches(**arguments)


def test_the_default_tokenizer_gives_back_the_text(default_model):
    text = load_text()
    batch = token_batches(default_model.tokenizer, text, n_samples=4, seq_len=64, seed=0)
    assert all(default_model.tokenizer.decode(row)[2:-2] in text for row in batch)
