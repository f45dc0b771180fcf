"""Data parallelism as lesson 04 writes it: equal to one process for any ranks, buckets, types and odd parameters."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from functools import cache, partial
from itertools import islice
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from lesson_cells import definitions
from torch import nn
from torch.utils.data import DistributedSampler

from course_utils import WorkerError, launch, record
from course_utils.data import Windows
from course_utils.models import build_gpt, loss_of
from course_utils.programs import torchrun
from lessons.ddp import data_parallel
from lessons.ddp.data_parallel import BOUNDS, try_data_parallel

pytestmark = pytest.mark.guard(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("AfterBackward", "FlatBuckets", "Overlapped")


@cache
def lesson() -> dict:
    """Imports and parameters of the lesson's first cell, and every function and class that a cell defines."""
    names = definitions("04")
    for batch in ("my_batch", "whole_batch"):
        names[batch] = partial(getattr(data_parallel, batch), per_rank=names["per_rank"])
    return names


def wraps(caps=(1, 2**12, 2**17, 2**30)) -> dict:
    """Every version, the bucketed ones with buckets of several sizes: from one a parameter to one for all."""
    names = lesson()
    found = {"AfterBackward": names["AfterBackward"]}
    for kind in KINDS[1:]:
        for cap in caps:
            found[f"{kind} {cap}"] = lambda module, kind=names[kind], cap=cap: kind(module, cap)
    return found


def differences(versions: dict, mine, whole, make) -> dict:
    """On a rank: by version, the largest difference to one process in each type."""
    return {name: try_data_parallel(wrap, mine, whole, make).differences for name, wrap in versions.items()}


def assert_equal(by_rank: list[dict]) -> None:
    for found in by_rank:
        for name, by_dtype in found.items():
            assert all(difference < BOUNDS[dtype] for dtype, difference in by_dtype.items()), (name, by_dtype)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_version_equals_one_process(n):
    names = lesson()
    batches, caps = (names["my_batch"], names["whole_batch"]), (2**12, 2**17) if n < 4 else (2**17,)
    assert_equal(launch(differences, wraps(caps), *batches, names["build_gpt"], world_size=n, backend="gloo"))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_tied_frozen_unused_and_rank_only_parameters_equal_one_process(n):
    names = lesson()
    batches = names["mine_with_rare"], names["whole_with_rare"]
    assert_equal(launch(differences, wraps((2**12,)), *batches, names["Awkward"], world_size=n, backend="gloo"))


def test_a_version_that_is_wrong_is_told_from_rounding():
    class Sum(lesson()["AfterBackward"]):
        def finish(self):
            for p in self.trained:
                dist.all_reduce(p.grad)

    batches = lesson()["my_batch"], lesson()["whole_batch"]
    with pytest.raises(AssertionError, match="rank 0 ends at other weights than one process"):
        data_parallel.judge(partial(launch, world_size=2, backend="gloo"), *batches, Sum)


class Branches(nn.Module):
    """Four equal layers; the ranks in `skips` leave out one of them each."""

    def __init__(self, skips: dict[int, int]):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))
        self.skips = skips

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            if self.skips.get(dist.get_rank()) != i:
                x = x + layer(x)
        return x


