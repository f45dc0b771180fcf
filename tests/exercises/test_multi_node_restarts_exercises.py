"""The exercises on stopping, requeue and fencing: solutions pass, stubs fail, wrong answers get their own hint."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import tempfile
import time
import uuid

import pytest
import torch
import torch.distributed as dist
from conftest import missing
from exercise_cases import ExerciseTests, hangs

from course_utils import slurm
from course_utils.checks import _batch, _worlds, restarts

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
}

# ------------------------------------------------------------------------------------------------ fencing

TAKE = """while True:
        try:
            (folder / f"world.{world}").touch(exist_ok=False)
            break
        except FileExistsError:
            world += 1"""
TAKEN = "(folder / f\"world.{world}\").touch(exist_ok=False)"
LOOK = """if newest() > world:
            raise RuntimeError(f"world {world} is no longer the newest one: it stops")"""
NAME = 'f"{world:06}-{step:09}.partial"'
RENAME = 'partial.rename(partial.with_suffix(".saved"))'
WRITE = "partial.write_bytes(state)"
NEWEST = 'return max((int(path.suffix[1:]) for path in folder.glob("world.*")), default=0)'
FIRST = "world = newest() + 1"
SORTED = 'saved = sorted(folder.glob("*.saved"))'


def one_file(folder):
    """The usual one: a number, a test, one name that the newest state replaces."""
    number = 1
    while True:
        try:
            (folder / f"taken-{number}").mkdir()
            break
        except FileExistsError:
            number += 1

    def save(step, state):
        partial = folder / f"partial-{number}"
        partial.write_bytes(pickle.dumps((step, state)))
        if (folder / f"taken-{number + 1}").exists():
            raise RuntimeError("fenced")
        partial.rename(folder / "state")

    def load():
        path = folder / "state"
        return pickle.loads(path.read_bytes()) if path.exists() else None

    return save, load


def a_token_file(folder):
    """Who wrote the token file last may save; the token is something that says who it is."""
    token = f"{socket.gethostname()} {os.getpid()}"
    (folder / "token").write_text(token)

    def save(step, state):
        if (folder / "token").read_text() != token:
            raise RuntimeError("fenced")
        (folder / f"{step:09}.partial").write_bytes(state)
        (folder / f"{step:09}.partial").rename(folder / f"{step:09}.saved")

    def load():
        saved = sorted(folder.glob("*.saved"))
        return (int(saved[-1].stem), saved[-1].read_bytes()) if saved else None

    return save, load


def a_lock(folder):
    import fcntl

    number = len([*folder.glob("taken-*")]) + 1
    (folder / f"taken-{number}").mkdir()

    def save(step, state):
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (folder / f"taken-{number + 1}").exists():
                raise RuntimeError("fenced")
            (folder / "partial").write_bytes(pickle.dumps((step, state)))
            (folder / "partial").rename(folder / "state")

    def load():
        path = folder / "state"
        return pickle.loads(path.read_bytes()) if path.exists() else None

    return save, load


WRONG["open_store"] = {
    "form": ["return save, load  ->  return save", "return None  ->  return 0, b''",
             "return int(saved[-1].stem[-9:]), saved  ->  return saved[-1].stem[-9:], saved"],
    "not-loaded": ["saved[-1].stem[-9:]), saved[-1].read  ->  saved[0].stem[-9:]), saved[0].read",
                   {NAME: 'f"{world}-{step}.partial"', "saved[-1].stem[-9:]": 'saved[-1].stem.split("-")[1]'}],
    "lost": [
        f'{SORTED}  ->  saved = sorted(folder.glob(f"{{world:06}}-*.saved"))',
        f"{FIRST}  ->  for old in folder.glob(\"*.saved\"):\n    old.unlink()\n{FIRST}",
    ],
    "newer-refused": ["if newest() > world:  ->  if world > 1:", f"{FIRST}  ->  world = 99 - newest()"],
    "not-fenced": [
        {LOOK: "pass", NAME: 'f"{step:09}.partial"'},
        {LOOK: "pass", SORTED: 'saved = sorted(folder.glob("*.saved"), key=lambda path: path.stem[-9:])'},
    ],
    "goes-on": [f"{LOOK}  ->  pass", {LOOK: "if newest() > world:\n    return"}],
    "not-yet-saved": f'{NEWEST}  ->  return max((int(path.stem[:6]) for path in folder.glob("*.saved")), default=0)',
    "name": [
        a_token_file,
        {FIRST: "import os\n\nworld = os.getpid()"},
    ],
    "clock": [
        {FIRST: "import time\n\nworld = time.time_ns()", NAME: 'f"{world:024}-{step:09}.partial"'},
        {SORTED: 'saved = sorted(folder.glob("*.saved"), key=lambda path: path.stat().st_mtime_ns)'},
    ],
    "equal": [
        "touch(exist_ok=False)  ->  touch()",
        {TAKE: 'counter = folder / "counter"\nworld = int(counter.read_text()) + 1 if counter.exists() else 1\n'
               'counter.with_suffix(f".{world}").write_text(str(world))\ncounter.with_suffix(f".{world}").rename(counter)',
         NEWEST: 'return int((folder / "counter").read_text()) if (folder / "counter").exists() else 0'},
    ],
    "check-then-write": one_file,
    "largest-step": 'saved = sorted(folder.glob("*.saved"))  ->  '
                    'saved = sorted(folder.glob("*.saved"), key=lambda path: path.stem[-9:])',
    "partial": [
        {WRITE: "pass", RENAME: 'partial.with_suffix(".saved").write_bytes(state)'},
    ],
    "in-between": {RENAME: 'for old in folder.glob(f"{world:06}-*.saved"):\n    old.unlink()\n' + RENAME},
    "leftover": {
        NAME: 'f"{step:09}.partial"', WRITE: 'with partial.open("xb") as file:\n    file.write(state)',
        'partial.with_suffix(".saved")': 'folder / f"{world:06}-{step:09}.saved"',
    },
    "start-fails": f"{TAKE}  ->  {TAKEN}",
    "shared-name": {NAME: '"new.partial"', 'partial.with_suffix(".saved")': 'folder / f"{world:06}-{step:09}.saved"'},
    "locks": a_lock,
    "waits": {
        TAKE: 'import os\n\nwhile "lock" in os.listdir(folder):\n    pass\n(folder / "lock").touch()\n'
              + f"{FIRST}\n{TAKEN}",
        "return save, load": '(folder / "lock").unlink()\nreturn save, load',
    },
}


def folders_of_worlds(folder):
    """Each world has a folder, made at once; its states are files in it, linked when they are complete."""
    world = 0
    while True:
        world += 1
        try:
            os.mkdir(os.path.join(folder, f"{world:08d}"))
            break
        except FileExistsError:
            continue
    own = os.path.join(folder, f"{world:08d}")

    def save(step, state):
        with tempfile.NamedTemporaryFile(dir=own, prefix="tmp-") as file:
            file.write(state)
            file.flush()
            os.fsync(file.fileno())
            if max(os.listdir(folder)) != f"{world:08d}":
                raise RuntimeError("an older world")
            os.link(file.name, os.path.join(own, f"step-{step:08d}"))

    def load():
        for name in sorted(os.listdir(folder), reverse=True):
            steps = [file for file in os.listdir(os.path.join(folder, name)) if file.startswith("step-")]
            if steps:
                with open(os.path.join(folder, name, max(steps)), "rb") as file:
                    return int(max(steps)[5:]), file.read()
        return None

    return save, load


class Fenced(RuntimeError):
    """An exception of one's own is a RuntimeError, too."""


