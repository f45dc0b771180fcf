"""The exercises on stopping and requeue: solutions pass, stubs fail, wrong answers get their own hint."""

from __future__ import annotations

import contextlib
import pickle
import signal

import pytest
import torch
import torch.distributed as dist
from conftest import missing
from exercise_cases import ExerciseTests, hangs

from lessons.multi_node import batch as _batch
from lessons.multi_node import restarts, slurm

pytestmark = pytest.mark.guard(90)

SLURM_CLUSTER = restarts.slurm_cluster
WRONG: dict[str, dict] = {}
RIGHT: dict[str, dict] = {}


@pytest.fixture(scope="module", autouse=True)
def one_cluster():
    """One Slurm cluster for all checks of this module."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(_batch, "PATIENCE", 3.0)
        cluster = stack.enter_context(restarts.slurm_cluster())
        patch.setattr(restarts, "slurm_cluster", lambda: contextlib.nullcontext(cluster))
        yield cluster


# ------------------------------------------------------------------------------------------------ the training loop

HANDLER = "signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))"
AGREE = "dist.all_reduce(stop)"
CODE = "return 0 if step == steps else 75"
SAVE = "torch.save((step, state), saved)"
FILE = 'f"rank-{dist.get_rank()}.pt"'
ASKED = "if stop > 0 or step == steps:"
WRONG["train"] = {
    "code": [f"{CODE}  ->  return int(step < steps)", f"{CODE}  ->  return step == steps"],
    "steps": [
        "state = do_step(step, state)\n        step += 1  ->  step += 1\nstate = do_step(step, state)",
        {"while step < steps:": "while step < 0:"},
    ],
    "stops": f"{ASKED}  ->  if stop > 0 or step % 3 == 0:",
    "no-handler": [
        f"{HANDLER}  ->  pass",
        f"{HANDLER}  ->  if dist.get_rank() == 0:\n    {HANDLER}",
    ],
    "at-once": [
        "lambda number, frame: told.append(number)  ->  lambda number, frame: exit(75)",
        {HANDLER: "def stop_now(*_):\n    raise KeyboardInterrupt\n\nsignal.signal(signal.SIGTERM, stop_now)"},
    ],
    "alone": [
        hangs(f"{AGREE}  ->  pass"),
        hangs(f"{ASKED}  ->  if told or step == steps:"),
    ],
    "ignored": [
        f"{AGREE}  ->  dist.broadcast(stop, 0)",
        "stop = torch.tensor(len(told))  ->  stop = torch.tensor(0)",
    ],
    "too-late": f"{ASKED}  ->  if stop > 0 and step % 4 == 0 or step == steps:",
    "codes-differ": f"{CODE}  ->  return 75 if told and step < steps else 0",
    "zero": f"{CODE}  ->  return 0",
    "done-is-0": [
        {"saved, step = folder": "stop = 0\nsaved, step = folder", CODE: "return 75 if stop > 0 else 0"},
    ],
    "done-again": "if stop > 0 or step == steps:  ->  if stop > 0 and step < steps:",
    "from-start": [f"{SAVE}  ->  pass", "if saved.exists():  ->  if False:"],
    "again": [f"{SAVE}  ->  torch.save((step - 1, state), saved)"],
    "skipped": "step, state = torch.load(saved)  ->  step, state = torch.load(saved)\nstep += 1",
    "same-file": [
        f'{FILE}  ->  "state.pt"',
        {FILE: '"state.pt"', SAVE: "if dist.get_rank() == 0:\n    torch.save((step, state), saved)\ndist.barrier()"},
    ],
    "state-lost": "step, state = torch.load(saved)  ->  step, _ = torch.load(saved)",
    "state": "state = do_step(step, state)  ->  do_step(step, state)",
}


def folders_and_a_gather(folder, steps, state, do_step):
    """A folder for each save, a list of flags from all ranks, and a handler that is a function."""
    rank, stop = dist.get_rank(), False

    def handler(number, frame):
        nonlocal stop
        stop = True

    signal.signal(signal.SIGTERM, handler)
    saves = sorted(folder.glob("step-*"))
    done = int(saves[-1].name[5:]) if saves else 0
    if saves:
        state = torch.load(saves[-1] / f"{rank}.pt")
    dist.barrier()  # all have seen which is the newest
    for step in range(done, steps):
        state, done = do_step(step, state), step + 1
        flags = [None] * dist.get_world_size()
        dist.all_gather_object(flags, stop)
        if any(flags) or done == steps:
            place = folder / f"step-{done:06}"
            place.mkdir(exist_ok=True)
            torch.save(state, place / f"{rank}.pt")
            dist.barrier()
            return 75 if done < steps else 0
    return 0


def asks_before_the_step(folder, steps, state, do_step):
    """The flag is looked at before a step, and rank 0 saves what it gathers."""
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    path, step = folder / "all.pickle", 0
    if path.exists():
        step, states = pickle.loads(path.read_bytes())
        state = states[dist.get_rank()]
    first = step
    while True:
        flag = torch.tensor([float(bool(told))])
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        if step == steps or flag.item() and step > first:
            break
        state = do_step(step, state)
        step += 1
    states = [torch.empty_like(state) for _ in range(dist.get_world_size())]
    dist.all_gather(states, state)
    if dist.get_rank() == 0:
        path.with_suffix(".new").write_bytes(pickle.dumps((step, states)))
        path.with_suffix(".new").rename(path)
    return 75 if step < steps else 0


RIGHT["train"] = {"folders, and a gather of flags": folders_and_a_gather, "asks before the step": asks_before_the_step}

# ------------------------------------------------------------------------------------------------ the job script

MASTER = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
REQUEUE = 'scontrol requeue "$SLURM_JOB_ID"'


def scripted(*edits: str | tuple[str, str]):
    """Edits of the script, whose lines are not indented."""
    return dict(edit.split("  ->  ") if isinstance(edit, str) else edit for edit in edits)


WRONG["job_script"] = {
    "form": [
        scripted("#!/bin/bash  ->  # a job script"), scripted("{program}  ->  python train.py"),
        {"return f": "lines = f", "exit $code\n\"\"\"": "exit $code\n\"\"\"\n    return lines.splitlines()"},
    ],
    "syntax": scripted("if [ $code = 75 ]; then  ->  if [ $code = 75 ]"),
    "late": [
        scripted(("#SBATCH --requeue\n", ""), ("export WORLD_SIZE", "#SBATCH --requeue\nexport WORLD_SIZE")),
        scripted("#!/bin/bash  ->  #!/bin/bash\nset -u"),
    ],
    "requeue": [scripted(("#SBATCH --requeue\n", "")), scripted("--requeue\n  ->  --no-requeue\n")],
    "open-mode": [scripted(("#SBATCH --open-mode=append\n", "")), scripted("append  ->  truncate")],
    "time": scripted(("#SBATCH --time=1:00:00\n", "")),
    "signal": [
        scripted(("#SBATCH --signal=TERM@60\n", "")), scripted("TERM@60  ->  USR1@60"),
        scripted("TERM@60  ->  STOPPING@60"),
    ],
    "notice": [scripted("TERM@60  ->  TERM@10"), scripted("TERM@60  ->  TERM@7200")],
    "tasks": [
        scripted("--ntasks-per-node=2  ->  --ntasks-per-node=4"),
        scripted("--nodes=2 --ntasks-per-node=2  ->  --ntasks=4"),
    ],
    "endless-script": scripted("exit $code  ->  sleep 1000"),
    "not-started": scripted(("srun bash", "exit 0\nsrun bash")),
    "srun": [scripted("srun bash  ->  bash"), scripted("srun bash  ->  srun --ntasks-per-node=1 bash")],
    "rank": [
        scripted("RANK=$SLURM_PROCID LOCAL  ->  RANK=$SLURM_LOCALID LOCAL"),
        scripted("srun bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec {program}'  ->  "
                 "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID\nsrun {program}"),
        scripted("exec {program}'  ->  exec {program}\"", "bash -c '  ->  bash -c \""),
    ],
    "local-rank": [scripted("LOCAL_RANK=$SLURM_LOCALID  ->  LOCAL_RANK=$SLURM_PROCID"),
                   scripted("LOCAL_RANK=$SLURM_LOCALID  ->  LOCAL_RANK=$SLURM_NODEID")],
    "world-size": [scripted("WORLD_SIZE=$SLURM_NTASKS  ->  WORLD_SIZE=$SLURM_NNODES"),
                   scripted(("export WORLD_SIZE=$SLURM_NTASKS\n", "WORLD_SIZE=$SLURM_NTASKS\n"))],
    "typed": [scripted(f"{MASTER}  ->  node0"), scripted(f"{MASTER}  ->  localhost")],
    "empty": [scripted(f"{MASTER}  ->  $SLURM_LAUNCH_NODE_IPADDR"), scripted(("export MASTER_ADDR", "MASTER_ADDR"))],
    "master": [
        scripted(f"{MASTER}  ->  $SLURM_JOB_NODELIST"), scripted("head -n 1  ->  tail -n 1"),
        scripted(("LOCAL_RANK=$SLURM_LOCALID exec", "LOCAL_RANK=$SLURM_LOCALID MASTER_ADDR=$(hostname) exec")),
        scripted(" | head -n 1  ->  "),
    ],
    "port": [scripted(("export MASTER_PORT=29500\n", "")), scripted("MASTER_PORT=29500  ->  MASTER_PORT=80"),
             scripted(("LOCAL_RANK=$SLURM_LOCALID exec", "LOCAL_RANK=$SLURM_LOCALID MASTER_PORT=$RANDOM exec"))],
    "requeued-done": scripted(("if [ $code = 75 ]; then", "if true; then")),
    "script-code": [scripted("exit $code\n  ->  true\n"), scripted("exit $code\n  ->  exit 1\n")],
    "batch-only": [
        scripted("TERM@60  ->  B:TERM@60"),
        scripted("TERM@60  ->  B:USR1@60", ("srun bash", "trap 'scancel --signal=TERM $SLURM_JOB_ID' USR1\nsrun bash")),
    ],
    "not-requeued": [
        scripted(("if [ $code = 75 ]", "if [ $code = 143 ]")), scripted("code=$?  ->  date\ncode=$?"),
        scripted(("srun bash", "set -e\nsrun bash")), scripted((REQUEUE, "exit 0")),
        scripted(("exec {program}'", "{program}; exit 0'")),
    ],
    "requeue-what": [scripted('"$SLURM_JOB_ID"  ->  $SLURM_PROCID'),
                     scripted((REQUEUE, f"{REQUEUE}\n    {REQUEUE}"))],
    "requeue-always": scripted(("if [ $code = 75 ]", "if [ $code != 0 ]")),
    "slurm": [  # refused by a real cluster only
        scripted(("#SBATCH --requeue", "#SBATCH --requeue --partition=gpu")),
        scripted(("srun bash", "srun --cpus-per-task=64 bash")),
    ],
}

RIGHT["job_script"] = {
    "the shell passes the signal on": scripted(
        "TERM@60  ->  B:USR1@60", ("srun bash", "trap 'scancel --signal=TERM $SLURM_JOB_ID' USR1\nsrun bash"),
        ("code=$?", "step=$!\nwait $step\ncode=$?\nwhile [ $code -gt 128 ]; do\n    wait $step\n    code=$?\ndone"),
        ("exec {program}'", "exec {program}' &"),
    ),
    "short options, all variables in the task": scripted(
        ("#SBATCH --nodes=2 --ntasks-per-node=2", "# who and where\n#SBATCH -N 2 -n 4 # tasks\n#SBATCH -J train"),
        ("#SBATCH --time=1:00:00", "#SBATCH -t 60"), ("TERM@60", "SIGTERM@120"),
        ("export WORLD_SIZE=$SLURM_NTASKS\n", ""), (MASTER, "$(hostname)"),
        ("export MASTER_PORT=29500", "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))"),
        ("srun bash -c 'RANK", "srun --wait=60 --kill-on-bad-exit=0 bash -c 'export WORLD_SIZE=$SLURM_NTASKS; RANK"),
        ("if [ $code = 75 ]; then", "if (( code == 75 )); then"),
    ),
    "a minute is what Slurm takes by itself": scripted("TERM@60  ->  TERM"),
}



class TestRestartsExercises(ExerciseTests):
    checks, WRONG, RIGHT = restarts, WRONG, RIGHT

    def test_wrong_answer_is_refused_with_its_own_hint(self, wrong, one_cluster):
        if wrong.name == "slurm" and one_cluster is None:
            missing("a Slurm cluster")
        super().test_wrong_answer_is_refused_with_its_own_hint(wrong)

    def script(self, exercise: str = "", number: int = 1) -> str:
        answer = self.wrong("job_script", exercise, number) if exercise else self.answer("job_script")
        return answer(restarts._PROGRAM)

    @pytest.mark.parametrize(
        ("hint", "number", "outcome"),
        [
            pytest.param("open-mode", 2, ("COMPLETED", 1, 8, 1), id="a log that is truncated lacks the first run"),
            pytest.param("batch-only", 1, ("FAILED", 0, 4, 1), id="ranks that are never told lose what they did"),
            pytest.param("not-requeued", 4, ("COMPLETED", 0, 4, 1), id="a script that ends with 0 is done for Slurm"),
        ],
    )
    def test_what_the_stand_ins_refuse_goes_wrong_in_slurm(self, one_cluster, hint, number, outcome):
        if one_cluster is None:
            missing(f"a Slurm cluster; packages that are missing: {', '.join(slurm.missing()) or 'none'}")
        script = self.script(hint, number)
        job = _batch.on_a_cluster(one_cluster, script, restarts._PROGRAM, _batch.directives(script))
        assert (job.state, job.restarts, len(job.steps), job.log.count("run begins")) == outcome

    def test_where_slurm_does_not_run_the_check_says_so_and_passes(self, monkeypatch, capsys):
        monkeypatch.setattr(restarts, "missing", lambda: ["slurm-wlm"])
        monkeypatch.setattr(restarts, "slurm_cluster", SLURM_CLUSTER)
        restarts.job_script(self.answer("job_script"))
        assert "Slurm did not run" in capsys.readouterr().out

        def forbidden(hosts):
            raise RuntimeError("Slurm did not start in namespaces")

        monkeypatch.setattr(restarts, "missing", list)
        monkeypatch.setattr(restarts, "SlurmCluster", forbidden)
        restarts.job_script(self.answer("job_script"))
        assert "Slurm did not run" in capsys.readouterr().out

    def test_directives_are_read_as_sbatch_reads_them(self):
        found = _batch.directives(
            "#!/bin/bash\n# a comment\n#SBATCH --nodes 2 -n4 # four\n\n#SBATCH --signal=B:SIGUSR1@30 --requeue\n"
            "##SBATCH --time=5\ndate\n#SBATCH --open-mode=append\n"
        )
        assert found.options == {"nodes": "2", "ntasks": "4", "signal": "B:SIGUSR1@30", "requeue": ""}
        assert (found.tasks, found.signal, found.notice) == ((2, 2), ("USR1", True), 30)
        assert found.late == ["#SBATCH --open-mode=append"]

    def test_refusals_name_steps_ranks_and_moments(self):
        def text(exercise, hint, number=1):
            return str(self.refusal(exercise, self.wrong(exercise, hint, number)))

        assert "a rank was told to stop in step 1, and step 3 was still done" in text("train", "too-late")
        assert "rank 1 is told to stop in step 1, rank 1: it was told" in text("train", "no-handler")
        assert "  expected  0, 1, 2, 3\n  got       0, 1, 0, 1" in text("job_script", "rank")
        assert "'#SBATCH --requeue' stands behind the first command" in text("job_script", "late")
