"""quantize_: what it does to a model, what it refuses before it touches one, and what it leaves when it fails."""

import contextlib
import hashlib
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from transformers import OPTConfig, OPTForCausalLM, PreTrainedModel

import labkit.quantization.gptq as gptq_room
import labkit.quantization.rtn as rtn_room
from labkit.models import LoadedModel, tiny_model
from labkit.quantization import (
    GPTQConfig,
    QuantizationInterrupted,
    QuantLinear,
    RTNConfig,
    quantize_,
    weight_bytes,
)
from labkit.quantization.calibration import LayerResult, LayerTask
from labkit.quantization.gptq import gptq
from labkit.quantization.packing import pack_weight
from labkit.quantization.rtn import round_to_nearest

LAYER = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
NAMES = [f"model.layers.{i}.{name}" for i in range(2) for name in LAYER]


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 256, (6, 24))


def opt(**fields: object) -> PreTrainedModel:
    shape = {"vocab_size": 128, "hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return OPTForCausalLM(OPTConfig(**shape | {"max_position_embeddings": 64} | fields)).eval()


def digest(model: nn.Module) -> dict[str, str]:
    """Of every tensor of a model, and the kind of every module."""
    found = {
        name: hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in model.state_dict().items()
    }
    return found | {name: type(module).__name__ for name, module in model.named_modules()}


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def quantized(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, QuantLinear)]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("group", [16, -1])
def test_every_matrix_is_replaced_by_its_rounding(bits: int, sym: bool, group: int) -> None:
    model, reference, config = tiny_model(), tiny_model(), RTNConfig(bits, group, sym)
    quantize_(model, config, progress=False)
    assert quantized(model) == NAMES and type(model.lm_head) is nn.Linear
    with torch.no_grad():
        for name in NAMES:
            expected = round_to_nearest(reference.get_submodule(name).weight, config)
            mine = model.get_submodule(name).portable()
            assert all(torch.equal(mine.tensors[key], tensor) for key, tensor in expected.tensors.items())
            reference.get_submodule(name).weight.copy_(expected.dequantize())
        tokens = torch.randint(0, 256, (2, 16))
        torch.testing.assert_close(model(tokens).logits, reference(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("desc_act", [True, False])
def test_each_layer_is_rounded_on_what_the_quantized_layers_before_it_give(ids: torch.Tensor, desc_act: bool) -> None:
    model, config = tiny_model(), GPTQConfig(3, 16, desc_act=desc_act)
    quantize_(model, config, ids, progress=False)
    # By hand: the same matrices in a float model, set to what they stand for, one input after the other.
    reference, seen = tiny_model(), {}
    with torch.no_grad():
        for i in range(2):
            layer = f"model.layers.{i}."
            keep = [(n, reference.get_submodule(n)) for n in NAMES if n.startswith(layer)]
            handles = [m.register_forward_pre_hook(lambda _, a, n=n: seen.__setitem__(n, a[0])) for n, m in keep]
            reference(ids)
            for handle in handles:
                handle.remove()
            for name, linear in keep:
                x = seen[name].flatten(0, 1)
                rounded = gptq(linear.weight, x.T @ x / len(x), config)
                expected = pack_weight(rounded.codes, rounded.grid, sym=False, g_idx=rounded.g_idx)
                mine = model.get_submodule(name).portable()
                assert (mine.codes() == expected.codes()).float().mean() > 0.97, name
                linear.weight.copy_(mine.dequantize())
    first = seen["model.layers.1.self_attn.q_proj"]
    whole = tiny_model()
    got = {}
    whole.get_submodule("model.layers.1.self_attn.q_proj").register_forward_pre_hook(
        lambda _, args: got.__setitem__("x", args[0])
    )
    whole(ids)
    assert not torch.allclose(first, got["x"], atol=1e-3)


def test_statistics_of_layer_two_come_from_the_quantized_layer_one(
    ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: list[LayerTask] = []
    original = gptq_room.quantize_layer
    monkeypatch.setattr(gptq_room, "quantize_layer", lambda task: tasks.append(task) or original(task))
    model = tiny_model()
    quantize_(model, GPTQConfig(2, 16), ids, progress=False)
    # Layer 2's input is the same in the finished model, whose layer 1 is quantized.
    found = {}
    name = "model.layers.1.self_attn.q_proj"
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: found.__setitem__("x", args[0]))
    with torch.no_grad():
        model(ids)
    handle.remove()
    x = found["x"].flatten(0, 1).double()
    statistics = tasks[1].statistics[name]
    torch.testing.assert_close(statistics.gram.double(), x.T @ x / len(x), rtol=1e-4, atol=1e-5)
    shared = [tasks[1].statistics[f"model.layers.1.self_attn.{n}_proj"] for n in "qkv"]
    assert shared[0] is shared[1] is shared[2]


@pytest.mark.parametrize("left", [("lm_head",), ()])
def test_the_last_layer_runs_for_its_statistics_alone(left: tuple, ids: torch.Tensor) -> None:
    """Its output would be made once more, with every sample, for nobody: a head is fed by the model itself."""
    model, passes = tiny_model(num_hidden_layers=3), []
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, i=i: passes.append(i))
    quantize_(model, GPTQConfig(4, 32), ids, modules_to_not_convert=left, progress=False)
    n, whole = len(ids), 0 if left else len(ids)
    # The first sample goes through the float layers to see what each is called with; the last one stops it.
    assert [passes.count(i) for i in range(3)] == [2 * n + 1 + whole, 2 * n + 1 + whole, n + whole]


def test_names_of_matrices_to_leave_alone(ids: torch.Tensor) -> None:
    for left, expected in (
        (["lm_head", "mlp.down_proj"], [n for n in NAMES if "down_proj" not in n]),
        (["lm_head", "layers.0"], [n for n in NAMES if "layers.1" in n]),
        (("lm_head", "model.layers.1.self_attn.q_proj"), [n for n in NAMES if n != "model.layers.1.self_attn.q_proj"]),
    ):
        model = tiny_model()
        quantize_(model, RTNConfig(4, 16), progress=False, modules_to_not_convert=left)
        assert quantized(model) == expected
    # A layer of which nothing is quantized is passed through, and what comes after still sees its output.
    model = tiny_model()
    report = quantize_(model, GPTQConfig(4, 16), ids, progress=False, modules_to_not_convert=["lm_head", "layers.0"])
    assert [m.name for m in report.matrices] == quantized(model) == NAMES[7:]
    alone = tiny_model()
    quantize_(alone, GPTQConfig(4, 16), ids, progress=False, modules_to_not_convert=["lm_head", "layers.0", "mlp"])
    assert torch.equal(
        model.model.layers[1].self_attn.q_proj.portable().codes(),
        alone.model.layers[1].self_attn.q_proj.portable().codes(),
    )


@pytest.mark.parametrize("config", [RTNConfig(4, 32), GPTQConfig(4, 32)])
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_quantized_when_asked_for(config: object, tied: bool, ids: torch.Tensor) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    table = model.model.embed_tokens.weight
    before = table.clone()
    report = quantize_(model, config, ids, modules_to_not_convert=(), progress=False)
    assert quantized(model) == [*NAMES, "lm_head"] and report.matrices[-1].name == "lm_head"
    assert report.matrices[-1].error < 0.05
    assert model.model.embed_tokens.weight is table and torch.equal(table, before)
    head = model.lm_head.portable().dequantize()
    assert not torch.equal(head, table)
    hidden = model.model(ids).last_hidden_state
    torch.testing.assert_close(model(ids).logits, hidden @ head.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", [RTNConfig(4, 32), GPTQConfig(4, 32)])
def test_bits_of_single_matrices(config: object, ids: torch.Tensor) -> None:
    model = tiny_model()
    wanted = {NAMES[0]: 8, NAMES[5]: 2, NAMES[13]: 3}
    report = quantize_(model, config, ids, bits_per_module=wanted, progress=False)
    for matrix in report.matrices:
        weight = model.get_submodule(matrix.name).weight
        assert weight.bits == matrix.bits == wanted.get(matrix.name, 4)
    plain = tiny_model()
    quantize_(plain, config, ids, progress=False)
    # k and v read what q reads; that q has other bits changes nothing for them.
    for name in NAMES[1:3]:
        assert torch.equal(model.get_submodule(name).portable().codes(), plain.get_submodule(name).portable().codes())


@pytest.mark.parametrize("config", [RTNConfig(4, 32), RTNConfig(8, 64), GPTQConfig(4, 32), GPTQConfig(3, 16)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(config: object, dtype: torch.dtype, ids: torch.Tensor) -> None:
    model, reference = tiny_model().to(dtype), tiny_model()
    quantize_(LoadedModel(model, None, "tiny"), config, ids, progress=False)
    assert {p.dtype for p in model.parameters()} == {dtype}
    logits = model(ids).logits
    assert logits.dtype == dtype and logits.isfinite().all()
    with torch.no_grad():
        for name in NAMES:
            reference.get_submodule(name).weight.copy_(model.get_submodule(name).portable().dequantize())
        expected = reference(ids).logits
    share = (logits.float() - expected).norm() / expected.norm()
    assert share < (0.05 if dtype == torch.bfloat16 else 0.01)


@pytest.mark.parametrize("config", [RTNConfig(4, 32), GPTQConfig(4, 32)])
@pytest.mark.parametrize("fields", [{}, {"word_embed_proj_dim": 32, "do_layer_norm_before": False}])
def test_a_model_of_another_family(config: object, fields: dict) -> None:
    model = opt(**fields)
    ids, names = torch.randint(0, 128, (6, 24)), [n for n, m in model.named_modules() if type(m) is nn.Linear]
    with torch.no_grad():
        before = model(ids).logits
    report = quantize_(model, config, ids, progress=False)
    assert set(quantized(model)) == set(names) - {"lm_head"} == {m.name for m in report.matrices}
    assert all(m.error < 0.05 for m in report.matrices)
    q_proj = model.model.decoder.layers[0].self_attn.q_proj
    assert q_proj.bias is not None and not q_proj.bias.requires_grad
    after = model(ids).logits
    assert (after - before).norm() < 0.3 * before.norm() and hooks(model) == 0


def test_gradients_and_modes(ids: torch.Tensor) -> None:
    for training in (True, False):
        model = tiny_model().train(training)
        quantize_(model, GPTQConfig(4, 32), ids, progress=False)
        assert {module.training for module in model.modules()} == {training}
        assert not any(tensor.requires_grad for tensor in [*model.parameters(), *model.buffers()])
        assert not model(ids).logits.requires_grad and hooks(model) == 0
    model = tiny_model().requires_grad_(True)
    quantize_(model, GPTQConfig(4, 32), ids, progress=False)
    # What is not replaced keeps its state.
    assert model.model.norm.weight.requires_grad
    for name in NAMES:
        tensors = [*model.get_submodule(name).parameters(), *model.get_submodule(name).buffers()]
        assert not any(tensor.requires_grad for tensor in tensors)


def test_dropout_does_not_disturb_calibration() -> None:
    ids = torch.randint(0, 128, (4, 16))
    models = [opt(dropout=0.5) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, training in zip(models, (True, False), strict=True):
        quantize_(model.train(training), GPTQConfig(4, 32), ids, progress=False)
    a, b = (model.model.decoder.layers[1].fc1.portable() for model in models)
    assert torch.equal(a.codes(), b.codes()) and models[0].training and not models[1].training


def test_float_weights_go_layer_by_layer(ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    for room, config in ((rtn_room, RTNConfig(4, 32)), (gptq_room, GPTQConfig(4, 32))):
        model = tiny_model(num_hidden_layers=3)
        held = [weakref.ref(layer.mlp.up_proj.weight) for layer in model.model.layers]
        alive: list[list[bool]] = []
        original = room.quantize_layer

        def spy(task: LayerTask, original: Callable = original, held: list = held, alive: list = alive) -> LayerResult:
            alive.append([reference() is not None for reference in held])
            return original(task)

        monkeypatch.setattr(room, "quantize_layer", spy)
        quantize_(model, config, ids, progress=False)
        assert alive == [[True] * 3, [False, True, True], [False, False, True]]
        assert not any(reference() is not None for reference in held)


def with_nan(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.down_proj.weight[5, 7] = float("nan")


def with_infinity(model: PreTrainedModel) -> None:
    model.model.layers[1].self_attn.o_proj.weight[0, 0] = -float("inf")


GOOD = torch.zeros(2, 16, dtype=torch.long)


@pytest.mark.parametrize(
    ("config", "calibration", "options", "says"),
    [
        (GPTQConfig(4, 32), None, {}, "^calibration: got None"),
        (GPTQConfig(4, 32), [], {}, "^calibration: got 'no samples'"),
        (GPTQConfig(4, 32), GOOD[:0], {}, "^calibration: got 'shape \\(0, 16\\)'"),
        (GPTQConfig(4, 32), torch.zeros(1, 33, dtype=torch.long), {}, "^calibration: got .* 2 to 32 tokens"),
        (GPTQConfig(4, 32), [GOOD[0], GOOD[0, :5]], {}, "^calibration: got 'sample 1 of 5 tokens"),
        (GPTQConfig(4, 32), GOOD + 256, {}, "^calibration: got 'ids from 256 to 256'"),
        (RTNConfig(4, 32), GOOD - 1, {}, "^calibration: got 'ids from -1 to -1'"),
        (GPTQConfig(4, 48), GOOD, {}, "^group_size: got 48; .* 64 input features of model.layers.0.*: 16, 32, 64, -1"),
        (RTNConfig(4, 128), None, {}, "^group_size: got 128"),
        ({"bits": 4}, None, {}, "^config: got 'dict'"),
        (RTNConfig, None, {}, "^config: got 'type'"),
        (None, None, {}, "^config: got 'NoneType'"),
        (RTNConfig(4, 32), None, {"bits_per_module": {"lm_head": 4}}, "^bits_per_module: got 'lm_head'"),
        (
            RTNConfig(4, 32),
            None,
            {"bits_per_module": {"model.layers.0.mlp.up_prj": 4}},
            "did you mean model.layers.0.mlp.up_proj",
        ),
        (RTNConfig(4, 32), None, {"bits_per_module": {NAMES[0]: 5}}, r"^bits_per_module\['model.layers.0.*q_proj'\]"),
        (RTNConfig(4, 32), None, {"bits_per_module": {NAMES[0]: 4.0}}, r"^bits_per_module\['model.layers.0.*q_proj'\]"),
        (RTNConfig(4, 32), None, {"modules_to_not_convert": "lm_head"}, "^modules_to_not_convert: got 'lm_head'"),
        (RTNConfig(4, 32), None, {"modules_to_not_convert": ["model", "lm_head"]}, "^modules_to_not_convert: got"),
    ],
)
def test_refused_before_anything_is_touched(config: object, calibration: object, options: dict, says: str) -> None:
    model = tiny_model(max_position_embeddings=32).train()
    before = digest(model)
    with pytest.raises(ValueError, match=says):
        quantize_(model, config, calibration, progress=False, **options)
    assert digest(model) == before and model.training and hooks(model) == 0


@pytest.mark.parametrize("break_it", [with_nan, with_infinity])
@pytest.mark.parametrize("config", [RTNConfig(4, 32), GPTQConfig(4, 32)])
def test_weights_that_are_not_finite(break_it: Callable, config: object) -> None:
    model = tiny_model()
    break_it(model)
    before = digest(model)
    with pytest.raises(ValueError, match="^model: got 'NaN or an infinity in model.layers.1"):
        quantize_(model, config, GOOD, progress=False)
    assert digest(model) == before
    # One that is to be left alone may be what it likes.
    left = ["lm_head", "down_proj", "o_proj"]
    quantize_(model, RTNConfig(4, 32), progress=False, modules_to_not_convert=left)


def test_what_is_no_model() -> None:
    for thing in (nn.Linear(4, 4), None, "smollm2-135m", nn.ModuleList()):
        with pytest.raises(ValueError, match="^model: got"):
            quantize_(thing, RTNConfig(4, 32))


@pytest.mark.parametrize("first", [RTNConfig(4, 32), GPTQConfig(4, 32)])
def test_quantizing_twice_is_refused(first: object, ids: torch.Tensor) -> None:
    model = tiny_model()
    quantize_(model, first, ids, progress=False)
    before = digest(model)
    for again in (RTNConfig(8, 32), GPTQConfig(8, 32)):
        with pytest.raises(ValueError, match=f"^model: got 'a model in which 14 modules are quantized, {NAMES[0]}"):
            quantize_(model, again, ids, progress=False)
    assert digest(model) == before


@contextlib.contextmanager
def failing(room: object, at: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The algorithm raises at its call number `at`, from 0, after having done its work."""
    calls, original = [], room.quantize_layer

    def broken(task: LayerTask) -> LayerResult:
        result = original(task)
        calls.append(task.name)
        if len(calls) == at + 1:
            raise error
        return result

    with monkeypatch.context() as patch:
        patch.setattr(room, "quantize_layer", broken)
        yield


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt(), MemoryError(), SystemExit(1)])
@pytest.mark.parametrize(("room", "config"), [(rtn_room, RTNConfig(4, 32)), (gptq_room, GPTQConfig(4, 32))])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_failure_names_what_changed_and_the_rest_is_as_it_was(
    error: BaseException, room: object, config: object, at: int, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, whole = tiny_model(num_hidden_layers=3).train(), tiny_model(num_hidden_layers=3)
    before = digest(model)
    quantize_(whole, config, ids, progress=False)
    with failing(room, at, error, monkeypatch), pytest.raises(QuantizationInterrupted) as caught:
        quantize_(model, config, ids, progress=False)
    changed = [f"model.layers.{i}.{name}" for i in range(at) for name in LAYER]
    assert list(caught.value.converted) == changed == quantized(model)
    assert caught.value.__cause__ is error and type(error).__name__ in str(caught.value)
    says = "none; everything else is unchanged."
    if at:
        says = (
            f"model.layers.0 to model.layers.{at - 1} ({7 * at} matrices); outside of these layers nothing is changed."
        )
    assert f"Quantized so far: {says}" in str(caught.value)
    after = digest(model)
    for name, value in before.items():
        if not any(name.startswith(done) for done in changed):
            assert after[name] == value, name
    finished = digest(whole)
    assert all(after[name] == finished[name] for name in after if any(name.startswith(done) for done in changed))
    assert model.training and hooks(model) == 0
    if at:
        with pytest.raises(ValueError, match="load it again"):
            quantize_(model, config, ids, progress=False)
    else:
        quantize_(model, config, ids, progress=False)


@pytest.mark.parametrize("at", [0, 3, 6, 10])
def test_an_interrupt_between_two_matrices_leaves_whole_layers(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, written, original = tiny_model(), [], nn.Module.__setattr__

    def interrupted(self: nn.Module, name: str, value: object) -> None:
        if isinstance(value, QuantLinear):
            written.append(name)
            if len(written) == at + 1:
                raise KeyboardInterrupt
        original(self, name, value)

    with monkeypatch.context() as patch, pytest.raises(QuantizationInterrupted) as caught:
        patch.setattr(nn.Module, "__setattr__", interrupted)
        quantize_(model, RTNConfig(4, 32), progress=False)
    assert quantized(model) == list(caught.value.converted) == NAMES[: 7 * (at // 7 + 1)]
    assert f"({len(quantized(model))} matrices)" in str(caught.value)


def test_a_failure_in_the_forward_pass(ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    before = digest(model)
    with monkeypatch.context() as patch, pytest.raises(QuantizationInterrupted, match="so far: none") as caught:
        patch.setattr(model.model.layers[0].mlp, "forward", lambda x: 1 / 0)
        quantize_(model, GPTQConfig(4, 32), ids, progress=False)
    assert isinstance(caught.value.__cause__, ZeroDivisionError) and caught.value.converted == ()
    assert digest(model) == before and hooks(model) == 0


def test_a_hessian_that_is_raised_is_in_the_notes(ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    original = gptq_room.quantize_layer

    def spoilt(task: LayerTask) -> LayerResult:
        gram = task.statistics[next(iter(task.linears))].gram
        gram -= 0.3 * gram.diagonal().mean() * torch.eye(len(gram))
        return original(task)

    monkeypatch.setattr(gptq_room, "quantize_layer", spoilt)
    report = quantize_(tiny_model(), GPTQConfig(4, 32), ids, progress=False)
    assert report.notes[0].startswith(", ".join(NAMES[:3]) + ": the Hessian is not positive definite: damp_percent")
    assert report.notes[0] in repr(report)


@pytest.mark.parametrize("interrupted", [True, False])
@torch.no_grad()
def test_folds_are_written_with_their_layer_and_only_then(interrupted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an algorithm folds into the operation before goes in once with the layer's matrices, or not at all."""
    original, seen = rtn_room.quantize_layer, []
    model = tiny_model()
    for layer in model.model.layers:
        layer.input_layernorm.weight.mul_(2.0)

    def folding(task: LayerTask) -> LayerResult:
        norm = task.module.input_layernorm.weight
        seen.append(norm.clone())
        if len(seen) == 2:
            raise RuntimeError("second layer")
        return LayerResult(original(task).replacements, [(norm, norm * 3)])

    def stopped(name: str, found: list[str] = [], get: Callable = model.get_submodule) -> nn.Module:  # noqa: B006
        found.append(name)
        if interrupted and len(found) == 3:
            raise KeyboardInterrupt
        return get(name)

    monkeypatch.setattr(rtn_room, "quantize_layer", folding)
    monkeypatch.setattr(model, "get_submodule", stopped)
    with pytest.raises(QuantizationInterrupted):
        quantize_(model, RTNConfig(4, 32), progress=False)
    first, second = (layer.input_layernorm.weight for layer in model.model.layers)
    assert len(quantized(model)) == 7 and len(seen) == (1 if interrupted else 2)
    assert (first == 6).all() and (second == 2).all() and (seen[0] == 2).all()


def test_progress_counts_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    import labkit.quantization.api as api

    seen = []

    @contextlib.contextmanager
    def bar(label: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        seen.append((label, total, unit))
        yield seen.append

    monkeypatch.setattr(api, "progress_bar", bar)
    quantize_(tiny_model(), RTNConfig(4, 32))
    assert seen == [("RTN, llama", 2, "layers"), 1, 2]
    quantize_(tiny_model(), RTNConfig(4, 32), progress=False)
    assert len(seen) == 3


def test_bytes_fall_as_the_report_says(ids: torch.Tensor) -> None:
    model = tiny_model()
    before = weight_bytes(model)
    report = quantize_(model, GPTQConfig(4, 32), ids, progress=False)
    floats = 4 * sum(m.elements for m in report.matrices)
    assert before - weight_bytes(model) == floats - sum(m.nbytes for m in report.matrices)
    assert 4 < report.bits_per_weight < 6