def one_state_a_world(folder):
    """Each world keeps one file, which it replaces; the number is taken with open(…, "x")."""
    numbers = [int(path.name) for path in folder.iterdir() if path.name.isdigit()]
    number = max(numbers, default=0)
    while True:
        number += 1
        with contextlib.suppress(FileExistsError), open(folder / str(number), "x"):
            break

    def save(step, state):
        with open(folder / f"{number}.{uuid.uuid4()}", "wb") as file:
            pickle.dump({"step": step, "state": state}, file)
        if (folder / str(number + 1)).exists():
            os.unlink(file.name)
            raise Fenced(f"{number + 1} is newer")
        os.replace(file.name, folder / f"{number}.state")

    def load():
        found = {int(path.stem): path for path in folder.glob("*.state")}
        if found:
            with found[max(found)].open("rb") as file:
                saved = pickle.load(file)
            return saved["step"], saved["state"]

    return save, load


RIGHT["open_store"] = {"a folder for each world": folders_of_worlds, "one state for each world": one_state_a_world}


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
        assert (found.tasks, found.signal) == ((2, 2), ("USR1", True))
        assert found.late == ["#SBATCH --open-mode=append"]

    def test_a_world_pauses_before_every_operation_of_a_save(self):
        seen = []
        for moment in range(1, 100):
            with _worlds._worlds(self.answer("open_store"), "A") as (folder, world):
                assert world.open(folder).kind == "opened"
                reply = world.save(1, pause=moment)
                if reply.kind == "saved":
                    break
                seen.append((reply.value, sorted(path.suffix for path in folder.iterdir())))
                assert world.go_on().kind == "saved"
        assert seen[0] == ("open", [".1"]) and seen[-1] == ("os.rename", [".1", ".partial"])

    def test_a_world_is_killed_in_the_middle_of_a_write(self):
        with _worlds._worlds(self.answer("open_store"), "A") as (folder, world):
            assert world.open(folder).kind == "opened"
            assert world.save(1, largest=20_000).kind == "dead"
            (partial,) = folder.glob("*.partial")
            assert partial.stat().st_size == 20_000 < len(_worlds.state_of("A", 1))

    def test_a_world_that_never_comes_back_is_ended(self, monkeypatch):
        def open_store(folder):
            (folder / str(os.getpid())).touch()
            if len([*folder.iterdir()]) > 1:
                time.sleep(1000)
            return lambda step, state: (folder / "s").write_bytes(pickle.dumps((step, state))), lambda: loaded(folder)

        def loaded(folder):
            return pickle.loads((folder / "s").read_bytes()) if (folder / "s").exists() else None

        monkeypatch.setattr(_worlds, "PATIENCE", 1.0)
        hint, case, what = _worlds.examine(open_store)
        assert hint == "waits" and "world B opens the store" in what

    def test_refusals_name_steps_ranks_and_moments(self):
        def text(exercise, hint, number=1):
            return str(self.refusal(exercise, self.wrong(exercise, hint, number)))

        assert "a rank was told to stop in step 1, and step 3 was still done" in text("train", "too-late")
        assert "rank 1 is told to stop in step 1, rank 1: it was told" in text("train", "no-handler")
        assert "  expected  0, 1, 2, 3\n  got       0, 1, 0, 1" in text("job_script", "rank")
        assert "'#SBATCH --requeue' stands behind the first command" in text("job_script", "late")
        late = "A pauses in save(6) before os.rename, B saves step 7, A goes on"
        assert late in text("open_store", "check-then-write")
        assert "gets step 9 of world A; expected is step 6 of world B" in text("open_store", "largest-step")
