import math

import pytest
import torch

from labkit.attention.traffic import flash_cost, standard_costs
from labkit.kernels.flash_attention import flash_attention
from labkit.kernels.flash_attention.tiled import tiled_forward
from labkit.kernels.flash_attention.tiles import tiles
from labkit.labs._tile_walk_compute import compute
from labkit.labs._tile_walk_result import BLOCK_SIZES, TileWalkParams, TileWalkResult, tile_count
from labkit.labs._tile_walk_steps import Case, walk
from labkit.measure import Label

LENGTH, HEAD_DIM = 32, 16
SETTINGS = [(size, causal) for size in BLOCK_SIZES for causal in (False, True)]
FLOAT = 4


def run(block_size: int, causal: bool, step: int, **sizes) -> TileWalkResult:
    (result,) = compute(TileWalkParams(block_size, causal, step, **sizes), lambda: False)
    return result


def whole(block_size: int, causal: bool, **sizes) -> TileWalkResult:
    return run(block_size, causal, tile_count(block_size, causal, sizes.get("length", LENGTH)), **sizes)


def case_of(result: TileWalkResult) -> Case:
    p = result.params
    return Case.of(p.length, p.head_dim, p.causal, p.seed)


def seen_keys(result: TileWalkResult) -> torch.Tensor:
    """Bool (queries, keys): which scores the visited tiles hold, said without the tiles' own code."""
    p, found = result.params, torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    blocks = LENGTH // p.block_size
    order = [(i, j) for i in range(blocks) for j in range(i + 1 if p.causal else blocks)]
    for i, j in order[: p.step]:
        rows, keys = (slice(n * p.block_size, (n + 1) * p.block_size) for n in (i, j))
        found[rows, keys] = True
    return found.tril() if p.causal else found


