"""What tests of figures look at."""


def texts(ax):
    return [text.get_text() for text in ax.texts]


def inside(figure):
    """Everything that is drawn lies inside the figure's edges."""
    figure.draw_without_rendering()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert box.x0 > -0.02 and box.y0 > -0.02 and box.x1 < width + 0.02 and box.y1 < height + 0.02, box
