"""Choose a length, heads, ranks and a method; see who computes how much, what is sent and held, and what it takes."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_utils.draw.bars import draw_bars
from course_utils.draw.controls import choice, integer, slider
from course_utils.draw.explorer import Explorer
from course_utils.draw.style import DASHED, RANK_COLORS, new_figure, rank_color, tint
from course_utils.hardware import LINKS
from course_utils.units import decimal_bytes

from .context_parallel import METHODS, Attention

_LENGTHS = tuple(2**k for k in range(10, 21))
_RANKS = tuple(2**k for k in range(1, 7))
_LINKS = ("nvlink4", "ib_ndr", "ib_edr")
_NOTE = (
    "Modelled by <code>context_parallel.Attention</code>: forward of causal attention of one layer and one sequence, "
    "bf16, heads of 128 numbers, 400 TFLOP/s, and the link's bandwidth without latency. A ring hides its messages "
    "behind its steps, and its small kernels and merges cost nothing extra; the others hide nothing. Gathering goes "
    "with the zig-zag order. Held: Q, K, V, output and the method's buffers."
)


def _of(method: str, **asked: int | float) -> Attention | None:
    try:
        return Attention(method, **asked)
    except ValueError:
        return None


def _draw_pairs(ax: Axes, chosen: Attention) -> None:
    shown = chosen.pairs
    ax.bar(range(len(shown)), [pairs / 1e9 for pairs in shown], color=[tint(rank_color(r)) for r in range(len(shown))],
           edgecolor=[rank_color(r) for r in range(len(shown))], width=0.8)
    ax.axhline(sum(shown) / len(shown) / 1e9, **DASHED)
    step = max(1, len(shown) // 8)
    ax.set(xlabel="rank", ylabel="pairs of all heads (billions)", xticks=range(0, len(shown), step),
           title="modelled: pairs of each rank (dashed: mean)")


def _draw_times(ax: Axes, methods: dict[str, Attention | None], chosen: str) -> None:
    rows = {name: {"compute": m.compute_seconds, "sending": m.exposed_seconds} if m else {}
            for name, m in methods.items()}
    told = [f"{1e3 * sum(row.values()):,.3g} ms" if row else "not possible" for row in rows.values()]
    colors = {"compute": RANK_COLORS[0], "sending": RANK_COLORS[5]}
    label = "ms (blue: compute, orange: exposed sending)"
    draw_bars(ax, rows, colors, label, scale=1e3, height=0.62, room=1.3, behind=told, weight="normal")
    ax.get_yticklabels()[list(methods).index(chosen)].set_fontweight("bold")
    ax.set_title("modelled: forward of one layer")


def _render(method: str, length: int, heads: int, kv_heads: int, ranks: int, link: str) -> tuple[Figure, str]:
    asked = {"length": length, "heads": heads, "kv_heads": kv_heads, "ranks": ranks,
             "bandwidth": LINKS[link].bandwidth}
    chosen = Attention(method, **asked)
    figure, (left, right) = new_figure(1, 2, size=(8.4, 3.2), gridspec_kw={"width_ratios": [1, 1.2]})
    _draw_pairs(left, chosen)
    _draw_times(right, {name: _of(name, **asked) for name in METHODS}, method)
    words = (
        f"<b>{method}</b>: at most {max(chosen.pairs):,} pairs of all heads on a rank, "
        f"{decimal_bytes(chosen.sent)} sent, {1e3 * chosen.compute_seconds:,.3g} ms of compute, "
        f"{1e3 * chosen.sending_seconds:,.3g} ms of sending, of which {1e3 * chosen.exposed_seconds:,.3g} ms are "
        f"exposed; {decimal_bytes(chosen.held)} held."
    )
    return figure, words


def context_explorer() -> Explorer:
    """Compare ways to split attention over ranks, by `context_parallel.Attention`. What cannot be split is refused."""
    rows = [
        {
            "method": choice("method", METHODS, METHODS[1]),
            "length": slider("tokens", [(f"{n:,}", n) for n in _LENGTHS], 131_072),
            "ranks": slider("ranks", _RANKS, 8),
        },
        {
            "heads": integer("heads", 32), "kv_heads": integer("KV heads", 8),
            "link": choice("link", [(LINKS[name].name, name) for name in _LINKS], "ib_ndr"),
        },
    ]
    return Explorer(rows, _render, note=_NOTE)
