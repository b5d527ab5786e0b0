"""`python -m tools.measured_table`: the README's table of what was measured, on which machine, from `data/recorded`.

Prints it; with `--write` puts it into README.md, between its two marks. A test compares the two.
"""

import sys
from collections.abc import Iterator

from labkit._paths import DATA
from labkit.engine.ladder import RUNGS, recorded_ladders
from labkit.engine.ladder.rungs import effective
from labkit.kv_cache.recorded import recorded_kv
from labkit.quantization.recorded import recorded_run
from labkit.speculative.recorded import recorded_head

README = DATA.parent / "README.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
Row = tuple[str, str, str, str]


def _quantization() -> Iterator[Row]:
    for method, bits in (("AWQ", 4), ("GPTQ", 4), ("RTN", 8)):
        run = recorded_run(method, bits, 64)
        loss = f"perplexity {run.perplexity / run.baseline - 1:+.1%}"
        yield f"{method}, {bits} bits in groups of 64", loss, run.machine, f"{run.date}, `make record`"


def _caches() -> Iterator[Row]:
    found = recorded_kv()
    for nbits in (8, 4):
        kept = found.one("labkit", nbits)
        figures = f"{kept.share:.0%} of bfloat16's bytes, perplexity {kept.loss:+.1%}"
        yield f"KV cache at {nbits} bits", figures, found.machine, f"{found.date}, `make record-kv`"


def _head() -> Iterator[Row]:
    found = recorded_head()
    for gamma in (2, 4):
        run = found.on("chat", gamma)
        figures = f"{run.tokens_per_target_call:.2f} tokens a call, acceptance {run.acceptance_rate:.0%}"
        command = f"{found.date}, `python -m labkit.speculative.train`"
        yield f"EAGLE head, γ = {gamma}, {run.prompts} chat prompts", figures, found.machine, command


def _ladders() -> Iterator[Row]:
    for name, ladder in recorded_ladders().items():
        where = (ladder.where["machine"], f"{ladder.where['date']}, `make record-ladder`")
        base, best = ladder.of("transformers as it comes, float32"), ladder.fastest
        figures = f"{best.tokens_per_second:.0f} tokens/s, {ladder.speedup(best, base):.2f}x {base.title}; "
        figures += (
            f"{best.weight_bytes / base.weight_bytes:.2f} of its weight bytes, perplexity {ladder.loss(best):+.1%}"
        )
        rungs = " + ".join(RUNGS[rung].title for rung in effective(best.rungs))
        yield f"{name}, {ladder.prompt_tokens} prompt tokens: {rungs}", figures, *where


def table() -> str:
    """In Markdown."""
    rows = [*_quantization(), *_caches(), *_head(), *_ladders()]
    lines = ["| what | RECORDED | machine | date, command |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def put_into(text: str) -> str:
    """`text` with the table between its marks. Errors: ValueError where it has none."""
    if BEGIN not in text or END not in text:
        raise ValueError(f"README.md: takes the lines {BEGIN} and {END}")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


def main(arguments: list[str] | None = None) -> int:
    """Print, or write."""
    if "--write" in (sys.argv[1:] if arguments is None else arguments):
        README.write_text(put_into(README.read_text(encoding="utf-8")), encoding="utf-8")
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
