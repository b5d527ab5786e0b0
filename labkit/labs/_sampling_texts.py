"""The texts of `sampling_lab` side by side, as HTML: a token that was not the model's likeliest is marked."""

from __future__ import annotations

import html

from labkit.labs._figures import ORANGE
from labkit.labs._sampling_result import TEXTS, SampledText, SamplingResult
from labkit.labs._speculative_tokens import VISIBLE

# A mark has its own line beside its tint, which lets the page's text colour through in a light and a dark theme.
STYLE = """<style>
.labkit-texts { margin: 8px 0 4px; color: var(--jp-ui-font-color1, #212121); }
.labkit-texts .labkit-asked { font-size: 13px; line-height: 1.6; color: var(--jp-ui-font-color2, #616161); }
.labkit-columns { display: flex; flex-wrap: wrap; gap: 10px; }
.labkit-text { flex: 1 1 210px; border: 1px solid var(--jp-border-color2, #d0d0d0); padding: 4px 8px;
  min-height: 10.5em; max-height: 20em; overflow-y: auto; font-size: 14px; line-height: 1.75; overflow-wrap: anywhere; }
.labkit-text b { display: block; font-size: 13px; }
.labkit-blank { opacity: 0.4; }
.labkit-unlikely { background: color-mix(in srgb, ORANGE 25%, transparent); border-bottom: 3px solid ORANGE; }
</style>""".replace("ORANGE", ORANGE)


def texts_html(result: SamplingResult) -> str:
    """Prompt, what the mark means, and one column a text; every text is escaped."""
    prompt = html.escape(" ".join(result.prompt_text.split()))
    mark = '<span class="labkit-unlikely">marked</span>: not the token that the model held the likeliest there'
    texts = {text.seed: text for text in result.texts}
    seeds = range(result.params.seed, result.params.seed + TEXTS)
    columns = "".join(_column(seed, texts.get(seed)) for seed in seeds)
    return (
        f'{STYLE}<div class="labkit-texts"><div class="labkit-asked">Prompt: {prompt} &nbsp; {mark}</div>'
        f'<div class="labkit-columns">{columns}</div></div>'
    )


def _column(seed: int, text: SampledText | None) -> str:
    head = f"<b>seed {seed}</b>" if text is None else f"<b>seed {seed}: {len(text.tokens)} tokens</b>"
    tokens = "" if text is None else "".join(map(_token, text.pieces, text.likeliest))
    return f'<div class="labkit-text">{head}{tokens}</div>'


def _token(piece: str, likeliest: bool) -> str:
    shown = "".join(_character(c) for c in piece) + ("<br>" if "\n" in piece else "")
    first = "<wbr>" if piece[:1].isspace() else ""
    return f"{first}<span>{shown}</span>" if likeliest else f'{first}<span class="labkit-unlikely">{shown}</span>'


def _character(character: str) -> str:
    """A blank between words reads as one; others are shown."""
    seen = VISIBLE.get(character)
    if seen is None or character == " ":
        return html.escape(character)
    return f'<span class="labkit-blank">{seen}</span>'
