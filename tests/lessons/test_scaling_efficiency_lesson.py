"""The laws, models and hooks of the lesson on scaling, as its text defines them, on cases of their own."""

from __future__ import annotations

import math
import sys
from functools import cache

import cloudpickle
import numpy
import pytest
import torch
import torch.distributed as dist
from lesson_cells import definitions
from torch.nn.parallel import DistributedDataParallel as DDP

from course_utils import launch, record
from lessons.collectives import explorer as cost
from lessons.scaling_efficiency import scaling

pytestmark = pytest.mark.guard(60)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder


@cache
def lesson() -> dict:
    """What the lesson defines, by name."""
    names = definitions("05", shrink=2.0**-20)
    names["dp"] = names["recorded"].ULTRASCALE_DP
    return names


@pytest.mark.parametrize("n", [2, 3, 8, 1000])
@pytest.mark.parametrize("s", [0.001, 0.05, 0.9])
def test_laws_agree_and_can_be_turned_round(n, s):
    amdahl, gustafson = lesson()["amdahl"], lesson()["gustafson"]
    assert 1 < amdahl(n, s) < min(n, 1 / s)
    assert gustafson(n, s) == pytest.approx(amdahl(n, lesson()["share_on_one_rank"](n, s)))
    assert lesson()["serial_share"](n, amdahl(n, s)) == pytest.approx(s)


def test_overhead_that_grows_with_ranks_is_amdahls_curve():
    a, b = 0.02, 0.001
    for n in (2, 17, 300):
        speedup = n * (a + b) / (a + b * n)
        assert lesson()["serial_share"](n, speedup) == pytest.approx(b / (a + b))


def test_fit_finds_the_line_that_it_was_given(monkeypatch):
    gpus = (8, 16, 32, 64)
    rates = tuple(1 / (2e-5 + 1e-7 * n) for n in gpus)
    monkeypatch.setitem(lesson(), "dp", lesson()["recorded"].Scaling("a line", gpus, rates, "a test"))
    a, b, predicted = lesson()["fit"](lambda n: n, 2)
    assert (a, b) == (pytest.approx(2e-5), pytest.approx(1e-7))
    assert predicted == pytest.approx(rates)


def test_end_of_the_schedule_is_the_formula_for_any_link():
    generator = numpy.random.default_rng(0)
    for _ in range(200):
        k = int(generator.integers(1, 200))
        each, backward = 10.0 ** generator.uniform((-6, -3), (0, 0))
        spans = scaling.bucket_schedule(k, each, backward)
        added = lesson()["exposed"](k, each, backward)
        assert spans[-1][1] - backward == pytest.approx(added, rel=1e-6, abs=1e-9)


def test_tokens_to_hide_make_backward_as_long_as_the_all_reduce():
    flops, bandwidth, n, parameters = 1e14, 5e10, 8, 1e9
    tokens = lesson()["tokens_to_hide"](flops, bandwidth, n)
    assert 4 * parameters * tokens / flops == pytest.approx(2 * 7 / 8 * 2 * parameters / bandwidth)


@pytest.mark.parametrize("parameters", [1e6, 1e9])
def test_ratio_is_the_formula_of_the_text_for_any_model(parameters):
    ratio = lesson()["compute_over_communication"](parameters, 5000, 1e14, 5e10, 8)
    assert ratio == pytest.approx(3 * 5000 * 5e10 / (2 * 1e14) * 8 / 7)


def test_averaged_gradients_are_the_mean_and_every_part_is_timed():
    def one_rank(apart):
        model, log = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)), step_log()
        for p in model.parameters():
            p.grad = torch.full_like(p, float(dist.get_rank()))
        with record() as ledger:
            average(model, log, apart)
        log.end_step()
        parts = [part for part, *_ in log.spans[0]]
        return all((p.grad == 1).all() for p in model.parameters()), parts, ledger.count("barrier")

    average, step_log = lesson()["average_gradients"], lesson()["StepLog"]
    for apart, parts in (
        (False, ["copies", "all_reduce", "copies"]),
        (True, ["copies", "wait", "all_reduce", "copies"]),
    ):
        assert launch(one_rank, apart, world_size=3, backend="gloo") == [(True, parts, int(apart))] * 3


def test_late_rank_is_waited_for_in_the_barrier():
    def one_rank():
        return [[part for part, *_ in spans] for spans in logged(0.001, True).spans]

    logged = lesson()["logged_steps"]
    expected = ["data", "compute", "copies", "wait", "all_reduce", "copies", "optimizer"]
    assert launch(one_rank, world_size=2, backend="gloo") == [[expected] * 6] * 2


@pytest.mark.parametrize("n", [2, 5])
def test_noise_scale_finds_signal_and_noise_that_it_was_given(n):
    size, signal, noise = 3, 4.0, 30.0
    own, mean = signal + noise / size, signal + noise / (n * size)
    assert lesson()["noise_scale"](own, mean, size, n) == pytest.approx(noise / signal)


def test_hook_notes_own_gradients_and_leaves_the_mean_as_it_is():
    def one_rank():
        squares = []
        got, mean, parameters = hooked(hook, squares, 1)
        torch.manual_seed(0)
        plain = torch.nn.Linear(5, 7)
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
        plain(x).square().sum().backward()
        own = sum(p.grad.square().sum() for p in plain.parameters())
        return torch.allclose(got, mean), torch.allclose(sum(squares), own)

    hook = lesson()["note_squares"]
    assert launch(one_rank, world_size=2, backend="gloo") == [(True, True)] * 2


