"""Promises about what reaches a rank: modules of a class of their own, cached functions, no place in another job."""

from __future__ import annotations

import functools
import os

import pytest
import torch
import torch._dynamo.config
import torch.distributed as dist
from torch.backends import cudnn

from course_utils import launch
from course_utils.programs import torchrun

pytestmark = pytest.mark.guard(60)

MENTIONED = {
    "torch.backends.mps": lambda: torch.backends.mps.is_available(),
    "cudnn": lambda: cudnn.deterministic,
    "matmul": lambda: torch.backends.cuda.matmul.allow_tf32,
    "torch.ops": lambda: torch.ops.aten.add(torch.ones(1), 1).item(),
    "torch.classes": lambda: torch.classes.__name__,
    "torch._dynamo.config": lambda: torch._dynamo.config.suppress_errors,
}


def test_a_function_may_mention_modules_of_pytorchs_own_classes():
    expected = {name: function() for name, function in MENTIONED.items()}
    assert launch(lambda: {name: function() for name, function in MENTIONED.items()}, world_size=2) == [expected] * 2


def test_cached_functions_reach_the_ranks_with_their_cache():
    @functools.lru_cache(maxsize=7)
    def fibonacci(n):
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

    @functools.cache
    def double(n):
        return 2 * n

    def work():
        return fibonacci(30), fibonacci.cache_info().maxsize, double(2), double(2), double.cache_info().hits

    assert launch(work, world_size=2) == [(832040, 7, 4, 4, 1)] * 2


def test_a_compiled_function_that_cannot_be_sent_has_the_learners_name():
    compiled = torch.compile(lambda x: x.sum(), backend="eager")
    with pytest.raises(TypeError, match="(?s)variable 'compiled'.*\n.*compile it inside the function"):
        launch(lambda: compiled(torch.ones(2)).item(), world_size=2)


FOREIGN = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "NODE_RANK": "1", "GROUP_RANK": "1", "SLURM_PROCID": "3",
           "SLURM_NTASKS": "8", "OMPI_COMM_WORLD_RANK": "3", "PMI_RANK": "3", "MASTER_ADDR": "login1.cluster"}


@pytest.mark.parametrize("init", [True, False])
def test_a_notebooks_place_in_another_job_does_not_reach_ranks(init, monkeypatch):
    def place():
        if not init:
            dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item(), {name: os.environ.get(name) for name in FOREIGN}

    for name, value in FOREIGN.items():
        monkeypatch.setenv(name, value)
    for rank, (total, found) in enumerate(launch(place, world_size=2, init=init)):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "GROUP_RANK": "0"}
        assert total == 2.0 and found == dict.fromkeys(FOREIGN) | own | {"MASTER_ADDR": "127.0.0.1"}
    assert os.environ["RANK"] == "3" and os.environ["SLURM_PROCID"] == "3"


def test_nor_does_it_reach_programs_under_torchrun(monkeypatch, tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import os; print(*[n for n in ('NODE_RANK', 'SLURM_PROCID') if n in os.environ], 'end')")
    for name, value in FOREIGN.items():
        monkeypatch.setenv(name, value)
    assert "".join(torchrun(program, ranks=2).split()) == "endend"  # ranks may write into one line
