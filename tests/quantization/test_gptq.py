"""GPTQ against the paper's Algorithm 1 written out in float64, and against what must hold of it."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from labkit.quantization import GPTQConfig, RTNConfig, output_error
from labkit.quantization.calibration import InputStatistics, LayerTask
from labkit.quantization.gptq import Rounded, gptq, inverse_cholesky, quantize_layer
from labkit.quantization.packing import PackedWeight, pack_weight
from labkit.quantization.primitives import minmax_grid
from labkit.quantization.rtn import round_to_nearest

BITS = (2, 3, 4, 8)


def correlated(tokens: int, features: int) -> torch.Tensor:
    """Inputs whose features go together and differ in size, as those of a model do."""
    mixing = torch.randn(features, features) * torch.logspace(0, -1, features)
    return torch.randn(tokens, features) @ mixing * torch.logspace(-0.5, 0.5, features)


def gram_of(x: torch.Tensor) -> torch.Tensor:
    return x.T @ x / len(x)


def packed(rounded: Rounded, sym: bool = False) -> PackedWeight:
    return pack_weight(rounded.codes, rounded.grid, sym=sym, g_idx=rounded.g_idx)


def textbook(
    weight: torch.Tensor, hessian: torch.Tensor, config: GPTQConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Algorithm 1 in float64, one column after the other, with no blocks and no Cholesky factor.

    The inverse Hessian of the columns that are left is updated by equation 3 as in the OBQ method; each column's error
    goes to all later ones by equation 2. Returns codes in the model's order, the values they stand for, and the order.
    """
    w, h = weight.double().clone(), hessian.double().clone()
    out_features, in_features = w.shape
    group = in_features if config.group_size == -1 else config.group_size
    dead = h.diagonal() == 0
    w[:, dead] = 0
    order = torch.arange(in_features)
    if config.desc_act:
        order = torch.argsort(h.diagonal(), descending=True, stable=True)
    h.diagonal()[dead] = h.diagonal()[~dead].mean()
    w, h = w[:, order], h[order][:, order]
    inverse = torch.linalg.inv(h + config.damp_percent * h.diagonal().mean() * torch.eye(in_features))
    codes, values = torch.zeros_like(w), torch.zeros_like(w)
    for i in range(in_features):
        if i % group == 0:
            grid = minmax_grid(w[:, i : i + group].float()[:, None], config.bits, config.sym)
            scale, zero = grid.scales[:, 0].double(), grid.zeros[:, 0].double()
        codes[:, i] = ((w[:, i] / scale).round() + zero).clamp(0, 2**config.bits - 1)
        values[:, i] = (codes[:, i] - zero) * scale
        error = (w[:, i] - values[:, i]) / inverse[i, i]
        w[:, i + 1 :] -= error[:, None] * inverse[i, i + 1 :]
        inverse = inverse - torch.outer(inverse[:, i], inverse[i, :]) / inverse[i, i]
    back = torch.argsort(order)
    return codes[:, back], values[:, back], order


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("desc_act", [True, False])
@pytest.mark.parametrize("group", [16, 48, 96, -1])
def test_codes_are_those_of_the_textbook(bits: int, desc_act: bool, group: int) -> None:
    # 288 columns: three blocks of 96 or more, so that 48 and 96 do not divide 128, and the last is not whole.
    x = correlated(900, 288)
    weight = torch.randn(12, 288)
    config = GPTQConfig(bits, group, sym=bits == 3, desc_act=desc_act)
    expected, values, order = textbook(weight, gram_of(x), config)
    rounded = gptq(weight, gram_of(x), config)
    same = (rounded.codes == expected).all(dim=1)
    # Float32 and float64 part at a tie, and from there on a row goes its own way.
    assert same.sum() >= (10 if bits == 8 else 11)
    torch.testing.assert_close(packed(rounded, config.sym).dequantize()[same].double(), values[same])
    reference = output_error(weight, values, gram_of(x))
    mine = output_error(weight, packed(rounded, config.sym).dequantize(), gram_of(x))
    assert mine == pytest.approx(reference, rel=0.05)
    width = 288 if group == -1 else group
    if desc_act and group != -1:
        assert torch.equal(rounded.g_idx[order], torch.arange(288) // width)
    else:
        assert rounded.g_idx is None


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("desc_act", [True, False])
@pytest.mark.parametrize("group", [16, 96, -1])
@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_an_identity_hessian_is_round_to_nearest(bits: int, sym: bool, desc_act: bool, group: int, size: float) -> None:
    weight = torch.randn(8, 192)
    nearest = round_to_nearest(weight, RTNConfig(bits, group, sym))
    rounded = gptq(weight, size * torch.eye(192), GPTQConfig(bits, group, sym, desc_act))
    mine = packed(rounded, sym)
    assert torch.equal(mine.qweight, nearest.qweight) and torch.equal(mine.scales, nearest.scales)
    assert sym or torch.equal(mine.zeros, nearest.zeros)
    assert torch.equal(mine.dequantize(), nearest.dequantize())


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("desc_act", [True, False])
@pytest.mark.parametrize("sym", [True, False])
def test_the_output_error_of_a_layer_is_below_that_of_rounding(seed: int, bits: int, desc_act: bool, sym: bool) -> None:
    torch.manual_seed(seed)
    config = GPTQConfig(bits, 32, sym, desc_act)
    mine = nearest = 0.0
    for out_features, in_features in ((64, 64), (32, 64), (96, 64), (64, 128)):
        weight, gram = torch.randn(out_features, in_features), gram_of(correlated(400, in_features))
        for name, approximation in (
            ("gptq", packed(gptq(weight, gram, config), sym).dequantize()),
            ("rtn", round_to_nearest(weight, RTNConfig(bits, 32, sym)).dequantize()),
        ):
            difference = (approximation - weight).double()
            error = torch.trace(difference @ gram.double() @ difference.T).item()
            mine, nearest = (mine + error, nearest) if name == "gptq" else (mine, nearest + error)
    assert mine < 0.8 * nearest


def test_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    import labkit.quantization.gptq as room

    weight, gram = torch.randn(16, 384), gram_of(correlated(1000, 384))
    for group in (16, 48, 96, 128, -1):
        config = GPTQConfig(3, group)
        monkeypatch.setattr(room, "_BLOCK", 128)
        blocked = gptq(weight, gram, config)
        monkeypatch.setattr(room, "_BLOCK", 10_000)
        whole = gptq(weight, gram, config)
        assert (blocked.codes != whole.codes).any(1).float().mean() <= 0.25, group
        errors = [output_error(weight, packed(r).dequantize(), gram) for r in (blocked, whole)]
        assert errors[0] == pytest.approx(errors[1], rel=0.02)


def test_act_order_puts_the_largest_inputs_into_the_first_groups() -> None:
    weight, sizes = torch.randn(8, 64), torch.rand(64) + 0.1
    rounded = gptq(weight, torch.diag(sizes), GPTQConfig(4, 16))
    for place, column in enumerate(sizes.argsort(descending=True).tolist()):
        assert rounded.g_idx[column] == place // 16
    # A diagonal Hessian moves no error: each group is rounded to the nearest, column by column in the model's order.
    for g in range(4):
        members = rounded.g_idx == g
        grid = minmax_grid(weight[:, members][:, None], 4, False)
        assert torch.equal(rounded.codes[:, members], grid.encode(weight[:, members][:, None])[:, 0])
        expected = grid.decode(grid.encode(weight[:, members][:, None]))[:, 0]
        assert torch.equal(packed(rounded).dequantize()[:, members], expected)


@pytest.mark.parametrize("desc_act", [True, False])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_dead_columns_are_zero_and_do_not_disturb_the_others(desc_act: bool, size: float) -> None:
    x = correlated(400, 64)
    x[:, [3, 17, 40]] = 0.0
    weight, config = torch.randn(16, 64), GPTQConfig(3, 16, desc_act=desc_act)
    rounded = gptq(weight, gram_of(x) * size, config)
    approximation = packed(rounded).dequantize()
    assert (approximation[:, [3, 17, 40]] == 0).all() and (approximation[:, 4] != 0).any()
    # Nothing depends on the unit of the inputs, dead columns or not.
    assert torch.equal(rounded.codes, gptq(weight, gram_of(x), config).codes)
    codes, _, _ = textbook(weight, gram_of(x), config)
    assert (codes == rounded.codes).all(1).sum() >= 15


def test_only_dead_columns() -> None:
    rounded = gptq(torch.randn(4, 32), torch.zeros(32, 32), GPTQConfig(4, 16))
    assert (packed(rounded).dequantize() == 0).all()


@pytest.mark.parametrize("desc_act", [True, False])
def test_fewer_tokens_than_features(desc_act: bool) -> None:
    notes: list[str] = []
    weight, gram = torch.randn(16, 128), gram_of(correlated(20, 128))
    approximation = packed(gptq(weight, gram, GPTQConfig(4, 32, desc_act=desc_act), notes.append)).dequantize()
    nearest = round_to_nearest(weight, RTNConfig(4, 32)).dequantize()
    assert approximation.isfinite().all() and not notes
    assert output_error(weight, approximation, gram) < output_error(weight, nearest, gram)


def test_the_factor_is_that_of_the_inverse() -> None:
    gram = gram_of(correlated(300, 48))
    upper = inverse_cholesky(gram, 0.05, pytest.fail)
    assert torch.equal(upper, upper.triu())
    damped = gram.double() + 0.05 * gram.diagonal().double().mean() * torch.eye(48)
    product = upper.double().T @ upper.double() @ damped
    torch.testing.assert_close(product, torch.eye(48, dtype=torch.float64), rtol=0, atol=1e-3)


def test_damping_is_raised_tenfold_until_the_hessian_can_be_factored() -> None:
    # Eigenvalues 1 and -0.3: 0.01 and 0.1 times the mean of about 0.35 are not enough, 1 is.
    notes: list[str] = []
    basis = torch.linalg.qr(torch.randn(32, 32)).Q
    hessian = basis @ torch.diag(torch.tensor([1.0] * 16 + [-0.3] * 16)) @ basis.T
    upper = inverse_cholesky(hessian, 0.01, notes.append)
    assert upper.isfinite().all()
    assert [note.rpartition(" ")[2] for note in notes] == ["0.1", "1"]
    damped = hessian.double() + hessian.diagonal().double().mean() * torch.eye(32)
    torch.testing.assert_close((upper.T @ upper).double() @ damped, torch.eye(32).double(), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("damp_percent", "raised"), [(0.01, ["0.1", "1", "10"]), (0.03, ["0.3", "3", "10"]), (1.0, ["10"])]
)
def test_a_note_is_of_a_retry_and_the_last_is_at_ten_times_the_mean(damp_percent: float, raised: list[str]) -> None:
    # Eigenvalues 1 and -0.7 in a mean of 0.15: 4.7 times that are needed, and 10 times always tried.
    basis = torch.linalg.qr(torch.randn(32, 32)).Q
    hessian = basis @ torch.diag(torch.tensor([1.0] * 16 + [-0.7] * 16)) @ basis.T
    notes: list[str] = []
    assert inverse_cholesky(hessian, damp_percent, notes.append).isfinite().all()
    assert [note.rpartition(" ")[2] for note in notes] == raised
    notes.clear()
    with pytest.raises(ValueError, match="no damping up to 10 times its mean"):
        inverse_cholesky(-hessian, damp_percent, notes.append)
    assert [note.rpartition(" ")[2] for note in notes] == raised


@pytest.mark.parametrize("hopeless", [-torch.eye(32), torch.full((32, 32), math.nan), math.inf * torch.eye(32)])
def test_a_hopeless_hessian(hopeless: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="^calibration: got 'a Hessian that no damping"):
        gptq(torch.randn(4, 32), hopeless, GPTQConfig(4, 16))


@pytest.mark.parametrize("desc_act", [True, False])
@pytest.mark.parametrize("shape", [(1, 64), (8, 64)])
def test_weight_and_hessian_are_left_alone(desc_act: bool, shape: tuple[int, int]) -> None:
    x = correlated(300, 64)
    x[:, 5] = 0
    weight, gram = torch.randn(shape), gram_of(x)
    for mine in (weight.clone(), weight.T.contiguous().T):
        hessian = gram.clone()
        gptq(mine, hessian, GPTQConfig(4, 16, desc_act=desc_act))
        assert torch.equal(mine, weight) and torch.equal(hessian, gram)


def task_of(
    matrices: dict[str, nn.Linear], inputs: dict[str, InputStatistics], config: GPTQConfig, **bits: int
) -> LayerTask:
    return LayerTask("layer", None, matrices, inputs, config, bits)


def statistics_of(x: torch.Tensor) -> InputStatistics:
    statistics = InputStatistics.empty(x.shape[1], x.device)
    statistics.add(x)
    return statistics


@torch.no_grad()
@pytest.mark.parametrize("desc_act", [True, False])
def test_matrices_of_one_input_give_what_each_gives_alone(desc_act: bool) -> None:
    config = GPTQConfig(4, 16, desc_act=desc_act)
    shared, own = statistics_of(correlated(300, 64)), statistics_of(correlated(300, 64))
    matrices = {"q": nn.Linear(64, 32), "o": nn.Linear(64, 16), "k": nn.Linear(64, 48, bias=False)}
    inputs = {"q": shared, "o": own, "k": shared}
    together = quantize_layer(task_of(matrices, inputs, config, k=3)).replacements
    assert list(together) == ["q", "o", "k"]
    for name, linear in matrices.items():
        alone_config = dataclasses.replace(config, bits=3) if name == "k" else config
        alone = quantize_layer(task_of({name: linear}, {name: inputs[name]}, alone_config)).replacements[name]
        mine, its = together[name].module.portable(), alone.module.portable()
        assert mine.bits == alone_config.bits and mine.out_features == linear.out_features
        assert (mine.codes() == its.codes()).all(1).float().mean() >= 0.9
        assert mine.g_idx is None or torch.equal(mine.g_idx, its.g_idx)
        assert torch.equal(together[name].approximation, mine.dequantize())
    both = quantize_layer(task_of(matrices, inputs, config)).replacements
    q, k = (both[name].module.portable() for name in "qk")
    assert q.g_idx is None or torch.equal(q.g_idx, k.g_idx)
    assert (k.codes() == packed(gptq(matrices["k"].weight, shared.gram, config)).codes()).all(1).float().mean() >= 0.9


@torch.no_grad()
def test_a_note_names_the_matrices() -> None:
    statistics = statistics_of(correlated(300, 32))
    statistics.gram -= 0.3 * statistics.gram.diagonal().mean() * torch.eye(32)
    task = task_of(
        {"q": nn.Linear(32, 8), "k": nn.Linear(32, 8)}, {"q": statistics, "k": statistics}, GPTQConfig(4, 16)
    )
    quantize_layer(task)
    assert task.notes and all(note.startswith("q, k: the Hessian is not positive definite") for note in task.notes)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"bits": 1}, "bits"),
        ({"group_size": 8}, "group_size"),
        ({"sym": "no"}, "sym"),
        ({"desc_act": 1}, "desc_act"),
        ({"damp_percent": 0.0}, "damp_percent"),
        ({"damp_percent": 1.5}, "damp_percent"),
        ({"damp_percent": math.nan}, "damp_percent"),
        ({"damp_percent": "0.01"}, "damp_percent"),
    ],
)
def test_refused_configs(fields: dict, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}: got"):
        GPTQConfig(**fields)
    with pytest.raises(dataclasses.FrozenInstanceError):
        GPTQConfig().bits = 3


def test_groups_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="^group_size: got 48"):
        gptq(torch.randn(4, 64), torch.eye(64), GPTQConfig(4, 48))
