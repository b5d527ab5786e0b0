"""Whether a lab's panel titles fit where they stand, in a window of a given width."""

from tests.browser.jupyterlab import OpenNotebook

NARROW = 1180
_DRAWN_MS = 10_000
_FITS = """width => {
    const plot = document.querySelector('.labkit-lab .js-plotly-plot');
    const lab = plot?.closest('.labkit-lab');
    return window.innerWidth === width && plot._fullLayout.width <= lab.clientWidth
        && plot._fullLayout.width > 0.9 * lab.clientWidth;
}"""
_STAY_MS = 1_500
_STAY = """ms => {
    const notes = document.querySelectorAll('.labkit-lab .js-plotly-plot .infolayer .annotation');
    const where = JSON.stringify([...notes].map(note => note.getBoundingClientRect()));
    if (window.notesAt?.where !== where) window.notesAt = { where, since: performance.now() };
    return performance.now() - window.notesAt.since > ms;
}"""
_WRONG = """() => {
    const plot = document.querySelector('.labkit-lab .js-plotly-plot');
    const frame = plot.querySelector('.main-svg').getBoundingClientRect();
    const notes = [...plot.querySelectorAll('.infolayer .annotation')]
        .map(note => ({ text: note.textContent, box: note.getBoundingClientRect() })).filter(note => note.box.width);
    const apart = (a, b) => a.right <= b.left || b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top;
    const cut = notes.filter(({ box }) => box.left < frame.left || box.right > frame.right);
    const covered = notes.filter((one, i) => notes.some((other, j) => i !== j && !apart(one.box, other.box)));
    return [...cut.map(note => 'cut: ' + note.text), ...covered.map(note => 'covered: ' + note.text)];
}"""


def wrong_titles(notebook: OpenNotebook, width: int = NARROW) -> list[str]:
    """The titles that are cut off at the figure's side or cover one another, in a window so wide, which stays so."""
    page = notebook.page
    page.set_viewport_size({"width": width, "height": page.viewport_size["height"]})
    page.wait_for_function(_FITS, arg=width, timeout=_DRAWN_MS)
    # plotly knows its new width before it has moved the titles there.
    page.wait_for_function(_STAY, arg=_STAY_MS, timeout=_DRAWN_MS)
    return page.evaluate(_WRONG)
