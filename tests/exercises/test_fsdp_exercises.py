"""The exercises on FSDP2: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

import re
from itertools import groupby

import pytest
import torch
import torch.distributed as dist
from exercise_cases import ExerciseTests, hangs
from torch import nn

from course_utils import launch
from lessons.fsdp import check as fsdp

pytestmark = pytest.mark.guard(90)

WRONG: dict[str, dict] = {}
RIGHT: dict[str, dict] = {}

# ------------------------------------------------------------------------------------------------ units and peak

UNIT = "fully_shard(blocks[i : i + 2])"
EACH_BLOCK = "for block in blocks[i : i + 2]:\n    fully_shard(block"
ADAM = "torch.optim.Adam(model.parameters(), learning_rate)"
POLICY = "from torch.distributed.fsdp import MixedPrecisionPolicy\n\npolicy = MixedPrecisionPolicy"
WRONG["wrap_under_target"] = {
    "not-distributed": {UNIT: "pass", "fully_shard(model)": "pass"},
    "no-optimizer": f"return {ADAM}  ->  return model",
    "no-root": [
        "fully_shard(model)  ->  pass",
        {UNIT: "pass", "fully_shard(model)": "dist.all_reduce(torch.zeros(1))"},
    ],
    "only-root": f"{UNIT}  ->  pass",
    "too-many-gathers": f"{UNIT}  ->  {EACH_BLOCK})",
    "root-again": "fully_shard(model)  ->  fully_shard(model, reshard_after_forward=True)",
    "too-large": {"len(blocks), 2)": "len(blocks), 4)", "i + 2": "i + 4"},
    "kept": f"{UNIT}  ->  {EACH_BLOCK}, reshard_after_forward=False)",
    "optimizer-before": {f"return {ADAM}": "return optimizer", "blocks = list": f"optimizer = {ADAM}\nblocks = list"},
    "precision": {
        "blocks = list": f"{POLICY}(param_dtype=torch.bfloat16, output_dtype=torch.float64)\nblocks = list",
        UNIT: "fully_shard(blocks[i : i + 2], mp_policy=policy)",
    },
    "error": {"fully_shard(model)": "pass", "blocks = list": "fully_shard(model)\nblocks = list"},
}
RIGHT["wrap_under_target"] = {
    "pairs from the end": "in range(0, len(blocks), 2)  ->  in reversed(range(0, len(blocks), 2))",
    "AdamW without decay": f"{ADAM}  ->  "
    "torch.optim.AdamW([*model.parameters()], learning_rate, weight_decay=0, foreach=False)",
}

# ------------------------------------------------------------------------------------------------ two-level cluster

MESH = 'init_device_mesh("cpu", (nodes, per_node), mesh_dim_names=names)'
SHARD_BLOCK, SHARD_MODEL = "fully_shard(block, mesh=mesh)", "fully_shard(model, mesh=mesh)"
OF_TABLE = 'dist.device_mesh.DeviceMesh("cpu", torch.arange(nodes * per_node).view('
BETWEEN_NODES = """dist.all_reduce(p.grad.to_local().div_(nodes), group=mesh.get_group("replicate"))"""
AND_ONCE_MORE = f"""{SHARD_MODEL}
for p in model.parameters():
    p.register_post_accumulate_grad_hook(lambda p: {BETWEEN_NODES})"""
IN_A_NODE = {
    SHARD_BLOCK: 'fully_shard(block, mesh=mesh["shard"])',
    SHARD_MODEL: AND_ONCE_MORE.replace("mesh=mesh", 'mesh=mesh["shard"]'),
}
BEYOND_THE_LEDGER = """mesh.get_group("replicate")._get_backend(torch.device("cpu")).allreduce(
        [p.grad.to_local().div_(nodes)]).wait()"""
WRONG["fewest_internode_bytes"] = {
    "not-distributed": {f"mesh = {MESH}": "pass", SHARD_BLOCK: "pass", SHARD_MODEL: "pass"},
    "no-root": f"{SHARD_MODEL}  ->  pass",
    "full-shard": f"{SHARD_MODEL}  ->  fully_shard(model)",
    "transposed": f"{MESH}  ->  {OF_TABLE}nodes, per_node).T.contiguous(), mesh_dim_names=names)",
    "swapped": [
        "(nodes, per_node), mesh  ->  (per_node, nodes), mesh",
        "(nodes, per_node), mesh  ->  sorted((nodes, per_node), reverse=nodes < per_node), mesh",
    ],
    "wrong-ranks": f"{MESH}  ->  {OF_TABLE}per_node, nodes).T.contiguous(), mesh_dim_names=names)",
    "replicas": "(nodes, per_node), mesh  ->  (nodes * per_node, 1), mesh",
    "nodes-apart": f'{MESH}  ->  {MESH}["shard"]',
    "precision": {
        "names = (": f"{POLICY}(reduce_dtype=torch.bfloat16)\nnames = (",
        SHARD_BLOCK: "fully_shard(block, mesh=mesh, mp_policy=policy)",
        SHARD_MODEL: "fully_shard(model, mesh=mesh, mp_policy=policy)",
    },
    "too-many-bytes": f"{SHARD_MODEL}  ->  {AND_ONCE_MORE}",
    "too-few-bytes": IN_A_NODE | {BETWEEN_NODES: BEYOND_THE_LEDGER},
}
RIGHT["fewest_internode_bytes"] = {
    "a table of ranks, the model in one unit": {
        MESH: f"{OF_TABLE}nodes, per_node), mesh_dim_names=('between', 'inside'))", SHARD_BLOCK: "pass",
    },
    "the blocks in one unit": {
        "for block in model.blocks:": "if True:", SHARD_BLOCK: "fully_shard(list(model.blocks), mesh=mesh)",
    },
    "own all-reduces between the nodes": IN_A_NODE,
}

# ------------------------------------------------------------------------------------------------ resharding

BOUNDS = "begin, end = min(rank * new, rows), min((rank + 1) * new, rows)"
READ = "read(file, start - file * old, stop - file * old)"
JOINED = "return torch.cat(pieces)"
WRONG["reshard"] = {
    "tensor": f"{JOINED}  ->  return pieces",
    "dtype": f"{JOINED}  ->  out = torch.empty(torch.cat(pieces).shape)\nout[:] = torch.cat(pieces)\nreturn out",
    "dropped": [
        "-(-rows // ranks)  ->  rows // ranks",
        "in range(saved)  ->  in range(rows // old)",
    ],
    "balanced": f"{BOUNDS}  ->  small, more = divmod(rows, ranks)\n"
    "begin = rank * small + min(rank, more)\nend = begin + small + (rank < more)",
    "padding": f"{JOINED}  ->  return torch.nn.functional.pad(torch.cat(pieces), (0, 0, 0, new - (end - begin)))",
    "order": "in range(saved)  ->  in reversed(range(saved))",
    "own-file": f"{JOINED}  ->  return read(rank, 0, min((rank + 1) * old, rows) - rank * old)",
    "whole": f"{BOUNDS}  ->  begin, end = 0, rows",
    "no-rows": [
        "[read(0, 0, 0)]  ->  []",
        f"{JOINED}  ->  return torch.cat(pieces) if begin < end else torch.empty(0, 3, dtype=torch.bfloat16)",
        f"{JOINED}  ->  return torch.cat(pieces) if begin < end else torch.empty(0, pieces[0].shape[1])",
    ],
    "wrong-rows": "-(-rows // saved)  ->  rows // saved",
    "past-the-end": f"{READ}  ->  read(file, start, stop)",
    "every-file": {
        "max(begin, file * old), min(end, (file + 1) * old)": "file * old, min(rows, (file + 1) * old)",
        JOINED: f"{JOINED}[begin:end]",
    },
    "more-rows": f"{READ}  ->  read(file, 0, min(rows - file * old, old))[start - file * old : stop - file * old]",
    "many-reads": f"pieces.append({READ})  ->  "
    "pieces += [read(file, row - file * old, row - file * old + 1) for row in range(start, stop)]",
}


def rows_grouped_by_file(rows, saved, rank, ranks, read):
    chunks, size = torch.arange(rows).chunk(ranks), -(-rows // saved)
    own = chunks[rank].tolist() if rank < len(chunks) else []
    groups = [(file, list(group)) for file, group in groupby(own, key=lambda row: row // size)]
    pieces = [read(file, group[0] % size, group[-1] % size + 1) for file, group in groups]
    return torch.cat(pieces) if pieces else read(0, 0, 0)


RIGHT["reshard"] = {
    "rows grouped by file": rows_grouped_by_file,
    "into a tensor made before": {
        "pieces = [read(0, 0, 0)]": "like = read(0, 0, 0)\nout = like.new_empty(end - begin, like.shape[1])",
        f"pieces.append({READ})": f"out[start - begin : stop - begin] = {READ}",
        JOINED: "return out",
    },
    "whole numbers as tensors": f"{READ}  ->  read(*torch.tensor([{READ[5:-1]}]))",
    "limits from torch.chunk": f"{BOUNDS}  ->  "
    "own = [*torch.arange(rows).chunk(ranks), *[torch.empty(0)] * ranks][rank]\n"
    "begin, end = (own[0], own[-1] + 1) if len(own) else (0, 0)",
    "an empty slice of every file": "if start < stop:  ->  start = min(start, rows)\nstop = max(start, stop)\n"
    "if file * old <= start <= stop <= min(rows, (file + 1) * old):",
}

# ------------------------------------------------------------------------------------------------ clipping

SQUARES = "sum(g.square().sum() for g in sharded)"
REDUCED = "dist.all_reduce(squares)"
COPIES = "squares += sum(g.square().sum() for g in replicated)"
COUNTED_BY_ALL = {"for g in sharded)": "for g in [*sharded, *replicated])", COPIES: "pass"}
OF_ROOTS = {REDUCED: f"squares = squares.sqrt()\n{REDUCED}", "norm = squares.sqrt()": "norm = squares"}
COEFFICIENT = "min(1.0, max_norm / (norm.item() + 1e-6))"
SCALED = "gradient.mul_(coefficient)"
ALL = "(*sharded, *replicated):"
WRONG["clip_sharded"] = {
    "not-distributed": f"{REDUCED}  ->  pass",
    "tensor": "return norm  ->  pass",
    "local": "dist.all_reduce(squares)  ->  dist.all_reduce(squares.clone())",
    "sum-of-norms": [
        OF_ROOTS | COUNTED_BY_ALL,
        {SQUARES: "sum(g.norm() for g in sharded)", COPIES: "squares += sum(g.norm() for g in replicated)",
         "norm = squares.sqrt()": "norm = squares"},
    ],
    "no-root": "norm = squares.sqrt()  ->  norm = squares",
    "mean": f"{REDUCED}  ->  dist.all_reduce(squares, op=dist.ReduceOp.AVG)",
    "replicated-twice": COUNTED_BY_ALL,
    "replicated-forgotten": f"{COPIES}  ->  pass",
    "norm-after": "return norm  ->  return norm.clamp(max=max_norm)",
    "float32": f"{SQUARES}  ->  {SQUARES}.float()",
    "not-scaled": f"{SCALED}  ->  gradient = gradient * coefficient",
    "replicated-not-scaled": f"in {ALL}  ->  in sharded:",
    "scaled-up": f"{COEFFICIENT}  ->  max_norm / (norm.item() + 1e-6)",
    "each-tensor": f"{SCALED}  ->  gradient.mul_(min(1.0, max_norm / (gradient.norm().item() + 1e-6)))",
    "zero": [
        f"{COEFFICIENT}  ->  (max_norm / norm).clamp(max=1) if norm else norm / norm",
        "norm.item() + 1e-6  ->  norm.item()",
    ],
    "gathered": f"{REDUCED}  ->  everyone = [None] * dist.get_world_size()\ndist.all_gather_object(everyone, sharded)\n"
    "squares = sum(g.square().sum() for pieces in everyone for g in pieces)",
    "too-many-messages": f"{REDUCED}  ->  dist.reduce(squares, 0)\ndist.broadcast(squares, 0)",
    "value": f"{REDUCED}  ->  import sys\n\ndist.all_reduce(torch.zeros(1))\n"
    "squares = 0 * squares + sum(g.square().sum() for g in sys._getframe(1).f_locals['sharded'])",
    "hang": hangs(f"{REDUCED}  ->  if any(g.numel() for g in sharded):\n    {REDUCED}"),
}
RIGHT["clip_sharded"] = {
    "one number of each rank gathered": f"{REDUCED}  ->  "
    "everyone = [torch.empty_like(squares) for _ in range(dist.get_world_size())]\n"
    "dist.all_gather(everyone, squares)\nsquares = sum(everyone)",
    "rank 0 brings the replicated ones": {
        "for g in sharded)": "for g in [*sharded, *(replicated if dist.get_rank() == 0 else [])])", COPIES: "pass",
    },
    "every rank brings a share of the replicated ones, a float is returned": {
        SQUARES: f"{SQUARES} + sum(g.square().sum() for g in replicated) / dist.get_world_size()", COPIES: "pass",
        "return norm": "return norm.item()",
    },
    "torch._foreach and a functional collective": {
        SQUARES: "torch.stack([torch.linalg.vector_norm(g) for g in sharded]).square().sum()",
        REDUCED: "import torch.distributed._functional_collectives as functional\n\n"
        "squares = functional.wait_tensor(functional.all_reduce(squares, 'sum', dist.group.WORLD))",
        f"for gradient in {ALL}\n        {SCALED}": "torch._foreach_mul_([*sharded, *replicated], coefficient)",
    },
}

# ------------------------------------------------------------------------------------------------ paper problem

WRONG["fsdp_traffic"] = fsdp.fsdp_traffic.slips | {
    "number": "return gathers, layers + 1, (  ->  return (",
    "numbers": "2 * layers + 1)  ->  2 * layers)",
    "typed": "gathers = micro  ->  layers, block, around, ranks = 32, 201_379_840, 214_249_472, 64\n"
    "parameter_bytes, gradient_bytes, micro_batches = 2, 4, 1\ngathers = micro",
}


def counted_unit_by_unit(layers, block, around, ranks, parameter_bytes, gradient_bytes, micro_batches):
    gathers, reduces, size = 0, 0, 0
    for micro_batch in range(micro_batches):
        for unit in [around, *[block] * layers]:
            times = 1 if unit == around else 2
            gathers, size = gathers + times, size + times * unit * parameter_bytes
            if micro_batch == 0:
                reduces, size = reduces + 1, size + unit * gradient_bytes
    return gathers, reduces, size * (1 - 1 / ranks) / 1e9


RIGHT["fsdp_traffic"] = {
    "an array": {"return gathers, ": "return torch.tensor([gathers, ", "/ 1e9": "/ 1e9], dtype=torch.float64)"},
    "counted unit by unit": counted_unit_by_unit,
}


def _local_rows(sizes):
    from torch.distributed.fsdp import fully_shard

    return [len(fully_shard(nn.Linear(2, rows, bias=False)).weight.to_local()) for rows in sizes]


def _clipped_by_pytorch():
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    layer = fully_shard(nn.Linear(3, 5).double())
    (100 * layer(torch.ones(2, 3).double())).square().sum().backward()
    before = [p.grad.to_local().clone() for p in layer.parameters()]
    norm = nn.utils.clip_grad_norm_(layer.parameters(), 1.0).full_tensor().item()
    return before, norm, [p.grad.to_local().clone() for p in layer.parameters()]


class TestShardedTraining(ExerciseTests):
    checks = fsdp
    WRONG, RIGHT = WRONG, RIGHT

    def test_checkpoints_are_divided_as_fsdp_does(self):
        sizes = sorted({rows for rows, _, _ in fsdp._CHECKPOINTS})
        by_rank = launch(_local_rows, sizes, world_size=4, backend="gloo")
        for i, rows in enumerate(sizes):
            assert [got[i] for got in by_rank] == [len(f) for f in fsdp._shards(torch.empty(rows, 2), 4)]

    def test_clipping_agrees_with_pytorch_on_sharded_parameters(self):
        answer = self.answer("clip_sharded")
        outcomes = launch(_clipped_by_pytorch, world_size=3, backend="gloo")

        def clip():
            gradients = [g.clone() for g in outcomes[dist.get_rank()][0]]
            return float(answer(gradients, [], 1.0)), gradients

        for (norm, gradients), (_, right_norm, right) in zip(
            launch(clip, world_size=3, backend="gloo"), outcomes, strict=True
        ):
            assert norm == pytest.approx(right_norm, rel=1e-12)
            assert all(torch.allclose(g, r, rtol=1e-9, atol=0) for g, r in zip(gradients, right, strict=True))

    def test_refusal_names_the_ranks_of_a_wrong_group(self):
        text = str(self.refusal("fewest_internode_bytes", self.wrong("fewest_internode_bytes", "transposed")))
        assert text.startswith("Exercise 2, 6 ranks, 3 nodes of 2, rank 0: the shards are gathered by ranks (0, 2, 4)")

    def test_refusal_of_the_peak_says_what_was_measured(self):
        text = str(self.refusal("wrap_under_target", self.wrong("wrap_under_target", "too-large")))
        assert re.search(r"7 all-gathers of 11 allowed; the peak is [\d.]+ MB of [\d.]+ MB allowed", text)
