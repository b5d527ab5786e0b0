import pytest

from labkit.kernels.flash_attention.tiles import tiles
from labkit.labs import tile_walk, tile_walk_lab
from labkit.labs._tile_walk_figure import FLOOR, ROUNDING
from labkit.labs._tile_walk_matrix import ACCENT
from labkit.labs._tile_walk_player import StepPlayer
from labkit.labs._tile_walk_result import tile_count

WAIT_S = 60.0


@pytest.fixture
def lab(ledger):
    lab = tile_walk_lab()
    assert lab.wait(WAIT_S) and lab.error is None, lab.traceback
    return lab


def move(lab, **values) -> None:
    for name, value in values.items():
        lab.spec.knobs[name].value = value
    assert lab.wait(WAIT_S) and lab.error is None, lab.traceback


def traces(lab) -> dict:
    return {trace.name: trace for trace in lab.figure.data}


def note(lab, name: str):
    (found,) = (note for note in lab.figure.layout.annotations if note.name == name)
    return found


def corners(trace) -> list[tuple[float, float, float, float]]:
    """left, right, top, bottom of the frames that a trace draws."""
    x, y = list(trace.x), list(trace.y)
    ends = [i for i, value in enumerate(x) if value is None]
    assert all((x[i - 1], y[i - 1]) == (x[i - 5], y[i - 5]) for i in ends), "closed"
    return [(x[i - 5], x[i - 4], y[i - 5], y[i - 3]) for i in ends]


def frame(tile) -> tuple[float, float, float, float]:
    return (tile.k_start - 0.5, tile.k_stop - 0.5, tile.q_start - 0.5, tile.q_stop - 0.5)


def test_each_knob_writes_its_parameters_to_the_ledger_once(lab, ledger):
    move(lab, step=9)
    move(lab, block_size=16)
    move(lab, causal=False)
    move(lab, step=1)
    lines = [m for m in ledger.read() if m.name == "tile_walk_lab.moved_bytes"]
    keys = ("block_size", "causal", "step")
    assert [tuple(m.params[key] for key in keys) for m in lines] == [
        (8, True, 8),
        (8, True, 9),
        (16, True, 3),
        (16, False, 4),
        (16, False, 1),
    ]
    assert [m.value for m in lines] == [result.traffic.moved for result in lab.finished]


def test_another_walk_stands_as_far_along_as_the_one_before(lab):
    step = lab.spec.knobs["step"]
    for size, causal, count, expected in ((4, True, 36, 29), (4, False, 64, 52), (8, False, 16, 13)):
        move(lab, block_size=size, causal=causal)
        assert (step.steps, step.value, lab.result.params.step) == (count, expected, expected)
        assert (step.play.max, step.play.value, step.slider.max, step.slider.value) == (count, expected) * 2
    move(lab, step=16)
    move(lab, block_size=16)
    assert step.value == step.steps == 4 and lab.result.done
    move(lab, step=0)
    move(lab, block_size=4)
    assert (step.value, step.steps) == (0, 64)


def test_another_walk_stops_the_play_and_reset_goes_back(lab):
    step = lab.spec.knobs["step"]
    step.play.playing = True
    move(lab, block_size=4)
    assert step.play.playing is False
    lab.reset()
    assert lab.wait(WAIT_S) and lab.error is None
    assert (lab.result.params.block_size, lab.result.params.causal, lab.result.params.step) == (8, True, 8)
    assert (step.steps, step.value) == (10, 8) and len(lab.finished) == 1


def test_a_player_is_one_knob_with_its_slider():
    player = StepPlayer(10, 3)
    player.slider.value = 5
    assert player.value == 5
    player.value = 7
    assert player.slider.value == 7 and (player.slider.min, player.slider.max) == (0, 10)
    assert player.slider.continuous_update is False and not player.play.playing
    assert player.play.value == 7
    player.value = 99
    assert player.value == player.slider.value == player.play.value == 10
    assert 250 <= player.play.interval <= 500, "two to four steps a second"


def test_reset_goes_back_to_the_first_step_from_every_setting_also_while_it_plays(lab):
    step = lab.spec.knobs["step"]
    for size, causal in ((4, True), (16, True), (8, False), (8, True), (4, False)):
        move(lab, block_size=size, causal=causal)
        move(lab, step=step.steps)
        step.play.playing = True
        lab.reset()
        assert lab.wait(WAIT_S) and lab.error is None
        assert (step.steps, step.value, step.slider.max, step.slider.value) == (10, 8) * 2
        assert (step.play.max, step.play.value, step.play.playing) == (10, 8, False)
        assert lab.result.params.step == 8


