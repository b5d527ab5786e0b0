import dataclasses
import math
import re

import pytest

from labkit.labs._speculative_result import PROPOSERS, Round, SpeculativeParams, SpeculativeResult
from labkit.labs._speculative_tokens import KINDS, Token, draft_lengths, tokens_of
from labkit.labs._speculative_trace import trace_html
from labkit.speculative.theory import expected_tokens
from tests.labs.speculative_fixtures import by_hand, call, costs, params, stats


def test_the_formulas_by_hand():
    calls = (call("abcd", 2, "abx", "residual"),)
    result = SpeculativeResult(params(4), "cpu", "float32", "", 5, calls=calls, stats=stats(10, 8, 4, 12))
    result = SpeculativeResult(**{**vars(result), "costs": {4: costs(4, draft_cost=0.05, verify_cost=1.0)}})
    assert result.alpha == 0.8 and result.tokens_a_call == 3.0
    # REFERENCES: at γ = 4, α = 0.8 the formula is 3.36, and at c = 0.05 it is 2.8x; the folk claim says 5x.
    assert result.formula() == pytest.approx(3.3616) and result.model() == pytest.approx(3.3616 / 1.2)
    assert result.folk == pytest.approx(5.0)
    assert result.model(0) == 1.0 and result.model(3) is None


def test_each_call_counts_with_as_many_tokens_as_it_drafted():
    calls = (call("ab", 2, "abc", "bonus"), call("a", 1, "ab", "bonus"), *[call("", 0, "x", "bonus")] * 2)
    found = {n: costs(n, draft_cost=0.0, verify_cost=1 + n / 10) for n in (1, 2, 3)}
    counts, new = stats(3, 3, 4, 7), {"max_new_tokens": 40}
    result = SpeculativeResult(params(2, **new), "cpu", "float32", "", 5, calls=calls, stats=counts, costs=found)
    assert result.drafted == 0.75 and result.share == 0.5 and result.depths(2) == [2, 1, 0, 0]
    assert result.formula() == pytest.approx((3 + 2 + 1 + 1) / 4) == result.tokens_a_call
    assert result.model() == pytest.approx((7 / 4) / ((1.2 + 1.1 + 1 + 1) / 4))
    # The one that stopped where it had to would have gone on; the others found no more.
    assert result.depths(3) == [3, 1, 0, 0] and result.depths(1) == [1, 1, 0, 0]
    assert result.model(3) == pytest.approx((8 / 4) / ((1.3 + 1.1 + 1 + 1) / 4))


def test_rounds_are_compared_one_by_one():
    rounds = (Round(0.010, 0.005), Round(0.030, 0.020), Round(0.010, 0.010))
    result = SpeculativeResult(params(2), "cpu", "float32", "", 5, rounds=rounds)
    assert result.speedups == [1.0, 1.5, 2.0] and result.speedup == 1.5
    assert (result.plain.median, result.speculative.median) == (0.010, 0.010)


@pytest.mark.parametrize(
    ("made", "tree", "expected"),
    [
        (call("abc", 3, "abcd", "bonus"), False, "accepted:a accepted:b accepted:c bonus:d"),
        (call("abc", 1, "ax", "residual"), False, "accepted:a rejected:b untested:c residual:x"),
        (call("abc", 0, "x", "residual"), False, "rejected:a untested:b untested:c residual:x"),
        (call("abc", 2, "ab", "cut"), False, "accepted:a accepted:b untested:c"),
        (call("", 0, "x", "bonus"), False, "plain:x"),
        (call("", 0, "x", "prompt"), False, "prompt:x"),
        (call("abcd", 2, "acx", "residual"), True, "accepted:a accepted:c rejected:b rejected:d residual:x"),
    ],
)
def test_each_token_of_a_call_is_named_by_what_became_of_it(made, tree, expected):
    tokens = tokens_of(made, 7, chr, tree)
    assert " ".join(f"{t.kind}:{t.text}" for t in tokens) == expected and {t.call for t in tokens} == {7}


def test_calls_at_the_end_that_have_no_room_do_not_count():
    whole, short = call("abc", 3, "abcd", "bonus"), call("a", 1, "ab", "bonus")
    assert draft_lengths([whole, whole, short], 3, 10) == [3, 3] and draft_lengths([short], 3, 2) == []
    assert draft_lengths([call("", 0, "x", "prompt"), whole], 3, 5) == [3]


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"num_assistant_tokens": 9}, "num_assistant_tokens: got 9; takes"),
        ({"temperature": 2.0}, "temperature: got 2.0; takes"),
        ({"proposer": "oracle"}, "proposer: got 'oracle'"),
        ({"shape": "tree"}, "shape: got 'tree'; takes chain with prompt lookup"),
    ],
)
def test_wrong_parameters_are_named(wrong, names):
    with pytest.raises(ValueError, match="^" + re.escape(names)):
        SpeculativeParams(**({"num_assistant_tokens": 2, "temperature": 0.0, "proposer": PROPOSERS[1]} | wrong))


