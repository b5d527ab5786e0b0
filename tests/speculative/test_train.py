"""Training a head: data from the target's own answers, a loss that falls, a training that goes on where it stopped."""

import copy
import dataclasses

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from labkit.engine import Decoder
from labkit.models import LoadedModel, tiny_model
from labkit.speculative import EagleHead, train
from labkit.speculative._train_data import Sample, answers, make_rounds, read_samples
from labkit.speculative._train_eval import evaluate
from labkit.speculative._train_head import HeadTrainingConfig, new_head, train_head
from labkit.speculative._train_loss import EagleObjective, draft_vocabulary, in_batches
from labkit.speculative._train_prompts import ChatTemplate, not_held_out, passage_prompts, written_prompts
from labkit.speculative.prompts import KINDS, load_prompts

EOS = 0
TEMPLATE = "{% for m in messages %}U{{ m['content'] }}E{% endfor %}{% if add_generation_prompt %}A{% endif %}"


@pytest.fixture(scope="module")
def tokenizer():
    """A token a character, with a chat template of one letter for each role."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    characters = ["<end>", "<?>", *(chr(code) for code in range(32, 127)), "\n"]
    plain = Tokenizer(models.WordLevel({token: i for i, token in enumerate(characters)}, unk_token="<?>"))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>", unk_token="<?>")
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def target(tokenizer):
    """A model that mostly counts, since its head is its embedding moved by one: something that can be learned."""
    model = tiny_model(vocab_size=len(tokenizer), num_hidden_layers=1, tie_word_embeddings=False)
    embedding = torch.randn(len(tokenizer), 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(embedding)
        model.get_output_embeddings().weight.copy_(0.3 * embedding.roll(1, 0))
    model.eval().requires_grad_(False)
    return LoadedModel(model, tokenizer, "tiny")


@pytest.fixture(scope="module")
def samples(target):
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 98, (n,), generator=generator).tolist() for n in range(5, 29) for _ in range(6)]
    decoder = Decoder(target)
    return answers(decoder, prompts, EOS, generator, length=24, temperature=0.8)


def test_answers_are_the_targets_own(target):
    """Prompts of different lengths in one batch: each answer, greedy, is that of its prompt alone."""
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [11]]
    found = answers(Decoder(target), prompts, EOS, None, length=12, temperature=0.0)
    for prompt, sample in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        alone = Decoder(target).generate(ids, max_new_tokens=12, eos_token_id=EOS).sequences[0]
        assert sample.tokens.tolist() == alone.tolist()
        assert sample.prompt == len(prompt)
        _, hidden = Decoder(target).forward(alone[None, :-1], return_hidden=True)
        torch.testing.assert_close(sample.hidden, hidden[0], atol=2e-5, rtol=2e-5)


def test_the_chat_template_is_cut_where_the_text_stands(tokenizer):
    template = ChatTemplate(tokenizer)
    assert tokenizer.decode(template("hello")).replace(" ", "") == "UhelloEA"
    whole = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], add_generation_prompt=True)
    assert template("hello") == (whole["input_ids"] if hasattr(whole, "keys") else whole)


def test_held_out_prompts_are_kept_out():
    held = [load_prompts(kind)[3] for kind in KINDS]
    long = max(held, key=len)
    near = "Please: " + " ".join(long.split()[4:20]).upper() + " and so on"
    mine = "Write a poem about a kettle that has forgotten how to sing, in two short verses."
    assert not_held_out([*held, near, mine]) == [mine]


@pytest.mark.parametrize(
    ("prompt", "kept"),
    [
        ("How do kidneys work?", False),
        ("Explain to me what a lighthouse keeper would find in a bottle on a beach.", False),
        ("Tell me about spiders and the silk that they make.", False),
        ("How do I say no to a friend?", True),
        ("Write a short story about a baker.", True),
        ("What is the difference between jam and jelly?", True),
    ],
)
def test_what_asks_for_the_same_in_other_words_is_kept_out_too(prompt, kept):
    assert not_held_out([prompt]) == [prompt] * kept


def test_written_requests_are_filled_in_and_none_is_held_out():
    import random

    made = written_prompts(2000, random.Random(0))
    assert len(set(made)) == 2000
    assert not any(mark in text for text in made for mark in "{}")
    held = {text.casefold() for kind in KINDS for text in load_prompts(kind)}
    assert not held & {text.casefold() for text in made}
    assert written_prompts(50, random.Random(1)) == written_prompts(50, random.Random(1)) != made[:50]


def test_passages_come_from_the_calibration_split(default_model):
    import random

    from labkit.corpora import load_text

    made = list(passage_prompts(ChatTemplate(default_model.tokenizer), 6, random.Random(0)))
    assert len(set(made)) == 6
    texts = load_text("pydoc", "calibration"), load_text("python-source", "calibration")
    for index, prompt in enumerate(made):
        task, passage = prompt.split("\n\n", 1)
        assert task.endswith(":")
        assert passage in texts[index % 2]


def test_a_round_is_made_once_and_goes_on(target, tmp_path, monkeypatch):
    monkeypatch.setattr("labkit.speculative._train_data.self_prompts", lambda *_: [f"kettle {i}" for i in range(16)])
    monkeypatch.setattr("labkit.speculative._train_data.passage_prompts", lambda *_: iter(()))
    monkeypatch.setattr("labkit.speculative._train_data.written_prompts", lambda *_: [])
    held = make_rounds(target, tmp_path, 100, seed=0, length=8)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert held >= 100
    assert held == sum(len(sample.tokens) - sample.prompt for sample in read_samples(tmp_path))
    assert make_rounds(target, tmp_path, 100, seed=0, length=8) == held
    assert make_rounds(target, tmp_path, held + 1, seed=0, length=8) > held
    for name, content in made.items():
        assert (tmp_path / name).read_bytes() == content
    first = tmp_path / "round_0000.safetensors"
    first.unlink()
    make_rounds(target, tmp_path, held + 100, seed=0, length=8)
    assert first.read_bytes() == made[first.name], "a round hangs on its seed and number alone"
    with pytest.raises(ValueError, match="data"):
        make_rounds(target, tmp_path, 100, seed=1, length=8)


def test_the_vocabulary_is_of_the_commonest_tokens():
    sample = Sample(torch.tensor([7, 7, 7, 7, 7, 2, 3, 3, 5, 5, 5, 9], dtype=torch.int32), torch.zeros(11, 4), 5)
    ids, share = draft_vocabulary([sample], 12, 2)
    assert ids.tolist() == [3, 5]
    assert share == pytest.approx(5 / 7)


def test_the_loss_is_that_of_the_definition(target, samples):
    """One sample, place by place: what the target says one place on, and what the head says of it."""
    model = new_head(target, torch.arange(2, 90), samples, 0)
    sample = samples[40]
    objective = EagleObjective(model, target.model, [[sample]], from_answer=True)
    (loss, *_), (match, *_) = objective.losses([sample], 1)
    hidden, tokens = sample.hidden, sample.tokens.long()
    embedded = target.model.get_input_embeddings().weight[tokens[1:]]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        feature = model.unrolled([embedded[None, :-1]], hidden[None, :-1], model.rotary_table(len(tokens)))[0][0]
    output = target.model.get_output_embeddings().weight[2:90]
    wanted, said = (hidden[1:] @ output.T), (feature.float() @ output.T)
    rows = torch.arange(sample.prompt - 2, len(hidden) - 1)
    expected = -(wanted.softmax(-1) * said.log_softmax(-1)).sum(-1)[rows].mean()
    torch.testing.assert_close(loss, expected, atol=0.05, rtol=0.02)
    assert match == pytest.approx(float((wanted.argmax(-1) == said.argmax(-1))[rows].float().mean()), abs=0.05)


def test_padding_teaches_nothing(target, samples):
    """A short answer beside a long one: the loss is the mean over the places of both."""
    model = new_head(target, torch.arange(98), samples, 0)
    short, long = samples[0], samples[-1]
    objective = EagleObjective(model, target.model, [[short, long]], from_answer=True)

    def places(sample: Sample) -> int:
        return len(sample.hidden) - sample.prompt + 1

    for steps in (1, 3):
        together, _ = objective.losses([short, long], steps)
        a, _ = objective.losses([short], steps)
        b, _ = objective.losses([long], steps)
        for step in range(steps):
            n, m = places(short) - step, places(long) - step
            # A draft's later steps lose the places before the answer's begin.
            expected = (a[step] * (n + step) + b[step] * (m + step)) / (n + m + 2 * step)
            torch.testing.assert_close(together[step], expected, atol=0.03, rtol=0.03)


SETTINGS = HeadTrainingConfig(
    draft_vocab_size=98, steps=60, batch_size=8, unroll=2, learning_rate=3e-3, check_every=20, unrolled_share=0.5
)


def test_training_makes_a_head_that_is_accepted(target, samples, tmp_path):
    model, training, share = train_head(target, samples, SETTINGS, tmp_path / "state.safetensors")
    assert share == 1.0
    assert [look.step for look in training.checked] == [20, 40, 60]
    losses = training.state.losses
    assert sum(losses[20:30]) < 0.8 * sum(losses[:10])
    untrained = new_head(target, torch.arange(98), samples, 0)
    rates = []
    for network in (untrained, model):
        run = evaluate(
            target,
            EagleHead(network),
            target.tokenizer,
            prompts=["hello there", "what now", "x y z"],
            max_new_tokens=48,
        )
        rates.append(run.tokens_per_target_call)
    assert rates[1] > rates[0] + 0.1, rates


def test_a_training_goes_on_where_it_was_stopped(target, samples, tmp_path, monkeypatch):
    whole, _, _ = train_head(target, samples, SETTINGS, tmp_path / "whole.safetensors")

    original = EagleObjective.backward
    calls = []

    def interrupted(self, *arguments):
        calls.append(1)
        if len(calls) > 45:
            raise KeyboardInterrupt
        return original(self, *arguments)

    monkeypatch.setattr(EagleObjective, "backward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_head(target, samples, SETTINGS, tmp_path / "parts.safetensors")
    monkeypatch.setattr(EagleObjective, "backward", original)
    resumed, training, _ = train_head(target, samples, SETTINGS, tmp_path / "parts.safetensors")
    assert training.state.step == 60
    assert [look.step for look in training.checked] == [20, 40, 60]
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
    with pytest.raises(ValueError, match="learning_rate"):
        other = dataclasses.replace(SETTINGS, learning_rate=1e-3)
        train_head(target, samples, other, tmp_path / "parts.safetensors")
    with pytest.raises(ValueError, match="data"):
        train_head(target, samples[:-1], SETTINGS, tmp_path / "parts.safetensors")


def test_batches_hold_each_sample_once(samples):
    batches = in_batches(samples, 7)
    assert sorted(id(sample) for batch in batches for sample in batch) == sorted(map(id, samples))


def test_evaluation_counts_what_is_kept_by_place(target):
    """A perfect drafter keeps all, place by place; one that is wrong at every third place, what is known beforehand."""
    from tests.speculative.drafters import Scripted

    prompt = "hello there"
    ids = torch.tensor([ChatTemplate(target.tokenizer)(prompt)])
    script = Decoder(target).generate(ids, max_new_tokens=40).sequences[0, ids.shape[1] :].tolist()
    # An answer that ends early would cut a draft: then the end counts as another token.
    tokenizer = copy.deepcopy(target.tokenizer)
    tokenizer.eos_token = None
    options = {"prompts": [prompt], "num_assistant_tokens": 4, "max_new_tokens": 25}
    wrong = evaluate(target, Scripted([script], 98, lambda place: place % 3 == 0), tokenizer, **options)
    assert wrong.tokens_per_target_call == 3.0
    assert wrong.kept[:2] == (1.0, 1.0)
    assert wrong.kept[2] == 0.0


def test_the_command_from_nothing_to_a_head(target, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "load_model", lambda *_, **__: target)
    monkeypatch.setattr(train, "set_threads", lambda *_: 1)
    monkeypatch.setattr(
        "labkit.speculative._train_data.self_prompts", lambda *_: [f"kettle and pot {i}" for i in range(60)]
    )
    monkeypatch.setattr("labkit.speculative._train_data.passage_prompts", lambda *_: iter(()))
    monkeypatch.setattr("labkit.speculative._train_data.written_prompts", lambda *_: [])
    command = ["--out", str(tmp_path / "run"), "--tokens", "1200", "--answer-length", "16", "--draft-vocab-size", "60"]
    command += ["--steps", "6", "--check-every", "3", "--prompts", "1"]
    assert train.main(command) == 0
    out = capsys.readouterr().out
    assert "acceptance" in out
    head = EagleHead.load(tmp_path / "run" / "head.safetensors")
    assert head.model.config.draft_vocab_size == 60
    assert (tmp_path / "run" / "curve.html").stat().st_size > 1e5
    import json

    record = json.loads((tmp_path / "run" / "training.json").read_text())
    assert len(record["losses"]) == 6
    assert record["settings"]["answer_tokens"] >= 1200
    assert {run["kind"] for run in record["held_out"]} == set(KINDS)


@pytest.mark.parametrize(
    "wrong",
    ["--steps=0", "--learning-rate=nan", "--threads=0", "--dtype=foo", "--model=nope", "--tokens=0", "--prompts=0"]
    + ["--answer-length=0", "--prompts=-1", "--out=/dev/null/x"],
)
def test_the_command_refuses_in_a_line_before_anything_is_made(wrong, tmp_path, capsys) -> None:
    assert train.main(["--out", str(tmp_path), wrong]) == 2
    said = capsys.readouterr().err
    assert said.startswith("train: ") and said.count("\n") == 1
    assert not any(tmp_path.iterdir())