def hooked(hook, state, steps):
    """On a rank: gradients of a DDP model with a hook and their mean without, summed over steps; its parameters."""
    torch.manual_seed(0)
    plain = torch.nn.Linear(5, 7)
    model = DDP(torch.nn.Linear(5, 7))
    model.load_state_dict({f"module.{name}": p for name, p in plain.state_dict().items()})
    model.register_comm_hook(state, hook)
    got, mean = torch.zeros(42), torch.zeros(42)
    for step in range(steps):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        for net, total in ((model, got), (plain, mean)):
            net(x).square().sum().backward()
            total += torch.cat([p.grad.flatten() for p in net.parameters()])
            net.zero_grad()
    dist.all_reduce(mean)
    return got, mean / dist.get_world_size(), list(model.parameters())


@pytest.mark.parametrize("n", [2, 3])
def test_bf16_hook_gives_the_mean_in_half_the_bytes(n):
    def one_rank():
        with record() as ledger:
            got, mean, _ = hooked(hook, None, 1)
        return torch.allclose(got, mean, rtol=0.03, atol=0.1), ledger.bytes("all_reduce") - mean.nbytes

    hook = lesson()["bf16_hook"]
    assert launch(one_rank, world_size=n, backend="gloo") == [(True, 2 * 42)] * n


@pytest.mark.parametrize("n", [2, 3])
def test_top_k_of_everything_is_the_mean(n):
    def one_rank(feedback):
        got, mean, _ = hooked(hook, top_k(1.0, feedback), 3)
        return torch.allclose(got, mean, rtol=1e-4, atol=1e-4)

    hook, top_k = lesson()["top_k_hook"], lesson()["TopK"]
    for feedback in (True, False):
        assert all(launch(one_rank, feedback, world_size=n, backend="gloo"))


def test_what_top_k_did_not_send_is_kept_with_feedback_only():
    def one_rank(feedback):
        state = top_k(0.1, feedback)
        got, mean, parameters = hooked(hook, state, 6)
        left = torch.cat([state.left.get(p, torch.zeros_like(p)).flatten() for p in parameters])
        dist.all_reduce(left)
        return torch.allclose(got + left / dist.get_world_size(), mean, rtol=1e-4, atol=1e-3)

    hook, top_k = lesson()["top_k_hook"], lesson()["TopK"]
    assert launch(one_rank, True, world_size=3, backend="gloo") == [True] * 3
    assert launch(one_rank, False, world_size=3, backend="gloo") == [False] * 3


def test_largest_leaves_the_gradient_as_it_was():
    gradient, left = torch.tensor([1.0, -5.0, 2.0, 0.0]), torch.tensor([0.0, 0.0, 2.0, 0.5])
    values, places, rest = lesson()["largest"](gradient, left, 0.5)
    assert sorted(zip(places.tolist(), values.tolist(), strict=True)) == [(1, -5.0), (2, 4.0)]
    assert rest.tolist() == [1.0, 0.0, 0.0, 0.5]
    assert gradient.tolist() == [1.0, -5.0, 2.0, 0.0] and left.tolist() == [0.0, 0.0, 2.0, 0.5]


def test_checkpointing_keeps_one_input_a_layer_and_the_same_gradient():
    measure = lesson()["measure"]
    (plain, _, _), (again, kept, _) = measure(2, False), measure(2, True)
    assert torch.equal(plain, again)
    deeper = measure(5, True)[1]
    assert deeper - kept == 3 * 4 * 64 * 64 * 4, "windows, characters, width, bytes"
    assert measure(5, False)[1] > 5 * deeper


def test_small_updates_are_lost_in_bf16():
    unchanged = lesson()["unchanged"]
    whole, gains = unchanged(torch.bfloat16, 1e-5)
    assert whole > 0.5 and gains == 1
    assert max(unchanged(torch.float32, 1e-5)) < 0.01


def test_only_fp16_without_a_scaler_stands_still():
    train = lesson()["train"]
    assert train(torch.float16, steps=3)[-1] > 4.8 > train(torch.bfloat16, steps=3)[-1]


def test_calculator_and_lesson_have_one_model_of_interruptions():
    goodput, interval = lesson()["goodput"], lesson()["best_interval"]
    for rate, save, restart in ((0.1, 0.03, 0.2), (2.0, 0.01, 0.1), (0.001, 1.0, 0.0)):
        assert goodput(rate, save, restart, interval(rate, save)) == pytest.approx(cost.goodput(rate, save, restart))


def test_cost_goes_with_one_over_efficiency():
    hours, dollars = lesson()["run_cost"](100, 2, 1.9, price=3.0)
    assert math.isclose(hours, 100 / 1.9) and math.isclose(dollars, 300 / 0.95)


def test_spot_becomes_the_dearer_choice_at_512_gpus_as_the_text_says():
    save, restart = 2 / 60, 10 / 60
    useful = {n: cost.goodput(n * 5 / 1000, save, restart) for n in (256, 512, 1024)}
    assert useful[256] > 0.5 > useful[512] > 0 == useful[1024], "spot opens at half the price"
