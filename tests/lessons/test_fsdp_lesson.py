"""The instruments and the safe saving of lesson 07, as its text defines them, on cases of their own."""

from __future__ import annotations

import sys
from functools import cache

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lesson_cells import definitions
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from course_utils import HangError, WorkerError, launch, memory, record
from course_utils.data import Windows
from course_utils.models import TransformerConfig, build_gpt
from course_utils.programs import SCRIPTS, excerpt, folded
from course_utils.ranks import Entry, Ledger
from lessons.fsdp.sharded import Elsewhere, SlowLink, equal_states, padded_bytes, ring_traffic, time_steps

pytestmark = pytest.mark.guard(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder

SMALL = TransformerConfig(layers=3, hidden=20, heads=2)  # 20 rows are uneven over 3 ranks


@cache
def lesson() -> dict:
    """What the lesson defines, by name."""
    return definitions("07", windows=Windows("train"), gpt=SMALL, wide=SMALL, backend="gloo")


def on_ranks(fn, *args, n, **kwargs):
    return launch(fn, *args, world_size=n, backend="gloo", **kwargs)


@pytest.mark.parametrize("n", [2, 3])
def test_a_step_is_three_times_the_padded_model(n):
    ledgers = on_ranks(lesson()["step_ledger"], root={"reshard_after_forward": True}, n=n)
    size = padded_bytes(build_gpt(SMALL), n)
    assert [ledger.bytes() for ledger in ledgers] == [3 * size] * n
    assert (size == 4 * SMALL.parameter_count) == (n == 2)


def test_between_steps_a_rank_holds_its_part_of_all_states():
    def held():
        model = names["shard"](build_gpt(SMALL))
        optimizer = names["adam"](model)
        names["loss_of"](model, *names["my_part"](0)).backward()
        optimizer.step()
        return memory.held_memory(model, optimizer)

    names = lesson()
    size = padded_bytes(build_gpt(SMALL), 2)
    for found in on_ranks(held, n=2):
        assert found.parameters == found.gradients == size / 2


def test_timeline_names_every_message_and_holds_two_blocks_at_most():
    lanes, line = on_ranks(lesson()["watch_blocks"], n=3)[0]
    blocks = [f"block {i}" for i in range(3)]
    assert [unit for unit, *_ in lanes["all-gather"]] == ["root", *blocks, *blocks[::-1]]
    assert [unit for unit, *_ in lanes["reduce-scatter"]] == [*blocks[::-1], "root"]
    block = padded_bytes(build_gpt(SMALL).blocks[0], 3)
    root = padded_bytes(build_gpt(SMALL), 3) - 3 * block
    held = [size for _, size in line]
    assert block + root < max(held) <= 2 * block + root and held[-1] == 0


def test_kept_weights_grow_over_forward_and_are_gathered_once():
    lanes, line = on_ranks(lesson()["watch_blocks"], reshard_after_forward=False, n=2)[0]
    assert len(lanes["all-gather"]) == 4
    assert dict(line)[lanes["backward"][0][1]] == 4 * SMALL.parameter_count


def test_forward_holds_a_block_twice_as_the_tracker_counts_it():
    def tracked():
        model, seen = names["shard"](build_gpt(SMALL)), []
        names["loss_of"](model, *names["my_part"](0)).backward()
        with memory.track(model) as tracker:
            for block in model.blocks:
                block.mlp.register_forward_hook(lambda *_: seen.append(tracker.mark("").buffers))
            names["loss_of"](model, *names["my_part"](1))
        return seen

    names = lesson()
    lanes, line = on_ranks(names["watch_blocks"], n=2)[0]
    block = padded_bytes(build_gpt(SMALL).blocks[0], 2)
    root = padded_bytes(build_gpt(SMALL), 2) - 3 * block
    computing = [dict(line)[at] for unit, at, _ in lanes["forward"] if unit != "root"]
    assert computing == on_ranks(tracked, n=2)[0] == [root + 2 * block] * 3


def test_traffic_follows_the_ring_of_each_group():
    node = {rank: rank // 2 for rank in range(4)}

    def ledgers(op, size, *groups):
        of = {rank: group for group in groups for rank in group}
        return [Ledger([Entry(op, "", size, None, of[rank], 1, 0.0)]) for rank in range(4)]

    assert ring_traffic(ledgers("all_gather", 400, (0, 1, 2, 3)), node) == (600, 600)
    assert ring_traffic(ledgers("all_gather", 400, (0, 1), (2, 3)), node) == (800, 0)
    assert ring_traffic(ledgers("all_reduce", 200, (0, 2), (1, 3)), node) == (0, 800)


def test_between_nodes_hsdp_sends_two_copies_less_than_twice_the_nodes():
    def hybrid(nodes):
        mesh = init_device_mesh("cpu", (nodes, 2), mesh_dim_names=("replicate", "shard"))
        return names["step_ledger"](mesh=mesh)

    names = lesson()
    node = {rank: rank // 2 for rank in range(6)}
    model, freed = build_gpt(SMALL), {"root": {"reshard_after_forward": True}}
    between = ring_traffic(on_ranks(hybrid, 3, n=6), node)[1]
    assert between == pytest.approx(2 * (3 - 1) * padded_bytes(model, 2))
    between = ring_traffic(on_ranks(names["step_ledger"], n=6, **freed), node)[1]
    assert between == pytest.approx(3 * 3 * padded_bytes(model, 6) * 5 / 6)


def test_hsdp_can_reduce_between_nodes_once():
    def accumulate(once):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = names["shard"](build_gpt(SMALL), mesh=mesh)
        with record() as ledger:
            for i in range(3):
                model.set_requires_all_reduce(not once or i == 2)
                names["loss_of"](model, *names["my_part"](i)).backward()
        gradient = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
        return ledger.count("reduce_scatter"), ledger.count("all_reduce"), gradient

    names = lesson()
    (scatters, reduces, plain), (same, fewer, once) = (on_ranks(accumulate, o, n=4)[0] for o in (False, True))
    assert (scatters, reduces, same, fewer) == (12, 12, 12, 4)
    assert torch.allclose(plain, once, atol=1e-6)


def test_recomputed_blocks_are_not_gathered_again():
    def gathers():
        model = build_gpt(SMALL)
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block)
            model.blocks[i].compile(backend="aot_eager")
        return names["ledger_of"](names["shard"](model)).count("all_gather")

    names = lesson()
    assert on_ranks(gathers, n=2, timeout=120) == [7, 7]


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


@pytest.mark.parametrize("reduce_dtype, expected", [(None, torch.bfloat16), (torch.float32, torch.float32)])
def test_whole_gradients_are_added_up_in_the_dtype_they_are_reduced_in(reduce_dtype, expected):
    def dtypes():
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        model = names["shard"](build_gpt(SMALL), mp_policy=policy)
        model.set_requires_gradient_sync(False)
        for step in range(2):
            names["loss_of"](model, *names["my_part"](step)).backward()
        groups = [group for unit in model.modules() if hasattr(unit, "_get_fsdp_state")
                  for group in unit._get_fsdp_state()._fsdp_param_groups]
        held = [p.unsharded_accumulated_grad for group in groups for p in group.fsdp_params]
        whole = [p._unsharded_param.grad for group in groups for p in group.fsdp_params]
        return {gradient.dtype for gradient in (*held, *whole) if gradient is not None}

    names = lesson()
    assert on_ranks(dtypes, n=2) == [{expected}] * 2


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
        on_ranks(two_epochs, n=2, timeout=15)
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


def test_hsdp_trains_as_one_process():
    def losses(nodes):
        options = {"mesh": init_device_mesh("cpu", (nodes, 2), mesh_dim_names=("replicate", "shard"))} if nodes else {}
        model = names["shard"](build_gpt(SMALL), **options)
        return names["train"](model, names["adam"](model), range(3)), str(model.embedding.weight.placements)

    names = lesson()
    (alone, _), (hybrid, placements) = on_ranks(losses, 0, n=1)[0], on_ranks(losses, 2, n=4)[0]
    assert hybrid == pytest.approx(alone, abs=1e-4) and placements == "(Replicate(), Shard(dim=0))"


def test_messages_run_beside_blocks_that_compute_elsewhere():
    def timed(beside, hint):
        model = names["shard"](Elsewhere(blocks=3, seconds=0.05))
        link = SlowLink(model, beside, seconds=0.04)
        if hint:
            for block, following in zip(model.blocks[:-1], model.blocks[1:], strict=True):
                block.set_modules_to_forward_prefetch([following])
        step = time_steps(model, link, steps=3)
        assert [unit for unit, *_ in step["lanes"]["compute"]] == [f"block {i}" for i in (0, 1, 2, 2, 1, 0)]
        assert all(end - start > 0.039 for _, start, end in step["lanes"]["all-gather"])
        gradients = {tuple(p.grad.full_tensor().flatten().tolist()) for p in model.parameters()}
        return step["beside"], gradients

    names = lesson()
    found = [on_ranks(timed, *flags, n=2)[0] for flags in ((False, False), (True, False), (True, True))]
    assert [beside for beside, _ in found] == [0, 2, 4]
    assert found[0][1] == found[1][1] == found[2][1]


def test_an_excerpt_is_whole_lines_without_indent(tmp_path):
    text = excerpt(SCRIPTS / "train.py", 'with torch.device("meta")', "model.to_empty")
    assert text.startswith("with torch.device") and "fully_shard(block" in text and text.endswith("device=device)")
    with pytest.raises(ValueError, match="no lines"):
        excerpt(SCRIPTS / "train.py", "model.to_empty", "what is not there")


def test_functions_code_and_files_are_folded_under_one_line():
    text = folded("The *source*", test_an_excerpt_is_whole_lines_without_indent, "x = 1\n", SCRIPTS / "hello.py").data
    assert text.startswith("<details><summary>The *source*</summary>\n\n```python\ndef test_an_excerpt")
    assert "\n\n\nx = 1\n\n\n" in text and text.endswith("```\n\n</details>")
    assert (SCRIPTS / "hello.py").read_text() in text
    assert "```yaml\n" in folded("A file", "a: 1", language="yaml").data


def test_random_states_under_a_key_for_each_rank_come_back(tmp_path):
    def save():
        torch.manual_seed(dist.get_rank())
        dcp.save({f"random {dist.get_rank()}": torch.get_rng_state(), "step": 3}, checkpoint_id=tmp_path)
        return torch.rand(1).item()

    def load():
        state = {f"random {dist.get_rank()}": torch.get_rng_state(), "step": 0}
        dcp.load(state, checkpoint_id=tmp_path)
        torch.set_rng_state(state[f"random {dist.get_rank()}"])
        return torch.rand(1).item(), state["step"]

    drawn = on_ranks(save, n=2)
    assert drawn[0] != drawn[1] and on_ranks(load, n=2) == [(drawn[0], 3), (drawn[1], 3)]


def test_checkpoint_is_read_by_fewer_and_by_more_ranks(tmp_path):
    save, load = lesson()["save"], lesson()["load"]
    after, saved = on_ranks(save, tmp_path / "step-2", n=3)[0]
    for n in (2, 4):
        losses, loaded = on_ranks(load, tmp_path / "step-2", n=n)[0]
        assert equal_states(loaded, saved)
        assert losses == pytest.approx(after, abs=1e-4)


def test_a_checkpoint_written_beside_training_has_the_weights_of_the_call(tmp_path):
    assert all(moved > 1e-3 and equal for moved, equal, _ in on_ranks(lesson()["save_beside"], tmp_path, n=3))


def test_a_rank_that_dies_while_saving_leaves_the_last_checkpoint(tmp_path):
    names = lesson()
    save, again, latest = names["safe_save"], names["one_more_step"], names["latest"]

    def first(folder):
        model = names["shard"](build_gpt(SMALL))
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
    model = build_gpt(SMALL)
    names["loss_of"](model, *Windows("train").batch(range(8), "cpu")).backward()
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
