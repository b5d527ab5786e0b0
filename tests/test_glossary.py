"""docs/glossary.md: sorted, without a term twice, and every chapter it names is there and speaks of the term."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"
SECTIONS = re.split(r"^### ", GLOSSARY.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
ENTRIES = {section.partition("\n")[0]: section.partition("\n")[2].strip() for section in SECTIONS}
LINK = re.compile(r"\[Chapter (\d\d)\]\(([^)]+)\)")


def terms():
    return [section.partition("\n")[0] for section in SECTIONS]


def test_terms_are_sorted_and_unique():
    folded = [term.casefold() for term in terms()]
    assert folded == sorted(set(folded)) and len(folded) > 60


@pytest.mark.parametrize("term", terms())
def test_a_term_has_a_short_text_and_a_notebook_that_is_there(term):
    text = ENTRIES[term]
    links = LINK.findall(text)
    assert links and len(LINK.sub("", text).split()) >= 8 and LINK.sub("", text).count(". ") <= 3
    for number, target in links:
        path = (GLOSSARY.parent / target).resolve()
        assert path.is_file() and path.parent == ROOT / "notebooks" and path.name.startswith(number)


def test_every_chapter_is_linked():
    chapters = {path.name[:2] for path in (ROOT / "notebooks").glob("0[0-6]_*.ipynb")}
    assert len(chapters) == 7 and {number for text in ENTRIES.values() for number, _ in LINK.findall(text)} >= chapters


# A word that the chapter uses for the term, where it is not the term itself.
_SAID = {
    "Continuous batching": "requests in flight",
    "Launch-bound": "launch",
    "ITL": "ITL",
    "LSE": "lse",
    "Top-1 agreement": "top-1",
}
_SAID |= {"Tensor parallelism": "tensor parallelism", "W4A16": "W8A8", "SQNR": "quantization-noise"}
_SAID |= {"Bits stored": "stored bits", "Bonus token": "bonus", "Split-KV": "split"}


@pytest.mark.parametrize("term", terms())
def test_the_chapter_speaks_of_the_term(term):
    said = _SAID.get(term, re.sub(r" \(.*\)$", "", term)).casefold()
    for _, target in LINK.findall(ENTRIES[term]):
        cells = json.loads((GLOSSARY.parent / target).read_text(encoding="utf-8"))["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells)
        assert said in text.casefold(), f"{target} never says {said}"
