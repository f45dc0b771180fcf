"""The instruments and the safe saving of lesson 07, as its text defines them, on cases of their own."""

from __future__ import annotations

import sys
from functools import cache

import cloudpickle
import pytest
import torch.distributed as dist
from lessons import definitions

from course_utils import WorkerError, launch
from course_utils.data import Windows
from course_utils.ledger import Entry, Ledger
from course_utils.models import GPTConfig, build, parameters

pytestmark = pytest.mark.guard(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder

SMALL = GPTConfig(layers=3, hidden=20, heads=2)  # 20 rows are uneven over 3 ranks


@cache
def lesson() -> dict:
    """What the lesson defines, by name."""
    return definitions("07", windows=Windows("train"), gpt=SMALL, wide=SMALL, backend="gloo")


def on_ranks(fn, *args, n, **kwargs):
    return launch(fn, *args, world_size=n, backend="gloo", **kwargs)


@pytest.mark.parametrize("n", [2, 3])
def test_a_step_is_three_times_the_padded_model(n):
    ledgers = on_ranks(lesson()["step_ledger"], root={"reshard_after_forward": True}, n=n)
    size = lesson()["padded"](build(SMALL), n)
    assert [ledger.bytes() for ledger in ledgers] == [3 * size] * n
    assert (size == 4 * parameters(SMALL)) == (n == 2)


def test_timeline_names_every_message_and_holds_two_blocks_at_most():
    lanes, line = lesson()["lanes_of"](on_ranks(lesson()["watch_blocks"], n=3)[0])
    blocks = [f"block {i}" for i in range(3)]
    assert [unit for unit, *_ in lanes["all-gather"]] == ["root", *blocks, *blocks[::-1]]
    assert [unit for unit, *_ in lanes["reduce-scatter"]] == [*blocks[::-1], "root"]
    block = lesson()["padded"](build(SMALL).blocks[0], 3)
    root = lesson()["padded"](build(SMALL), 3) - 3 * block
    held = [size for _, size in line]
    assert block + root < max(held) <= 2 * block + root and held[-1] == 0


def test_kept_weights_grow_over_forward_and_are_gathered_once():
    lanes, line = lesson()["lanes_of"](on_ranks(lesson()["watch_blocks"], reshard_after_forward=False, n=2)[0])
    assert len(lanes["all-gather"]) == 4
    assert max(size for _, size in line) == 4 * parameters(SMALL)


def test_traffic_follows_the_ring_of_each_group():
    names = lesson()
    names["node"] = {rank: rank // 2 for rank in range(4)}

    def ledgers(op, size, *groups):
        of = {rank: group for group in groups for rank in group}
        return [Ledger([Entry(op, "", size, None, of[rank], 1, 0.0)]) for rank in range(4)]

    traffic = names["traffic"]
    assert traffic(ledgers("all_gather", 400, (0, 1, 2, 3))) == (600, 600)
    assert traffic(ledgers("all_gather", 400, (0, 1), (2, 3))) == (800, 0)
    assert traffic(ledgers("all_reduce", 200, (0, 2), (1, 3))) == (0, 800)


def test_checkpoint_is_read_by_fewer_and_by_more_ranks(tmp_path):
    save, load, equal = (lesson()[name] for name in ("save", "load", "equal"))
    after, saved = on_ranks(save, tmp_path, n=3)[0]
    for kind, n in (("plain", 2), ("async", 4)):
        losses, loaded = on_ranks(load, tmp_path / kind, n=n)[0]
        assert equal(loaded, saved)
        assert losses == pytest.approx(after, abs=1e-4)


def test_a_rank_that_dies_while_saving_leaves_the_last_checkpoint(tmp_path):
    names = lesson()
    save, again, latest = names["safe_save"], names["one_more_step"], names["latest"]

    def first(folder):
        model = names["shard"](build(SMALL))
        save(names["state_of"](model, names["adam"](model)), folder, 2)

    on_ranks(first, tmp_path, n=2)
    with pytest.raises(WorkerError, match="SIGKILL"):
        on_ranks(again, tmp_path, True, n=2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-2", "step-3.unfinished"]
    assert latest(tmp_path).name == "step-2"


def test_latest_goes_by_number_and_leaves_out_what_is_unfinished(tmp_path):
    for name in ("step-9", "step-10", "step-11.unfinished"):
        (tmp_path / name).mkdir()
    assert lesson()["latest"](tmp_path).name == "step-10"


def test_norm_of_the_own_pieces_is_not_the_norm():
    own, norm, left, _ = zip(*on_ranks(lesson()["norms"], 0.1, n=3), strict=True)
    assert sum(value**2 for value in own) ** 0.5 == pytest.approx(norm[0], rel=1e-5)
    assert left == pytest.approx([0.1] * 3, rel=1e-4) and len({*norm}) == 1


@pytest.mark.parametrize("how", ["plain", "sync at the end", "keep weights"])
def test_accumulated_gradients_are_the_same_and_cost_what_they_cost(how):
    names = lesson()
    names["world_size"] = 2
    ledger, gradient = on_ranks(names["accumulate"], how, n=2)[0]
    model = build(SMALL)
    names["loss_of"](model, *names["take"](range(8))).backward()
    expected = [p.grad.flatten() for p in model.parameters()]
    assert gradient.tolist() == pytest.approx([x for part in expected for x in part.tolist()], abs=1e-6)
    counts = {"plain": (28, 16), "sync at the end": (28, 4), "keep weights": (4, 4)}
    assert (ledger.count("all_gather"), ledger.count("reduce_scatter")) == counts[how]


def test_the_mistakes_are_still_mistakes():
    losses = on_ranks(lesson()["optimizer_first"], n=2)[0]
    assert max(losses) - min(losses) < 0.2
    spread, gathers = on_ranks(lesson()["no_root"], n=2)[0]
    assert spread > 0.001 and gathers == 3
    for how in ("forward", "head"):
        with pytest.raises(WorkerError, match="mixed torch.Tensor and DTensor"):
            on_ranks(lesson()["bypass"], how, n=2)


def test_ranks_are_left_as_they_were():
    assert on_ranks(dist.get_rank, n=2) == [0, 1]
