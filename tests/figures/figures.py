"""What tests of figures look at."""

from matplotlib.text import Text


def texts(ax):
    return [text.get_text() for text in ax.texts]


def inside(figure):
    """Everything that is drawn lies inside the figure's edges, which fit a column; letters have 8 pixels or more."""
    figure.draw_without_rendering()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert width <= 8.4
    letters = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    assert min((text.get_fontsize() for text in letters), default=9) * figure.dpi / 72 >= 8  # pixels
    assert box.x0 > -0.02 and box.y0 > -0.02 and box.x1 < width + 0.02 and box.y1 < height + 0.02, box
