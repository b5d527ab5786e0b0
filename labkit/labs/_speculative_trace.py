"""The text of `speculative_lab`, token by token, as HTML: what was drafted and kept, refused, or the target's own."""

from __future__ import annotations

import html
from collections import Counter
from itertools import groupby

from labkit.labs._figures import COLOURS
from labkit.labs._speculative_result import SpeculativeResult
from labkit.labs._speculative_tokens import EMITTED, KINDS, VISIBLE, Token

_SHOWN_PROMPT = 160


def _tint(kind: str, alpha: float) -> str:
    """Over a light or a dark page: the text keeps the page's own colour."""
    colour = COLOURS[kind]
    return f"rgb({' '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))} / {alpha:.0%})"


# A kind has its own line and shape beside its colour.
STYLE = f"""<style>
.labkit-trace {{ max-width: 78em; margin: 8px 0 4px; color: var(--jp-ui-font-color1, #212121); }}
.labkit-legend {{ font-size: 13px; line-height: 2; }}
.labkit-legend > span {{ margin-right: 16px; white-space: nowrap; }}
.labkit-asked {{ font-size: 13px; line-height: 1.5; color: var(--jp-ui-font-color2, #616161); }}
.labkit-tokens {{ font-family: var(--jp-code-font-family, monospace); font-size: 15px; line-height: 2.1;
  overflow-wrap: anywhere; min-height: 8.4em; max-height: 24em; overflow-y: auto; padding: 4px 8px;
  border: 1px solid var(--jp-border-color2, #d0d0d0); }}
.labkit-call {{ border-left: 2px solid var(--jp-border-color1, #9e9e9e); margin-left: 3px; padding-left: 3px; }}
.labkit-token {{ padding: 1px 1px; border-radius: 2px; }}
.labkit-blank {{ opacity: 0.5; }}
.labkit-accepted {{ background: {_tint("accepted", 0.2)}; border-bottom: 3px solid {COLOURS["accepted"]}; }}
.labkit-rejected {{ background: {_tint("rejected", 0.16)}; text-decoration: line-through 2px; }}
.labkit-untested {{ opacity: 0.6; text-decoration: line-through 1px; }}
.labkit-residual {{ background: {_tint("residual", 0.3)}; border: 2px solid {COLOURS["residual"]};
  font-weight: 700; }}
.labkit-bonus {{ background: {_tint("bonus", 0.22)}; border-bottom: 4px double {COLOURS["bonus"]};
  font-weight: 700; }}
.labkit-plain {{ border-bottom: 2px dotted {COLOURS["plain"]}; }}
.labkit-prompt {{ border-bottom: 1px solid {COLOURS["prompt"]}; }}
</style>"""


def trace_html(result: SpeculativeResult) -> str:
    """Legend with counts, prompt, and the tokens so far, those of a call behind one bar; every text is escaped."""
    text = " ".join(result.prompt_text.split())
    short = text if len(text) <= _SHOWN_PROMPT else f"{text[:_SHOWN_PROMPT]}…"
    prompt = f"Prompt, {result.prompt_tokens} tokens: {html.escape(short)}"
    calls = "".join(_call_html(result, index, list(own)) for index, own in groupby(result.tokens, lambda t: t.call))
    return (
        f'{STYLE}<div class="labkit-trace"><div class="labkit-asked">{prompt}</div>{_legend(result)}'
        f'<div class="labkit-tokens">{calls}</div></div>'
    )


def _legend(result: SpeculativeResult) -> str:
    counts = Counter(token.kind for token in result.tokens)
    items = "".join(
        f'<span><span class="labkit-token labkit-{kind}">{kind}</span> {counts[kind]}: {html.escape(meaning)}</span> '
        for kind, meaning in KINDS.items()
        if counts[kind]
    )
    bar = '<span><span class="labkit-call">&nbsp;</span>a bar: one call of the target</span>' if counts else ""
    return f'<div class="labkit-legend">{items}{bar}</div>'


def _call_html(result: SpeculativeResult, index: int, tokens: list[Token]) -> str:
    call = result.calls[index]
    kept = f"{len(call.drafted)} drafted, {call.n_accepted} kept, " if call.drafted else ""
    grew = f"{len(call.emitted)} token{'' if len(call.emitted) == 1 else 's'}"
    said = "the prompt's pass" if call.kind == "prompt" else f"call {index}: {kept}{grew}"
    return f'<wbr><span class="labkit-call" title="{html.escape(said)}">{"".join(map(_token_html, tokens))}</span>'


def _token_html(token: Token) -> str:
    # A line may break before a blank; of what is not in the text, a line end is shown and does not break it.
    shown = "".join(_character(c) for c in token.text)
    first = "<wbr>" if token.text[:1].isspace() else ""
    ends = "<br>" if "\n" in token.text and token.kind in EMITTED else ""
    return f'{first}<span class="labkit-token labkit-{token.kind}" title="{token.kind}">{shown}</span>{ends}'


def _character(character: str) -> str:
    seen = VISIBLE.get(character)
    return html.escape(character) if seen is None else f'<span class="labkit-blank">{seen}</span>'