def test_numbers_stand_beside_the_formulas():
    result = by_hand(4, 1.5)
    shown = {number.key: number for number in result.numbers()}
    assert (shown["acceptance_rate"].text, shown["acceptance_rate"].exact) == ("80.0%", 0.8)
    assert shown["acceptance_rate"].note == "kept 8 of 10 that were tested"
    assert "formula with this α: 3.36; MODELLED" in shown["tokens_per_target_call"].note
    assert shown["speedup"].text == "1.5x faster" and by_hand(4, 0.5).numbers()[5].text == "2x slower"
    # γ = 4 drafts at a tenth of a step each and 1.2 steps to verify.
    assert shown["modelled_speedup"].exact == pytest.approx(expected_tokens(0.8, 4) / 1.6)
    assert "measured is 29% below" in shown["modelled_speedup"].note
    assert shown["folk_speedup"].text == "5x" and "endless" in shown["folk_speedup"].note
    assert shown["plain_tokens_per_second"].exact == pytest.approx(1 / 0.015)
    assert shown["verify_cost"].exact == pytest.approx(1.2) and "5 tokens at once" in shown["verify_cost"].note
    groups = list(dict.fromkeys(number.group for number in result.numbers()))
    assert len(groups) == 3 and all("MEASURED" in group for group in groups)
    fewer = {number.key for number in by_hand(0, 1.0).numbers()}
    assert not fewer & {"acceptance_rate", "modelled_speedup", "folk_speedup", "draft_cost"}
    assert by_hand(4, 1.5, alpha=1.0).numbers()[-4].text == "endless"


def test_a_token_s_kind_is_seen_by_more_than_its_colour():
    tokens = tuple(Token(kind, kind, i) for i, kind in enumerate(KINDS))
    calls = (call("", 0, "x", "bonus"),) * len(KINDS)
    page = trace_html(dataclasses.replace(by_hand(3, 1.5), tokens=tokens, calls=calls))
    for kind, meaning in KINDS.items():
        assert f'<span class="labkit-token labkit-{kind}" title="{kind}">{kind}</span>' in page
        assert f"{kind}</span> 1: {meaning.replace(chr(39), '&#x27;')}" in page, "the legend counts them"
    style = dict(re.findall(r"\.labkit-(\w+) \{([^}]*)\}", page))
    without_colour = {kind: re.sub(r"#\w+|rgb\([^)]*\)", "", style[kind]) for kind in KINDS}
    assert len(set(without_colour.values())) == len(KINDS)
    assert all("line-through" in style[kind] for kind in ("rejected", "untested"))
    assert not any("line-through" in style[kind] for kind in KINDS if kind not in ("rejected", "untested"))
    # The page's own text colour over a tint: a dark theme's text stays light.
    assert not any(re.search(r"(^|[; ])color:", style[kind]) for kind in KINDS)


def test_every_text_is_escaped_and_blanks_are_seen():
    tokens = (Token(" <i>", "accepted", 0), Token("\n\n", "residual", 0), Token("\t&", "rejected", 1))
    page = trace_html(dataclasses.replace(by_hand(3, 1.5), tokens=tokens))
    assert "<i>" not in page and "<b>?" not in page and "Why &lt;b&gt;?" in page
    blank = '<span class="labkit-blank">{}</span>'.format
    assert f"{blank('·')}&lt;i&gt;" in page and f"{blank('↵')}{blank('↵')}</span><br>" in page
    assert f"{blank('⇥')}&amp;" in page
    assert page.count('class="labkit-call" title=') == 2, "one bar a call"


def test_the_text_form_tells_every_call():
    text = by_hand(3, 1.5).text()
    assert text.splitlines()[0] == (
        "speculative_lab: 3 drafted by prompt lookup, greedy, float32 weights, a chat prompt"
    )
    assert "cpu, bfloat16, 2 CPU threads" in text
    assert "1  2 of 3 kept  a b -c- +d+" in text and "2  3 of 3 kept  e f g +h+" in text
    assert re.search(r"γ 1: \S+x   γ 2: \S+x .*γ 8: ", text) and "speed-up" in text
    assert "endless" in by_hand(3, 1.5, alpha=1.0).text()


def test_an_endless_claim_is_no_ledger_line():
    lines = {m.name for m in by_hand(4, 1.5, alpha=1.0).measurements()}
    assert "speculative_lab.folk_speedup" not in lines and "speculative_lab.acceptance_rate" in lines
    assert all(math.isfinite(m.value) for m in by_hand(4, 1.5, alpha=1.0).measurements())