def page_says(widget, **state) -> None:
    """A message from the page, which may change several traits at once."""
    widget.set_state(state)


def test_the_clock_s_ticks_move_the_slider_and_a_late_one_does_not():
    player = StepPlayer(10, 3)
    page_says(player.play, playing=True, value=4)
    assert player.value == player.slider.value == 4
    page_says(player.play, value=10, playing=False)
    assert player.value == player.slider.value == 10
    player.value = 2
    page_says(player.play, playing=True)
    player.stop()
    page_says(player.play, value=5)
    assert player.value == player.slider.value == player.play.value == 2
    page_says(player.play, playing=True)
    player.resize(5)
    page_says(player.play, value=9)
    assert player.value == player.slider.value == player.play.value == 1


def test_another_walk_has_a_slider_of_its_own_whose_end_key_knows_its_end():
    player = StepPlayer(10, 10)
    old = player.slider
    player.resize(36)
    assert player.children == (player.play, player.slider) and player.slider is not old
    assert (player.slider.max, player.slider.value, player.value) == (36, 36, 36)
    player.slider.value = 30
    assert player.value == player.play.value == 30


def test_the_matrix_shows_weights_and_tiles_as_they_stand(lab):
    result, found = lab.result, traces(lab)
    path = list(tiles(32, 32, (8, 8), True))
    assert [tuple(row) for row in found["weights"].z] == [
        tuple(None if w is None else w for w in row) for row in result.walk.weights
    ]
    for row in range(32):
        shown = [w for w in found["weights"].z[row] if w is not None]
        assert sum(shown) == pytest.approx(1)
        assert len(shown) == (row + 1 if row < 24 else 16)
    hidden = {(row, key) for row in range(32) for key in range(32) if found["masked"].z[row][key]}
    assert hidden == result.walk.masked and len(hidden) == 3 * 28
    assert corners(found["visited"]) == [frame(tile) for tile in path[:8]]
    assert corners(found["to come"]) == [frame(tile) for tile in path[8:]]
    assert corners(found["present"]) == [frame(path[7])] and found["present"].line.color == ACCENT
    assert (list(found["Q rows"].y), list(found["K columns"].x)) == ([23.5, 31.5], [7.5, 15.5])
    assert list(found["V columns"].x) == [7.5, 15.5]
    assert list(found["watched"].y) == [31]


def test_skipped_tiles_are_hatched_and_counted(lab):
    skipped = traces(lab)["skipped"]
    assert set(zip(skipped.x, skipped.base, strict=True)) == {
        (8 * j + 3.5, 8 * i - 0.5) for i in range(4) for j in range(i + 1, 4)
    }
    assert set(skipped.width) == set(skipped.y) == {8} and skipped.marker.pattern.shape == "/"
    assert note(lab, "skipped").text == "6 tiles skipped" and note(lab, "skipped").visible
    move(lab, block_size=16)
    assert note(lab, "skipped").text == "1 tile skipped"
    move(lab, causal=False)
    assert not traces(lab)["skipped"].x and note(lab, "skipped").visible is False


def test_the_watched_row_is_drawn_tile_by_tile(lab):
    move(lab, step=10)
    visits = lab.result.walk.visits[6:]
    found = traces(lab)
    assert list(found["running maximum"].y) == [v.most for v in visits]
    assert list(found["tile maximum"].y) == [v.tile_most for v in visits]
    assert list(found["kept"].y) == [v.total_before * v.correction for v in visits]
    tops = [base + more for base, more in zip(found["added"].base, found["added"].y, strict=True)]
    assert tops == pytest.approx([v.total for v in visits])
    assert list(found["before"].y) == [0, *(v.total for v in visits[:-1])]
    said = [f"<b>×{v.correction:.2g}</b>" if v.new_maximum else "×1" for v in visits[1:]]
    assert list(found["corrections"].text) == ["", *said] and len({"×1", *said}) > 2
    assert list(found["error"].y) == [v.error for v in visits]
    assert found["error"].y[-1] < 1e-6 < 0.1 < found["error"].y[-2]
    assert list(found["rounding"].y) == [ROUNDING] * 2 and found["rounding"].yaxis == found["error"].yaxis
    assert list(lab.figure.layout.xaxis4.ticktext) == ["0-7", "8-15", "16-23", "24-31"]
    assert note(lab, "maximum").text.startswith("Query 31 ") and "after 10 of 10 tiles" in note(lab, "matrix").text
    move(lab, step=2)
    assert len(found["error"].y) == 1 and list(lab.figure.layout.xaxis4.ticktext) == ["0-7", "8-15"]
    assert all(y >= FLOOR for y in found["error"].y)


