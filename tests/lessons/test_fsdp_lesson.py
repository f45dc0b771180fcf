"""What lesson 07 says of FSDP and no cell of it asserts."""

from __future__ import annotations

import sys
from functools import cache

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from lesson_cells import definitions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from course_utils import HangError, launch
from course_utils.data import Windows
from course_utils.models import TransformerConfig, build_gpt

pytestmark = pytest.mark.guard(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder

SMALL = TransformerConfig(layers=3, hidden=20, heads=2)  # 20 rows are uneven over 3 ranks


@cache
def lesson() -> dict:
    """What the lesson defines, by name."""
    return definitions("07", windows=Windows("train"), gpt=SMALL, wide=SMALL, backend="gloo")


def on_ranks(fn, *args, n, **kwargs):
    return launch(fn, *args, world_size=n, backend="gloo", **kwargs)


def test_frozen_parameters_are_not_reduced_and_ignored_ones_stay_whole():
    def frozen():
        model = build_gpt(SMALL).requires_grad_(False)
        model.blocks[0].norm1.weight.requires_grad_(True)
        ledger = names["ledger_of"](names["shard"](model))
        return ledger.count("all_gather"), [entry.bytes for entry in ledger if entry.op == "reduce_scatter"]

    def ignored():
        model = build_gpt(SMALL)
        norms = {p for p in model.parameters() if p.ndim == 1}
        names["shard"](model, ignored_params=norms)
        names["loss_of"](model, *names["my_part"](0)).backward()
        assert all(isinstance(p, DTensor) == (p.ndim > 1) for p in model.parameters())
        return model.norm.bias.grad

    names = lesson()
    assert on_ranks(frozen, n=2) == [(7, [80])] * 2
    one, other = on_ranks(ignored, n=2)
    assert not torch.equal(one, other)


def test_a_batch_less_in_each_epoch_mixes_epochs_and_hangs_at_the_end(capfd):
    def two_epochs():
        last = dist.get_rank() == dist.get_world_size() - 1
        layer = fully_shard(torch.nn.Linear(1, dist.get_world_size(), bias=False))
        for size in (1.0, 10.0):
            for _ in range(2 if last else 3):
                layer.zero_grad()
                layer(torch.full((1, 1), size)).sum().backward()
                if dist.get_rank() == 0:
                    print(f"epoch: {layer.weight.grad.to_local().item()}")

    with pytest.raises(HangError, match="has returned"):
        on_ranks(two_epochs, n=2, timeout=10)
    assert [line.split(": ")[-1] for line in capfd.readouterr().out.splitlines() if "epoch" in line] == [
        "1.0", "1.0", "5.5", "10.0"
    ]


def test_a_full_state_dict_that_only_rank_0_asks_for_hangs():
    def rank_0_only():
        model = names["shard"](build_gpt(SMALL))
        if dist.get_rank() == 0:
            get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))

    names = lesson()
    with pytest.raises(HangError):
        on_ranks(rank_0_only, n=2, timeout=8)


def test_a_sharded_model_saved_by_hand_claims_the_whole_shape_and_has_a_part(tmp_path):
    def by_hand():
        model = names["shard"](build_gpt(SMALL))
        file = tmp_path / f"rank-{dist.get_rank()}.pt"
        torch.save(model.state_dict(), file)
        pieces = torch.load(file)
        weight = pieces["blocks.0.mlp.up.weight"]
        assert weight.shape[0] == 2 * weight.to_local().shape[0]
        with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
            build_gpt(SMALL).load_state_dict(pieces)

    names = lesson()
    on_ranks(by_hand, n=2)
