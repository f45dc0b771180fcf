"""The exercises on several hosts: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

import math
import os
import re
import socket
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import missing
from exercise_cases import ExerciseTests
from torch.distributed.device_mesh import DeviceMesh

from course_utils import recorded
from lessons.multi_node import check as multi_node
from lessons.multi_node.hosts import hosts_available

pytestmark = pytest.mark.guard(90)


@pytest.fixture(autouse=True, scope="module")
def real_hosts():
    there, sentence = hosts_available()
    if not there:
        missing(sentence)


WRONG: dict[str, dict] = {}
RIGHT: dict[str, dict] = {}

# ------------------------------------------------------------------------------------------------ all-reduce by hosts

REDUCE = "dist.reduce_scatter_single(shard, padded, group=inside)"
ACROSS = "dist.all_reduce(shard, group=across)"
GATHER = "dist.all_gather_single(padded, shard, group=inside)"
MEAN = "shard /= len(host_of)"
INTO = "tensor.copy_(padded[:count].view(tensor.shape))"
ROWS = "rows = list(hosts.values())"
ONE_OF_EACH = "# one rank of each host"
PADDED = """padded = tensor.new_zeros(count + -count % per_host)
    padded[:count] = tensor.flatten()"""


def flat(tensor, host_of):
    dist.all_reduce(tensor)
    tensor /= len(host_of)


def rows_of(host_of):
    names = list(dict.fromkeys(host_of))
    return [[rank for rank, name in enumerate(host_of) if name == host] for host in names]


def leaders(tensor, host_of):
    rows, rank = rows_of(host_of), dist.get_rank()
    own = next(row for row in rows if rank in row)
    inside, _ = dist.new_subgroups_by_enumeration(rows)
    across = dist.new_group([row[0] for row in rows])
    x = tensor.contiguous()
    dist.reduce(x, own[0], group=inside)
    if rank == own[0]:
        dist.all_reduce(x, group=across)
    dist.broadcast(x, own[0], group=inside)
    tensor.copy_(x / len(host_of))


def whole_across(tensor, host_of):
    mesh = DeviceMesh("cpu", rows_of(host_of))
    x = tensor.contiguous()
    dist.all_reduce(x, group=mesh.get_group(1))
    dist.all_reduce(x, group=mesh.get_group(0))
    tensor.copy_(x / len(host_of))


def some_make_some_groups(tensor, host_of):
    rank, rows = dist.get_rank(), rows_of(host_of)
    inside = dist.new_group(next(row for row in rows if rank in row))
    across = dist.new_group(next([*column] for column in zip(*rows, strict=True) if rank in column))
    dist.all_reduce(tensor, group=inside)
    dist.all_reduce(tensor, group=across)


def scattered_twice(tensor, host_of):
    """Right by the ledger; but gloo's reduce-scatter is an all-reduce inside."""
    rows = rows_of(host_of)
    inside, _ = dist.new_subgroups_by_enumeration(rows)
    across, _ = dist.new_subgroups_by_enumeration([list(column) for column in zip(*rows, strict=True)])
    size = -(-tensor.numel() // len(host_of)) * len(host_of)
    x = torch.cat([tensor.flatten(), tensor.new_zeros(size - tensor.numel())])
    half = x.new_empty(size // len(rows[0]))
    dist.reduce_scatter_single(half, x, group=inside)
    own = half.new_empty(len(half) // len(rows))
    dist.reduce_scatter_single(own, half, group=across)
    dist.all_gather_single(half, own, group=across)
    dist.all_gather_single(x, half, group=inside)
    tensor.copy_((x[: tensor.numel()] / len(host_of)).view_as(tensor))


WRONG["hierarchical_mean"] = {
    "flat": [flat, f"{GATHER}  ->  dist.all_reduce(padded.clone())\n{GATHER}"],
    "leaders": leaders,
    "whole-tensor-across": whole_across,
    "axis": f"{ONE_OF_EACH}  ->  {ONE_OF_EACH}\nrows, columns = columns, rows",
    "inside-too-much": f"{REDUCE}  ->  dist.all_reduce(padded.clone(), group=inside)\n{REDUCE}",
    "one-level": f"{ACROSS}  ->  dist.all_reduce(shard.clone(), group=across)",
    "sum": f"{MEAN}  ->  ",
    "divisor": f"{MEAN}  ->  shard /= per_host",
    "remainder": {
        PADDED: "count -= count % per_host\npadded = tensor.flatten()[:count].clone()",
        INTO: "tensor.view(-1)[:count] = padded",
    },
    "any-tensor": [
        f"{INTO}  ->  tensor.reshape(-1)[:] = padded[:count]",
        {"tensor.new_zeros(": "torch.zeros(", "padded.new_empty(": "tensor.new_empty("},
    ],
    "view": "tensor.flatten()  ->  tensor.view(-1)",
    "upcast": "tensor.new_zeros(  ->  torch.zeros(",
    "not-in-place": f"{INTO}  ->  return padded[:count].view(tensor.shape)",
    "placement": f"{ROWS}  ->  size = len(host_of) // len(hosts)\n"
                 "rows = [list(range(r, r + size)) for r in range(0, len(host_of), size)]",
    "one-level-only": f"{ONE_OF_EACH}  ->  {ONE_OF_EACH}\nif len(rows) == 1:\n    return dist.all_reduce(tensor)",
    "three-hosts": f"{MEAN}  ->  shard /= 2 * per_host",
    "interface": scattered_twice,
    "hang": some_make_some_groups,
}


def on_a_mesh(tensor, host_of):
    mesh = DeviceMesh("cpu", rows_of(host_of), mesh_dim_names=("host", "local"))
    inside, per_host = mesh.get_group("local"), mesh.size(1)
    rows = F.pad(tensor.reshape(-1) / len(host_of), (0, -tensor.numel() % per_host)).view(per_host, -1)
    own = torch.empty_like(rows[0])
    dist.reduce_scatter(own, list(rows.unbind()), group=inside)
    dist.all_reduce(own, group=mesh.get_group("host"))
    dist.all_gather(list(rows.unbind()), own, group=inside)
    tensor[...] = rows.flatten()[: tensor.numel()].reshape(tensor.shape)


def own_group(all_ranks):
    groups = [dist.new_group(ranks) for ranks in all_ranks]
    return next(group for group, ranks in zip(groups, all_ranks, strict=True) if dist.get_rank() in ranks)


def with_lists_of_pieces(tensor, host_of):
    rows = rows_of(host_of)
    inside, across = own_group(rows), own_group([list(column) for column in zip(*rows, strict=True)])
    per_host = len(rows[0])
    x = torch.cat([tensor.flatten(), tensor.new_zeros(-tensor.numel() % per_host)])
    pieces = list(x.chunk(per_host))
    own = pieces[dist.get_group_rank(inside, dist.get_rank())]
    dist.reduce_scatter(own, [piece.clone() for piece in pieces], group=inside)
    dist.all_reduce(own, group=across)
    dist.all_gather(pieces, own.clone(), group=inside)
    tensor.copy_((x[: tensor.numel()] / len(host_of)).view_as(tensor))


def piece_by_piece(tensor, host_of):
    """Pieces of any length, each summed up at one rank of the host; no padding."""
    rows = rows_of(host_of)
    inside, _ = dist.new_subgroups_by_enumeration(rows)
    across, _ = dist.new_subgroups_by_enumeration([list(column) for column in zip(*rows, strict=True)])
    own = next(row for row in rows if dist.get_rank() in row)
    x = tensor.flatten()
    pieces = list(x.tensor_split(len(own)))
    for piece, rank in zip(pieces, own, strict=True):
        dist.reduce(piece, rank, group=inside)
    mine = pieces[own.index(dist.get_rank())]
    dist.all_reduce(mine, group=across)
    mine /= len(host_of)
    for piece, rank in zip(pieces, own, strict=True):
        dist.broadcast(piece, rank, group=inside)
    tensor.copy_(x.view(tensor.shape))


RIGHT["hierarchical_mean"] = {
    "piece by piece": piece_by_piece,
    "on a mesh": on_a_mesh,
    "with lists of pieces": with_lists_of_pieces,
}

# ------------------------------------------------------------------------------------------------ one program on hosts

INIT = 'dist.init_process_group("gloo")'
DEVICE = 'return int(os.environ["LOCAL_RANK"])'


def joined(rank="RANK", world_size="WORLD_SIZE", address="node0", **others):
    """An answer that takes what it says from these variables, or the address from a name or a function."""

    def join():
        for name, value in others.items():
            os.environ[name] = value
        where = address() if callable(address) else address
        url = f"tcp://{where}:{os.environ['MASTER_PORT']}"
        numbers = {"rank": int(os.environ[rank]), "world_size": int(os.environ[world_size])}
        dist.init_process_group("gloo", init_method=url, timeout=timedelta(seconds=5), **numbers)
        return int(os.environ["LOCAL_RANK"])

    return join


def master():
    return os.environ["MASTER_ADDR"]


def as_found():
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    address = f"tcp://{socket.gethostname()}:{os.environ['MASTER_PORT']}"
    local = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", address, timedelta(seconds=5), int(os.environ["LOCAL_WORLD_SIZE"]), local)
    return local


WRONG["join"] = {
    "two-worlds": joined("LOCAL_RANK", "LOCAL_WORLD_SIZE", socket.gethostname),
    "world-size": joined(world_size="LOCAL_WORLD_SIZE", address=master),
    "rank-twice": [joined("LOCAL_RANK", address=master), joined("GROUP_RANK", address=master)],
    "rank-range": f"{INIT}  ->  group, all_of_them = int(os.environ['GROUP_RANK']), int(os.environ['WORLD_SIZE'])\n"
                  "rank = group * all_of_them + int(os.environ['LOCAL_RANK'])\n"
                  "dist.init_process_group('gloo', rank=rank, world_size=all_of_them)",
    "many-stores": [
        joined(address=socket.gethostname),
        {INIT: f'os.environ["MASTER_ADDR"] = "127.0.0.1"\n{INIT}'},
    ],
    "nobody-hosts": joined(address="node1"),
    "fixed-address": joined(address="node0"),
    "loopback": joined(address=master, GLOO_SOCKET_IFNAME="lo"),
    "device": [f"{DEVICE}  ->  return dist.get_rank()", f"{DEVICE}  ->  return 0"],
    "no-group": f"{INIT}  ->  ",
    "some-only": f"{INIT}  ->  if os.environ['LOCAL_RANK'] == '0':\n    {INIT}",
    "error": f"{INIT}  ->  dist.init_process_group('gloo', rank=int(os.environ['NODE_RANK']))",
}


def numbers_by_hand():
    environment = {name: int(os.environ[name]) for name in ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    group, local, count = environment.values()
    os.environ["RANK"] = str(group * count + local)
    dist.init_process_group(init_method="env://", backend="cpu:gloo", rank=-1)
    return np.int64(local)


def a_store_of_its_own():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world_size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return dist.get_node_local_rank()


RIGHT["join"] = {
    "all said in the call": joined(address=master),
    "numbers by hand": numbers_by_hand,
    "a store of its own": a_store_of_its_own,
}

# ------------------------------------------------------------------------------------------------ paper problems


def by_search(hosts, days, save, restart):
    between = days * 1440 / hosts
    every = np.linspace(0.001, 10, 2_000_001) * math.sqrt(save * between)
    lost = save / every + (restart + every / 2) / between
    best = int(lost.argmin())
    return np.array([between, every[best], 100 * lost[best]])


def in_hours(hosts, days, save, restart):
    rate = hosts / (24 * days)  # failures of the job in an hour
    save, restart = save / 60, restart / 60
    return 60 / rate, 60 * math.sqrt(2 * save / rate), 100 * (math.sqrt(2 * rate * save) + rate * restart)


RIGHT["checkpoint_plan"] = {"by search": by_search, "in hours": in_hours}


class TestMultiNodeExercises(ExerciseTests):
    checks = multi_node
    WRONG = WRONG
    RIGHT = RIGHT

    # what the checks measure

    def test_a_refusal_quotes_the_bytes_that_left_the_host(self):
        text = str(self.refusal("hierarchical_mean", self.wrong("hierarchical_mean", "flat")))
        assert re.search(r"this rank sends 1,585,152 bytes \(1\.50 S\) to other hosts; 528,392 bytes \(0\.50 S\)", text)
        assert re.search(r"1,[56]\d\d,\d\d\d bytes \(1\.5\d S\) left node0 by its interface", text)

    def test_two_worlds_are_told_with_what_each_rank_said(self):
        text = str(self.refusal("join", as_found))
        assert "2 worlds of 2 ranks have formed, one on each host" in text
        assert "node1: ranks 0, 1 of 2, the store on node1, interface lo" in text

    @pytest.mark.parametrize(
        ("name", "hint"),
        [("hierarchical_mean", "flat"), ("hierarchical_mean", "leaders"), ("hierarchical_mean", "whole-tensor-across"),
         ("join", "world-size"), ("join", "rank-twice"), ("join", "device")],
    )
    def test_without_hosts_the_ledger_and_what_ranks_say_decide(self, name, hint, monkeypatch):
        monkeypatch.setattr(multi_node, "hosts_available", lambda: (False, "hosts need Linux"))
        assert self.refusal(name, self.wrong(name, hint)).hint == hint

    @pytest.mark.parametrize("name", ["hierarchical_mean", "join"])
    def test_without_hosts_a_right_answer_passes_and_hears_what_was_not_measured(self, name, monkeypatch, capsys):
        monkeypatch.setattr(multi_node, "hosts_available", lambda: (False, "hosts need Linux"))
        getattr(multi_node, name)(self.answer(name))
        assert re.fullmatch(r"Exercise \d passed.* not (measured|tried): hosts need Linux\.\n", capsys.readouterr().out)

    def test_two_worlds_as_found_are_refused_without_hosts(self, monkeypatch):
        monkeypatch.setattr(multi_node, "hosts_available", lambda: (False, "hosts need Linux"))
        assert self.refusal("join", as_found).hint == "world-size"

    # what the text says

    def test_numbers_of_the_text(self):
        stops, days, gpus = recorded.LLAMA3_INTERRUPTIONS
        assert (stops, days, gpus) == (419, 54, 16384) and round(days / stops * gpus / 8) == 264
        parts = [(100 * math.sqrt(2 * save / m), 100 * 10 / m) for save in (2, 0.1) for m in [264 * 1440 / 2048]]
        assert [[round(x, 1) for x in part] for part in parts] == [[14.7, 5.4], [3.3, 5.4]]