def test_bytes_are_drawn_beside_standard_attention_and_other_walks_stay_faded(lab):
    found = traces(lab)
    held = lab.result.held
    parts = ["Q block", "K block", "V block", "tile of scores", "rows' m, l and output"]
    assert [found[name].x[0] for name in parts] == [held.q, held.k, held.v, held.scores, held.state]
    assert found[parts[-1]].base[0] + held.state == held.total
    assert found["all scores and weights"].x == (lab.result.standard_extra,) == (8192,)
    moved = [0, *(v.traffic.moved / 1e3 for v in lab.result.walk.visits)]
    assert list(found["moved"].y) == moved and list(found["moved"].x) == [10 * n for n in range(9)]
    assert list(found["standard moved"].y) == [lab.result.standard_bytes / 1e3] * 2
    assert found["standard moved"].yaxis == found["moved"].yaxis
    assert not found["earlier moved"].x
    move(lab, step=5)
    assert not found["earlier moved"].x, "the same walk"
    move(lab, block_size=4)
    earlier = found["earlier moved"]
    assert list(earlier.y[:-1]) == moved and earlier.opacity < 1
    move(lab, causal=False)
    words = found["moved words"]
    standard = f" standard: {dict((n.key, n.note) for n in lab.result.numbers())['moved_bytes'].split(': ')[1]}"
    assert set(words.text) == {standard, " blocks of 8, causal", " blocks of 4, causal"}
    places = sorted(words.y)
    assert min(b - a for a, b in zip(places, places[1:], strict=False)) > 0.1 * lab.figure.layout.yaxis6.range[1]
    assert lab.figure.layout.yaxis6.range[1] > lab.result.standard_bytes / 1e3


def test_one_row_is_no_rows(lab):
    said = {}
    for step in range(1, 11):
        move(lab, step=step)
        (rows,) = (n for n in lab.result.numbers() if n.key == "rescaled")
        said[rows.exact] = rows.text
    assert said[1] == "1 row" and all(text == f"{count:g} rows" for count, text in said.items() if count != 1)


def test_step_0_draws_nothing_but_the_way(lab):
    move(lab, step=0)
    found = traces(lab)
    assert {w for row in found["weights"].z for w in row} == {None}
    assert len(corners(found["to come"])) == 10 and not found["visited"].x and not found["present"].x
    assert not found["error"].x and list(found["moved"].y) == [0]


def test_the_guess_is_answered_by_the_whole_walk_of_the_question(lab):
    lab.prediction.guess.value = "about 2"
    assert "Set blocks of 4, no mask, Tile at its end" in lab.prediction.children[0].children[0].value
    move(lab, block_size=4)
    move(lab, step=36)
    assert lab.prediction._answer is None, "causal"
    move(lab, causal=False)
    mean = lab.result.rescales / 32
    assert f"Your guess: about 2. Measured: {mean:.2g} on average" in lab.prediction._verdict.value
    assert "= 1.7 times in all" in lab.prediction._verdict.value
    assert tile_walk.rescales_a_row(lab.finished[:-1]) is None
    move(lab, step=63)
    assert tile_walk.rescales_a_row(lab.finished[-1:]) is None


def test_a_play_that_runs_ahead_measures_what_it_can_and_its_last_step(lab, ledger):
    move(lab, causal=False, block_size=4)
    player = lab.spec.knobs["step"]
    for step in range(1, 65):
        player.slider.value = step
    assert lab.wait(WAIT_S) and lab.error is None
    steps = [m.params["step"] for m in ledger.read() if m.name == "tile_walk_lab.tiles_visited"][-1:]
    assert steps == [64] and lab.result.params.step == 64 == tile_count(4, False)
    assert "Measured in" in lab.status.text


def test_a_kept_page_shows_the_walk_as_text(lab, monkeypatch):
    monkeypatch.setattr("labkit.labs._frame.to_png", lambda figure: b"\x89PNG picture")
    bundle = lab._repr_mimebundle_()
    assert bundle["text/plain"] == lab.result.text() and "image/png" in bundle
    assert "8 of 10 tiles" in bundle["text/plain"]
