"""The explorer of context parallelism: it says what `context_parallel.Attention` says, and refuses what cannot be."""

import pytest
from figures import Opened, apart, inside, letters, texts

from lessons.long_context_and_experts.context_parallel import METHODS, Attention
from lessons.long_context_and_experts.explorer import context_explorer


@pytest.fixture(scope="module")
def explorer():
    return Opened(context_explorer())


def test_it_says_what_the_formulas_say_and_can_be_read(explorer):
    explorer.ranks.value, explorer.length.value = 4, 8192
    for method in METHODS:
        explorer.method.value = method
        model = Attention(method, 8192, 32, 8, 4)
        for figure in (f"at most {max(model.pairs):,} pairs", f"{1e3 * model.compute_seconds:,.3g} ms of compute",
                       f"which {1e3 * model.exposed_seconds:,.3g} ms"):
            assert figure in explorer.status.value
    inside(explorer.picture.figure)
    for ax in explorer.picture.figure.axes:
        assert apart([text for text in letters(explorer.picture.figure) if text in ax.get_yticklabels()])


def test_every_control_changes_what_is_shown(explorer):
    seen = {explorer.shown}
    for control, value in ((explorer.method, METHODS[0]), (explorer.length, 65_536), (explorer.ranks, 16),
                           (explorer.heads, 64), (explorer.kv_heads, 4), (explorer.link, "nvlink4")):
        control.value = value
        assert explorer.shown not in seen and not explorer.refuses
        seen.add(explorer.shown)


def test_what_cannot_be_split_is_refused_and_others_are_still_drawn(explorer):
    explorer.method.value, explorer.heads.value, explorer.ranks.value = METHODS[1], 32, 64
    assert not explorer.refuses and " not possible" in texts(explorer.picture.figure.axes[1])
    explorer.method.value = "Ulysses"
    assert explorer.refuses and "64 ranks do not divide 32" in explorer.status.value
    explorer.method.value, explorer.heads.value = METHODS[0], 33
    assert explorer.refuses and "multiple of KV heads" in explorer.status.value