def mean_by_hand(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Gradients averaged by an all-gather, where a missing one counts as zero; leaves none behind."""
    module(x).sum().backward()
    means = []
    for p in module.parameters():
        mine = torch.zeros_like(p) if p.grad is None else p.grad
        everyone = [torch.empty_like(p) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        means.append(torch.stack(everyone).mean(0))
        p.grad = None
    return means


@pytest.mark.parametrize("skips", [{}, {0: 3}, {1: 3, 2: 0}, {0: 1, 1: 2, 2: 3}])
def test_a_parameter_without_gradient_on_some_ranks_gets_the_mean_with_zeros(skips):
    """All buckets have one size: sent in another order they would be mixed up without any message."""

    def one_step():
        torch.manual_seed(0)
        module = Branches(skips)
        x = torch.randn(2, 4) + dist.get_rank()
        expected, found = mean_by_hand(module, x), {}
        for name, wrap in versions.items():
            module.zero_grad()
            model = wrap(module)
            model(x).sum().backward()
            model.finish()
            found[name] = all(
                torch.allclose(p.grad, mean, atol=1e-6) for p, mean in zip(module.parameters(), expected, strict=True)
            )
        return found

    names = lesson()
    for name in KINDS:  # one a launch: hooks stay on a module
        versions = {name: names[name] if name == "AfterBackward" else lambda module, kind=names[name]: kind(module, 1)}
        assert all(all(found.values()) for found in launch(one_step, world_size=3, backend="gloo")), name


def test_a_parameter_that_no_rank_uses_gets_zeros():
    def one_step():
        found = []
        for kind in versions:
            module = nn.ModuleDict({"used": nn.Linear(2, 2), "spare": nn.Linear(2, 2)})
            model = kind(module)
            module["used"](torch.ones(1, 2)).sum().backward()
            model.finish()
            found.append(module["spare"].weight.grad.abs().sum().item())
        return found

    versions = [lesson()[kind] for kind in KINDS]
    assert launch(one_step, world_size=2, backend="gloo") == [[0.0] * 3] * 2


def test_frozen_parameters_are_not_sent_and_get_no_gradient():
    def one_step():
        found = []
        for kind in versions:
            module = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 3, bias=False))
            model = kind(module)
            model(torch.ones(1, 2)).sum().backward()
            with record() as ledger:
                model.finish()
            found.append((module[0].weight.grad is None, [entry.bytes for entry in ledger]))
        return found

    versions = [lesson()[kind] for kind in KINDS[:2]]
    assert launch(one_step, world_size=2, backend="gloo") == [[(True, [24])] * 2] * 2


def test_replicas_begin_with_rank_0s_weights_and_buffers():
    def start():
        torch.manual_seed(dist.get_rank())
        found = []
        for kind in versions:
            module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
            module[1].running_mean += dist.get_rank()
            kind(module)
            found += [tensor.clone() for tensor in module.state_dict().values()]
        return found

    versions = [lesson()[kind] for kind in KINDS]
    by_rank = launch(start, world_size=3, backend="gloo")
    for tensors in by_rank[1:]:
        assert all(torch.equal(a, b) for a, b in zip(tensors, by_rank[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_mixed_types_stay_apart_and_keep_their_type(dtype):
    def one_step():
        found = []
        for kind in versions:
            module = nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=t)) for t in (dtype, torch.float32, dtype)])
            model = kind(module)
            sum(p.sum() * (2.0 + 4 * dist.get_rank()) for p in module).backward()
            model.finish()
            found += [(p.grad.dtype == p.dtype, p.grad.tolist()) for p in module]
        return found

    versions = [lesson()[kind] for kind in KINDS]
    for found in launch(one_step, world_size=2, backend="gloo"):
        assert found == [(True, [4.0] * 3)] * 9


@pytest.mark.parametrize("cap", [1, 5000, 2**17, 2**40])
def test_buckets_hold_every_parameter_once_from_last_to_first(cap):
    parameters = [*lesson()["build_gpt"]().parameters()]
    buckets = lesson()["in_buckets"](parameters, cap)
    assert [id(p) for bucket in buckets for p in bucket] == [id(p) for p in reversed(parameters)]
    for bucket in buckets[:-1]:
        assert sum(p.nbytes for p in bucket) >= cap > sum(p.nbytes for p in bucket[:-1])


def test_buckets_of_no_parameters_are_none():
    assert lesson()["in_buckets"]([], 10) == []


def test_messages_are_one_a_parameter_or_one_a_bucket_with_the_same_bytes():
    def sent():
        found = []
        for kind in versions:
            model = kind(build_gpt())
            with record() as ledger:
                loss_of(model, *my_batch(0)).backward()
                model.finish()
            found.append((ledger.count("all_reduce"), len(ledger), ledger.bytes()))
        return found

    names = lesson()
    versions, my_batch = [names[kind] for kind in KINDS], names["my_batch"]
    whole = sum(p.nbytes for p in build_gpt().parameters())
    expected = [(28, 28, whole), (4, 4, whole), (4, 4, whole)]
    assert launch(sent, world_size=2, backend="gloo") == [expected] * 2


def test_overlapped_has_sent_all_but_the_last_bucket_when_the_last_gradient_comes():
    def order():
        module, under_way = build_gpt(), []
        module.embedding.weight.register_post_accumulate_grad_hook(lambda _: under_way.append(len(model.under_way)))
        model = overlapped(module, 2**12)
        with record() as ledger:
            loss_of(model, *my_batch(0)).backward()
            before = len(ledger)
            model.finish()
        return under_way, before, len(ledger), len(model.buckets)

    names = lesson()
    overlapped, my_batch = names["Overlapped"], names["my_batch"]
    for under_way, before, after, buckets in launch(order, world_size=2, backend="gloo"):
        assert under_way == [buckets - 1] and before == after == buckets > 4


def test_overlapped_refuses_a_second_backward_before_finish():
    def twice():
        model = overlapped(nn.Linear(2, 2))
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()

    overlapped = lesson()["Overlapped"]
    with pytest.raises(WorkerError, match="came twice"):
        launch(twice, world_size=2, backend="gloo")


def test_accumulated_gradients_are_those_of_the_whole_batch():
    def accumulate():
        found = []
        for kind in versions:
            torch.manual_seed(0)
            module = nn.Linear(3, 1)
            x = torch.randn(4 * dist.get_world_size(), 3)
            alone = torch.autograd.grad(module(x).pow(2).mean(), module.weight)[0]
            model, mine = kind(module), x[4 * dist.get_rank() :][:4]
            with record() as ledger:
                for i in range(4):
                    (model(mine[i : i + 1]).pow(2).mean() / 4).backward()
                model.finish()
            found.append((torch.allclose(module.weight.grad, alone, atol=1e-6), ledger.bytes()))
        return found

    versions = [lesson()[kind] for kind in KINDS[:2]]
    assert launch(accumulate, world_size=3, backend="gloo") == [[(True, 16)] * 2] * 3


@pytest.mark.parametrize("n", [1, 2, 3])
def test_batch_norm_with_shared_statistics_is_that_of_the_whole_batch(n):
    off = launch(
        lesson()["norm_against_whole"], lesson()["SharedBatchNorm"], nn.BatchNorm1d, world_size=n, backend="gloo"
    )
    assert max(off) < 1e-5
    alone = launch(lesson()["norm_against_whole"], nn.BatchNorm1d, nn.BatchNorm1d, world_size=n, backend="gloo")
    assert (max(alone) > 0.01) == (n > 1)


@pytest.mark.parametrize("length", [1, 5, 12, 33])
def test_sampler_gives_pytorchs_order_and_its_rest_after_a_start(length):
    for ranks in (1, 2, 3, 4, 7):
        for rank in range(ranks):
            for epoch in (0, 3):
                theirs = DistributedSampler(range(length), ranks, rank, seed=2)
                theirs.set_epoch(epoch)
                for done in range(len(theirs) + 1):
                    ours = lesson()["Sampler"](length, ranks, rank, seed=2, start=done * ranks)
                    ours.set_epoch(epoch)
                    assert [*ours] == [*theirs][done:]


@pytest.mark.parametrize("n", [3, 4])
def test_ddp_that_looks_for_unused_parameters_goes_on_to_the_last_bit(n):
    weights = [launch(lesson()["weights_after"], 8, at, True, world_size=n, backend="gloo")[0] for at in (None, 4)]
    assert torch.equal(*weights)


def test_recorded_jobs_are_as_the_lesson_tells():
    """404 all-reduces in a third of a step, in which nothing else is computed, and DDP's 99 % behind backward."""
    rows, shares = data_parallel.recorded_jobs()
    slow, ddp = rows.values()
    assert [*shares.values()] == [0, 0.99]
    begin, end = slow["all-reduces"][0][0], slow["all-reduces"][-1][1]
    assert round(1e3 * begin) == 182 and round(1e3 * end) == 305
    step = max(end for row in slow.values() for _, end in row)
    assert 0.33 < (end - begin) / step < 0.4
    busy = sum(min(b, end) - max(a, begin) for a, b in slow["compute"] if b > begin and a < end)
    assert busy < 0.02 * (end - begin)
    assert sum(b - a for a, b in ddp["all-reduces"]) > 0.01


def test_the_loop_in_the_text_is_that_of_the_program():
    text = (ROOT / "lessons" / "ddp" / "lesson.py").read_text(encoding="utf-8")
    shown = re.search(r"# ```python\n(# for micro in .*?)# ```", text, re.DOTALL)[1]
    lines = [line.removeprefix("# ") for line in shown.splitlines()]
    program = (ROOT / "scripts" / "train_ddp.py").read_text(encoding="utf-8")
    assert "\n".join(" " * 8 + line for line in lines) in program


def run_script(*arguments: str) -> str:
    """On a rank: run scripts/train_ddp.py as torchrun does; return what it prints."""
    sys.argv = ["train_ddp.py", *arguments, "--backend=gloo", "--report=1"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(ROOT / "scripts" / "train_ddp.py"), run_name="__main__")
    return printed.getvalue()


def losses(*arguments: str, n: int) -> list[float]:
    printed = launch(run_script, *arguments, world_size=n, backend="gloo", init=False)
    assert not any(printed[1:]), "one rank speaks for all"
    return [float(loss) for loss in re.findall(r"loss (\S+)", printed[0])]


def one_process(steps: int, batch: int) -> list[float]:
    """Losses of the same training without ranks."""
    model, found = build_gpt(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    order = [*DistributedSampler(Windows("train"), num_replicas=1, rank=0)]
    for step in range(steps):
        loss = loss_of(model, *Windows("train").batch(order[step * batch : (step + 1) * batch]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        found.append(loss.item())
    return found


def test_script_trains_as_one_process_does_and_resumes_on_other_ranks(tmp_path):
    file = tmp_path / "run.pt"
    checkpoint = f"--checkpoint={file}"
    whole = losses("--steps=6", "--batch=12", n=2)
    assert whole == pytest.approx(one_process(6, 12), abs=1e-4)
    assert losses("--steps=6", "--batch=12", "--micro=3", n=2) == pytest.approx(whole, abs=2e-4)
    assert losses("--steps=4", "--batch=12", checkpoint, n=2) == whole[:4]
    state = torch.load(file)
    assert {*state} == {"model", "optimizer", "scheduler", "scaler", "step", "samples"}
    assert (state["step"], state["samples"], state["scheduler"]["last_epoch"]) == (4, 48, 4)
    assert losses("--steps=5", "--batch=12", checkpoint, n=2) == pytest.approx(whole[4:5], abs=1e-4)
    assert losses("--steps=6", "--batch=12", checkpoint, n=3) == pytest.approx(whole[5:], abs=1e-4)
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def first_tokens(size: int, done: int, count: int) -> list[list]:
    """On a rank: the windows of the script's next batches, as lists."""
    script = runpy.run_path(str(ROOT / "scripts" / "train_ddp.py"), run_name="script")
    return [x.tolist() for x, _ in islice(script["batches"](size, 0, done), count)]


@pytest.mark.parametrize("batch", [48, 64, 100])
def test_script_resumes_with_the_samples_of_the_undisturbed_run(batch):
    """Also in a later epoch, where the batch does not divide the 2,016 windows of an epoch."""
    done, steps = 45, 50

    def at_step(step, ranks):
        return sorted(sum((rank[step] for rank in ranks), []))

    undisturbed = launch(first_tokens, batch // 2, 0, steps, world_size=2)
    again = launch(first_tokens, batch // 2, done * batch, steps - done, world_size=2)
    assert again == [rank[done:] for rank in undisturbed]
    other = launch(first_tokens, batch // 4, done * batch, steps - done, world_size=4)
    for step in range(steps - done):
        assert at_step(step, other) == at_step(step, again)
    assert len({*map(tuple, sum(sum(undisturbed, []), []))}) == len(Windows("train"))  # none is left out


def test_script_resumes_beyond_an_epoch_with_the_same_losses(tmp_path):
    flags = "--batch=400", f"--checkpoint={tmp_path / 'run.pt'}"
    whole = losses("--steps=8", "--batch=400", n=2)
    assert losses("--steps=6", *flags, n=2) == whole[:6]
    assert losses("--steps=8", *flags, n=2) == whole[6:]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_script_learns_the_same_in_16_bits(precision, tmp_path):
    options = f"--precision={precision}", f"--checkpoint={tmp_path / 'run.pt'}"
    assert losses("--steps=3", *options, n=2) == pytest.approx(one_process(3, 16), abs=0.03)
    assert losses("--steps=4", *options, n=2) == pytest.approx(one_process(4, 16)[3:], abs=0.03)
    assert ("scale" in torch.load(tmp_path / "run.pt")["scaler"]) == (precision == "fp16")


COMPILED = """\
import runpy, torch
from functools import partial
torch.compile = partial(torch.compile, backend="eager")  # graphs, and no compiler
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.guard(300)
def test_script_learns_the_same_compiled(tmp_path):
    program = tmp_path / "compiled.py"
    program.write_text(COMPILED.format(script=str(ROOT / "scripts" / "train_ddp.py")))
    printed = torchrun(program, "--compile", "--micro=2", "--steps=2", "--report=1", "--backend=gloo", ranks=2)
    found = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
    assert found == pytest.approx(one_process(2, 16), abs=2e-4)


def test_script_refuses_a_batch_that_does_not_divide():
    with pytest.raises(WorkerError, match="--batch must be a multiple of 2 ranks times 3 micro-batches: 16"):
        launch(run_script, "--batch=16", "--micro=3", world_size=2, backend="gloo", init=False)