@pytest.mark.parametrize(("block_size", "causal"), SETTINGS)
def test_as_many_tiles_are_visited_as_the_mask_leaves(block_size, causal):
    a_side = LENGTH // block_size
    expected = a_side * (a_side + 1) // 2 if causal else a_side**2
    result = whole(block_size, causal)
    assert len(result.walk.visits) == result.params.tiles == expected and result.params.grid == a_side**2
    visited = {(v.tile.q_start // block_size, v.tile.k_start // block_size) for v in result.walk.visits}
    assert visited == {(i, j) for i in range(a_side) for j in range(a_side) if j <= i or not causal}


@pytest.mark.parametrize(("block_size", "causal"), SETTINGS)
def test_after_any_step_each_row_is_the_softmax_over_exactly_the_keys_seen(block_size, causal):
    for step in range(0, tile_count(block_size, causal) + 1, 3 if block_size == 4 else 1):
        result = run(block_size, causal, step)
        case, walk_ = case_of(result), result.walk
        scores = (case.q[0, 0].double() @ case.k[0, 0].double().T) / math.sqrt(HEAD_DIM)
        seen = seen_keys(result)
        for row in range(LENGTH):
            if not seen[row].any():
                assert walk_.most[row] is walk_.total[row] is walk_.out[row] is walk_.errors[row] is None
                assert set(walk_.weights[row]) == {None}
                continue
            mine = scores[row].masked_fill(~seen[row], -math.inf)
            weights = mine.softmax(0)
            assert walk_.most[row] == pytest.approx(float(mine.max()), rel=1e-5, abs=1e-5)
            assert walk_.total[row] == pytest.approx(float((mine - mine.max()).exp().sum()), rel=1e-5)
            out = weights @ case.v[0, 0].double()
            assert walk_.out[row] == pytest.approx(out.tolist(), rel=1e-4, abs=1e-5)
            assert [w is not None for w in walk_.weights[row]] == seen[row].tolist()
            assert [w or 0.0 for w in walk_.weights[row]] == pytest.approx(weights.tolist(), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("block_size", "causal"), SETTINGS)
def test_the_last_step_is_the_tiled_pass_itself_and_exact(block_size, causal):
    result = whole(block_size, causal)
    case = case_of(result)
    out, lse = tiled_forward(case.q, case.k, case.v, causal, HEAD_DIM**-0.5, None, (block_size, block_size))
    assert torch.equal(torch.tensor(result.walk.out), out[0, 0])
    most, total = (torch.tensor(x) for x in (result.walk.most, result.walk.total))
    torch.testing.assert_close(most + total.log(), lse[0, 0])
    exact = flash_attention(*(x.double() for x in (case.q, case.k, case.v)), causal=causal, backend="reference")
    difference = (out.double() - exact).abs().max()
    assert 0 < result.largest_error < 1e-6
    assert result.largest_error == pytest.approx(float(difference), rel=0.2)
    assert result.rows_done == LENGTH and result.done and result.present.ends_block


def test_hidden_scores_of_visited_tiles_are_told_from_those_to_come():
    result = run(8, True, 2)
    assert result.walk.masked == {(row, key) for row in range(8) for key in range(row + 1, 8)}
    assert not run(8, False, 2).walk.masked
    assert len(whole(16, True).walk.masked) == 2 * 16 * 15 // 2


def test_the_watched_row_is_the_last_of_its_block_and_its_sum_shrinks_by_the_correction():
    result = whole(4, False)
    rescaled = 0
    for index, visit in enumerate(result.walk.visits):
        assert visit.row == 4 * (index // 8) + 3 == visit.tile.q_stop - 1
        if index % 8 == 0:
            assert visit.first and not visit.new_maximum
            assert (visit.total_before, visit.correction, visit.rescaled) == (0, 0, 0)
            assert visit.most == visit.tile_most
            continue
        before = result.walk.visits[index - 1]
        assert (visit.most_before, visit.total_before) == (before.most, before.total)
        assert visit.most == max(before.most, visit.tile_most)
        assert visit.correction == pytest.approx(math.exp(before.most - visit.most))
        assert visit.new_maximum == (visit.correction < 1) == (visit.tile_most > before.most)
        assert visit.total > before.total * visit.correction
        assert visit.ends_block == (index % 8 == 7)
        assert (visit.error < 1e-6) == visit.ends_block
        rescaled += visit.new_maximum
    assert 0 < rescaled < 8 * 7


def test_rescales_are_the_records_of_each_row():
    result = whole(4, False)
    case = case_of(result)
    scores = case.q[0, 0] @ case.k[0, 0].T
    of_tiles = scores.view(LENGTH, 8, 4).amax(-1)
    records = (of_tiles[:, 1:] > of_tiles.cummax(1).values[:, :-1]).sum()
    assert result.rescales == int(records) == sum(run(4, False, 64).walk.visits[i].rescaled for i in range(64))
    assert 1 < result.rescales / LENGTH < 2.5


@pytest.mark.parametrize(("block_size", "causal"), SETTINGS)
def test_bytes_moved_are_those_of_the_traffic_module(block_size, causal):
    result = whole(block_size, causal)
    shape = result.params.shape
    cost = flash_cost(shape, "float32", (block_size, block_size))
    assert result.traffic.moved == cost.bytes
    assert result.traffic.k + result.traffic.v == cost.kv_bytes
    assert result.standard_bytes == sum(op.bytes for op in standard_costs(shape, "float32"))
    assert result.standard_extra == 2 * LENGTH**2 * FLOAT


def test_bytes_grow_tile_by_tile_as_they_are_read():
    block, side = 8 * HEAD_DIM * FLOAT, 8 * FLOAT
    visits = whole(8, True).walk.visits
    expected = {"q": 0, "k": 0, "v": 0, "written": 0}
    for visit in visits:
        expected["q"] += block if visit.tile.k_start == 0 else 0
        expected["k"] += block
        expected["v"] += block
        expected["written"] += block + side if visit.tile.k_stop == visit.tile.q_stop else 0
        assert visit.traffic.__dict__ == expected
        held = visit.held
        assert (held.q, held.k, held.v, held.scores) == (block, block, block, 8 * side)
        assert held.state == block + 2 * side and held.total == 4 * block + 10 * side
    assert visits[-1].traffic.read == block * (4 + 2 * 10)


def test_small_blocks_move_more_than_standard_attention_and_large_ones_less():
    moved = {size: whole(size, False).traffic.moved for size in BLOCK_SIZES}
    standard = whole(4, False).standard_bytes
    assert moved[4] > standard > moved[8] > moved[16]


def test_blocks_that_do_not_divide_the_length_end_ragged():
    result = whole(5, True, length=12, head_dim=4, seed=1)
    assert result.largest_error < 1e-6 and result.rows_done == 12
    assert [(v.tile.q_stop, v.tile.k_stop) for v in result.walk.visits][-1] == (12, 12)
    assert result.traffic.q == 12 * 4 * FLOAT


def test_nothing_is_known_before_the_first_tile():
    result = run(8, True, 0)
    assert result.present is None and result.largest_error is None and result.rows_done == 0
    assert result.traffic.moved == result.held.total == 0 and not result.done
    assert "tile" not in {number.key for number in result.numbers()}
    assert "Step 0 of 10" in result.text()


def test_the_seed_makes_the_case():
    assert run(8, True, 3) == run(8, True, 3)
    assert run(8, True, 3) != run(8, True, 3, seed=1)


def test_nothing_comes_of_it_when_cancelled():
    assert list(compute(TileWalkParams(8, True, 3), lambda: True)) == []


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"block_size": 0}, "block_size"),
        ({"block_size": 33}, "block_size"),
        ({"causal": 1}, "causal"),
        ({"step": -1}, "step"),
        ({"step": 11}, "step"),
        ({"length": 0}, "length"),
        ({"head_dim": 0}, "head_dim"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_parameters_are_named(values, name):
    with pytest.raises(ValueError, match=f"^{name}: got .*; takes "):
        TileWalkParams(**({"block_size": 8, "causal": True, "step": 1} | values))


def test_numbers_are_what_the_walk_says():
    result = run(8, True, 8)
    exact = {number.key: number.exact for number in result.numbers()}
    visit = result.present
    assert (exact["correction"], exact["row_error"], exact["rescaled"]) == (
        visit.correction,
        visit.error,
        visit.rescaled,
    )
    assert exact["rows_done"] == 24 and exact["largest_error"] == max(result.walk.errors[:24])
    assert (exact["tiles"], exact["held_bytes"]) == (10, result.held.total)
    assert (exact["read_bytes"], exact["moved_bytes"]) == (result.traffic.read, result.traffic.moved)
    said = {number.key: number for number in result.numbers()}
    assert said["tile"].text == "(3, 1)" and said["tile"].note == "queries 24-31 against keys 8-15"
    assert said["tiles"].note == "of 16; 6 skipped"
    assert said["correction"].text == f"×{visit.correction:.3g}" and visit.new_maximum
    first = {number.key: number for number in run(8, True, 7).numbers()}
    assert first["correction"].text == "first tile" and "none had one before" in first["rescaled"].note


def test_text_holds_the_numbers_and_a_line_for_each_tile():
    result = whole(8, True)
    text = result.text()
    for number in result.numbers():
        assert number.text in text and number.label in text
    lines = [line.split() for line in text.splitlines() if line[:6].strip().isdigit()]
    assert [int(line[0]) for line in lines] == list(range(1, 11))
    path = list(tiles(LENGTH, LENGTH, (8, 8), True))
    assert [line[2] for line in lines] == [f"{t.k_start}-{t.k_stop - 1}" for t in path]
    assert "of them to softmax(QKᵀ)V; MEASURED" in text and "MODELLED" in text


def test_measurements_and_rows_carry_parameters_and_labels():
    result = run(8, True, 8)
    lines = {line.name.removeprefix("tile_walk_lab."): line for line in result.measurements()}
    params = {"block_size": 8, "causal": True, "step": 8, "length": LENGTH, "head_dim": HEAD_DIM}
    params["seed"] = result.params.seed
    assert all(line.params == params and line.backend == "tiled" for line in lines.values())
    modelled = {name for name, line in lines.items() if line.label is Label.MODELLED}
    assert modelled == {"held_bytes", "read_bytes", "moved_bytes", "standard_bytes"}
    assert lines["correction"].value == result.present.correction
    assert lines["row_maximum"].value == result.walk.most[31] and lines["row_sum"].value == result.walk.total[31]
    assert lines["largest_error"].value == result.largest_error and lines["tiles_visited"].value == 8
    rows = result.rows()
    assert [row["quantity"] for row in rows] == list(lines)
    assert all(row["block_size"] == 8 and math.isfinite(row["value"]) for row in rows)
    assert {line.name for line in run(8, True, 0).measurements()} < {line.name for line in result.measurements()}


def test_the_walk_reads_no_tile_past_its_step():
    """NaN in the keys and values to come reaches nothing."""
    case = Case.of(LENGTH, HEAD_DIM, False, 0)
    for x in (case.k, case.v):
        x[:, :, 16:] = torch.nan
    found = walk(case, 8, 2)
    assert all(math.isfinite(x) for row in found.out[:8] for x in row) and found.out[8:] == (None,) * 24
