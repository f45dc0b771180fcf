"""What every explorer shares."""

from __future__ import annotations

import io

from matplotlib.figure import Figure


def png(figure: Figure) -> bytes:
    """Return `figure` as a PNG that is the same each time."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
