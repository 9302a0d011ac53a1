"""Sweeps on a real Slurm and a real Ray: equal rows, jobs that are stopped in every way, what is said meanwhile.

`make test-cluster` runs this. Slurm is there if `sbatch` is on the PATH and `sinfo` answers. What your cluster wants
besides is told to sbatch by its own variables (SBATCH_PARTITION, SBATCH_ACCOUNT), and the folder of the tests must be
one that its nodes see: make test-cluster ARGS=--basetemp=FOLDER

A method of one's own holds each job after its third batch as long as there is a file `hold`, so nothing is timed.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from cells import FAST, values

from dap_bench import store

METHOD = """
import os
import time
from pathlib import Path

calls = 0


def held(vit, images, classes, layers=False):
    global calls
    calls += 1
    Path(f"pid-{os.getpid()}").write_text(os.environ.get("SLURM_ARRAY_TASK_ID", ""))
    while calls > 3 and Path("hold").exists():
        time.sleep(0.05)
    return vit.layout.patches_of(vit.trace(images).tokens[-1], dim=1).norm(dim=-1)
"""
N, BEFORE = 24, 9  # images of a cell in batches of three, and those with rows when it is held
HELD = ["--config-dir", "my_conf", "-m", "method=held", f"sampler.n={N}", "batch_size=3", "metric=[afs]", "device=cpu"]
PATIENCE = 600  # seconds; a job that is queued again waits two minutes in some versions of Slurm


def asked(*command):
    """What one of Slurm's commands answers."""
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()


def no_slurm():
    if not shutil.which("sbatch"):
        return "there is no Slurm here: sbatch is not on the PATH"
    with suppress(subprocess.TimeoutExpired):
        if subprocess.run(["sinfo"], capture_output=True, timeout=20).returncode == 0:
            return None
    return "Slurm does not answer: see sinfo"


NO_SLURM = no_slurm()
NO_RAY = None if find_spec("hydra_plugins.hydra_ray_launcher") else "hydra-ray-launcher is not installed"
pytestmark = pytest.mark.cluster
needs_slurm = pytest.mark.skipif(bool(NO_SLURM), reason=str(NO_SLURM))
needs_ray = pytest.mark.skipif(bool(NO_RAY), reason=str(NO_RAY))

CPU = ["hydra.launcher.gpus_per_node=0", "hydra.launcher.cpus_per_task=1", "hydra.launcher.mem_gb=3"]
SLURM = ["hydra/launcher=slurm", *CPU]
# Ray gives out as many GPUs as it is told there are; the cells stay on the CPU
RAY = ["hydra/launcher=ray", "+hydra.launcher.ray.remote.num_gpus=1", "+hydra.launcher.ray.init.num_gpus=2"]
ENGINES = [pytest.param(SLURM, id="slurm", marks=needs_slurm), pytest.param(RAY, id="ray", marks=needs_ray)]


OPTIONS = Path(__file__).parents[1].joinpath("conf", "README.md").read_text()
LOOP, LINES = re.findall(r"```sh\n(.*?)```", OPTIONS.split("## Many GPUs, many machines")[1], re.DOTALL)[:2]
IDS = {"processes": (), "joblib": (), "ray": needs_ray, "slurm": needs_slurm, "srun": needs_slurm}
COMMANDS = [
    pytest.param(command, id=name, marks=marks)
    for command, (name, marks) in zip([LOOP, *re.findall(r"(?:.*\\\n)*.*[^\\]\n", LINES)], IDS.items(), strict=True)
]


def until(found, what):
    """Wait until something is found, and give it."""
    end = time.monotonic() + PATIENCE
    while not (answer := found()):
        assert time.monotonic() < end, f"{what} did not happen within {PATIENCE} seconds"
        time.sleep(0.2)
    return answer


class Folder:
    """Where a user works: a method of their own, results/runs, and the commands that run there."""

    def __init__(self, path, cache):
        self.path, self.results = path, path / "results" / "runs"
        self.started, self.submitted = [], []  # processes, and jobs that were given to sbatch directly
        self.hurried = set()
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "DAP_BENCH_CACHE": str(cache)}
        conf = path / "my_conf" / "method"
        conf.mkdir(parents=True)
        (conf / "held.yaml").write_text("_target_: my_method.held\n_partial_: true\n")
        (path / "my_method.py").write_text(METHOD)

    def start(self, *arguments, module="dap_bench"):
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=self.path,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        )
        self.started.append(process)
        return process

    def run(self, *arguments, module="dap_bench"):
        return ended(self.start(*arguments, module=module))

    def status(self):
        return self.run(module="dap_bench.status")

    def hold(self):
        (self.path / "hold").touch()

    def release(self):
        (self.path / "hold").unlink()

    def cells(self):
        return store.cells(self.results)

    def rows(self):
        return {(cell.info["method"], cell.info["fingerprint"]): values(cell) for cell in self.cells()}

    def pids(self):
        """The processes that ran the method, each with its number in Slurm's array."""
        return {int(file.name.removeprefix("pid-")): file.read_text() for file in self.path.glob("pid-*")}

    def jobs(self):
        """The folders of submitit's jobs, by their number."""
        found = sorted((self.results / ".sweep" / ".submitit").glob("*/*_submitted.pkl"))
        return [file.parent for file in found]

    def said(self, job, kind="out"):
        return "".join(file.read_text() for file in job.glob(f"*_log.{kind}"))


def ended(process, code=0):
    out, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, out + error
    return out + error


@pytest.fixture
def folder(tmp_path, tmp_path_factory):
    folder = Folder(tmp_path, tmp_path_factory.getbasetemp() / "cache")
    yield folder
    for process in folder.started:
        process.kill()
    jobs = [*folder.submitted, *(job.name for job in folder.jobs())]
    if jobs and not NO_SLURM:
        asked("scancel", *jobs)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The rows of sweeps on Hydra's own launcher, by their arguments."""
    known = {}

    def rows(*arguments):
        if arguments not in known:
            folder = Folder(tmp_path_factory.mktemp("plain"), tmp_path_factory.getbasetemp() / "cache")
            folder.run(*arguments)
            known[arguments] = folder.rows()
        return known[arguments]

    return rows


def restarts(job):
    found = re.search(r"Restarts=(\d+)", asked("scontrol", "show", "job", job.name))
    return int(found[1]) if found else 0


def state(job):
    return asked("squeue", "-h", "-j", job.name, "-o", "%T %r")


def again(job, folder):
    """Whether a job that was queued again has begun.

    Slurm lets it wait for two minutes, so that no node takes it for the one that has just ended; here ten seconds do.
    """
    if job.name not in folder.hurried and "PENDING BeginTime" in state(job):
        asked("scontrol", "update", f"JobId={job.name}", "StartTime=now+10")
        folder.hurried.add(job.name)
    return folder.said(job).count("Starting with JobEnvironment") == 2


def seconds(cell):
    return {row["sample_id"]: row["seconds"] for row in cell.rows()}


# ---------------------------------------------------------------------- equal rows, and where messages are


@pytest.mark.parametrize("engine", ENGINES)
def test_the_rows_are_those_of_a_plain_sweep(folder, plain, engine):
    sweep = ["-m", "method=ar,gradcam", *FAST]
    folder.run(*sweep, *engine)
    assert folder.rows() == plain(*sweep)
    assert folder.status().count("done, n=12") == 2
    if engine is SLURM:  # one job a cell, and its messages where conf/README.md says
        assert [folder.said(job).count("12 of 12 images") for job in folder.jobs()] == [1, 1]
        assert all("12/12" in folder.said(job, "err") for job in folder.jobs())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_cell_that_cannot_run_is_a_sentence_and_the_others_run(folder, plain, engine):
    sweep = ["-m", "method=ar,gradcam", *FAST]
    error = ended(folder.start(*sweep, *engine, "precision=fp8,fp32"), code=2)
    assert "dap_bench: precision must be one of fp32, tf32, bf16, not fp8." in error.splitlines()
    assert "Traceback" not in error
    assert folder.rows() == plain(*sweep)


@needs_slurm
def test_what_slurm_refuses_is_a_sentence(folder):
    error = ended(folder.start("-m", "method=ar", *FAST, *SLURM, "hydra.launcher.partition=nowhere"), code=2)
    assert error.splitlines()[-1].startswith("dap_bench: Slurm: sbatch: error: ")
    assert "nvalid partition name" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_readme(folder, command):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**folder.environment, "PATH": path}
    done = subprocess.run(["bash", "-c", command], cwd=folder.path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    number = re.search(r"Submitted batch job (\d+)", done.stdout)
    if number:
        folder.submitted.append(number[1])
        until(lambda: not asked("squeue", "-h", "-j", number[1]), "the end of the job")
        assert (folder.path / f"slurm-{number[1]}.out").read_text().count("12 of 12 images") == 4
    assert folder.status().count("done, n=24") == 2


# ---------------------------------------------------------------------- stopped in every way


def preempted(job, folder):
    """As submitit arranges it: a signal, upon which the job finishes its batch and queues itself again."""
    asked("scancel", "--signal=USR2", job.name)
    until(lambda: "finishing this batch" in folder.said(job, "err"), "the signal")
    folder.release()


def requeued(job, folder):
    """What Slurm does by itself: SIGTERM, then SIGKILL after KillWait, and the job is queued again."""
    asked("scontrol", "requeue", job.name)
    until(lambda: "Bypassing signal SIGTERM" in folder.said(job), "SIGTERM")


def killed(job, folder):
    """kill -9, on the node of the job."""
    (pid,) = (pid for pid, task in folder.pids().items() if task == job.name.partition("_")[2])
    number = asked("squeue", "-h", "-j", job.name, "-o", "%A")  # srun wants the one without _
    asked("srun", "--overlap", "--mem=0", f"--jobid={number}", "kill", "-9", str(pid))
    until(lambda: "Killed" in folder.said(job, "err"), "kill -9")


@needs_slurm
@pytest.mark.parametrize("stop", [preempted, requeued, killed])
def test_a_job_that_is_stopped_is_queued_again_and_goes_on(folder, plain, stop):
    """Of two cells side by side one is stopped: no row is lost, computed again or doubled, and the other goes on."""
    sweep = [*HELD, "sampler.seed=0,1"]
    expected = plain(*sweep)
    folder.hold()
    process = folder.start(*sweep, *SLURM)
    until(lambda: [len(cell.rows()) for cell in folder.cells()] == [BEFORE, BEFORE], "the third batch of both")
    status = folder.status()
    assert status.count(f"{N - BEFORE} of {N} images are missing, last change") == 2
    assert "0 cells done, 2 partly done" in status
    before = [seconds(cell) for cell in folder.cells()]
    job, other = folder.jobs()

    stop(job, folder)
    until(lambda: again(job, folder), "the second start")
    if (folder.path / "hold").exists():
        folder.release()
    ended(process)
    assert folder.rows() == expected
    for cell, known in zip(folder.cells(), before, strict=True):
        assert [store.pq.read_metadata(part).num_rows for part in cell.parts()] == [N]
        assert seconds(cell).items() >= known.items()  # they were not computed again
    assert [restarts(job), restarts(other)] == [1, 0]
    status = folder.status()
    assert "2 settings" in status
    assert "2 cells done, 0 partly done" in status


@needs_slurm
def test_a_job_that_is_cancelled_stays_so_and_the_same_command_goes_on(folder, plain):
    folder.hold()
    process = folder.start(*HELD, *SLURM)
    until(lambda: [len(cell.rows()) for cell in folder.cells()] == [BEFORE], "the third batch")
    (cell,), (job,) = folder.cells(), folder.jobs()
    before = seconds(cell)
    asked("scancel", job.name)
    until(lambda: not state(job), "the end of the job")
    if process.poll() is None:  # without Slurm's accounts nobody tells the command
        process.send_signal(signal.SIGINT)
        assert "repeat the same command to resume" in ended(process, code=130)
    assert restarts(job) == 0
    assert f"{BEFORE}/{N}" in folder.status()
    folder.release()
    folder.run(*HELD, *SLURM)
    assert folder.rows() == plain(*HELD)
    assert seconds(cell).items() >= before.items()
    assert f"done, n={N}" in folder.status()


@needs_slurm
@pytest.mark.parametrize("times", [1, 0])
def test_a_job_whose_time_is_over(folder, plain, times):
    """It finishes its batch and is queued again as often as it may; then the command says so, and repeated goes on."""
    limit = ["hydra.launcher.timeout_min=2", "hydra.launcher.signal_delay_s=60"]
    folder.hold()
    process = folder.start(*HELD, *SLURM, *limit, f"hydra.launcher.max_num_timeout={times}")
    until(lambda: [len(cell.rows()) for cell in folder.cells()] == [BEFORE], "the third batch")
    (cell,), (job,) = folder.cells(), folder.jobs()
    before = seconds(cell)
    until(lambda: "finishing this batch" in folder.said(job, "err"), "the signal that time is nearly over")
    folder.release()
    if times:
        until(lambda: again(job, folder), "the second start")
        ended(process)
        assert "this job is timed-out" in folder.said(job)
        assert restarts(job) == 1
    else:
        error = ended(process, code=2)
        assert "Job not requeued because: timed-out too many times; job logs are in results_dir" in error
        assert "Traceback" not in error
        assert {row["status"] for row in cell.rows()} == {"ok"}
        assert len(cell.rows()) == BEFORE + 3  # with the batch that was finished
        folder.run(*HELD, *SLURM)
    assert folder.rows() == plain(*HELD)
    assert seconds(cell).items() >= before.items()


@needs_ray
def test_a_process_of_ray_that_is_killed_is_started_again_and_goes_on(folder, plain):
    folder.hold()
    process = folder.start(*HELD, *RAY)
    until(lambda: [len(cell.rows()) for cell in folder.cells()] == [BEFORE], "the third batch")
    (cell,), (pid,) = folder.cells(), folder.pids()
    before = seconds(cell)
    os.kill(pid, signal.SIGKILL)
    until(lambda: len(folder.pids()) == 2, "the second start")
    folder.release()
    ended(process)
    assert folder.rows() == plain(*HELD)
    assert seconds(cell).items() >= before.items()
    assert f"done, n={N}" in folder.status()


# ---------------------------------------------------------------------- several processes on a node


@needs_slurm
def test_the_processes_of_one_job_share_a_cell_by_shards(folder, plain):
    """As conf/README.md has it for the GPUs of a node, with CPUs."""
    share = f"{sys.executable} -m dap_bench {' '.join(HELD)} shard=$((SLURM_PROCID+1))/$SLURM_NTASKS"
    folder.hold()
    command = ["sbatch", "--parsable", "--ntasks-per-node=2", "--output=%j.log", f"--wrap=srun bash -c '{share}'"]
    done = subprocess.run(command, cwd=folder.path, env=folder.environment, capture_output=True, text=True, check=True)
    submitted = done.stdout.strip()
    folder.submitted.append(submitted)
    until(lambda: [len(cell.rows()) for cell in folder.cells()] == [2 * BEFORE], "the third batch of both")
    assert f"{N - 2 * BEFORE} of {N} images are missing (shard 1/2, 2/2)" in folder.status()
    assert len(folder.pids()) == 2
    folder.release()
    until(lambda: not asked("squeue", "-h", "-j", submitted), "the end of the job")
    assert (folder.path / f"{submitted}.log").read_text().count(f"{N // 2} of {N // 2} images") == 2
    assert f"done, n={N}" in folder.status()
    ((key, rows),) = plain(*HELD).items()
    shared = folder.rows()[key]
    assert shared.keys() == rows.keys()
    for sample, row in rows.items():
        assert shared[sample]["afs"] == pytest.approx(row["afs"], abs=1e-6)


@needs_slurm
def test_a_job_for_each_shard(folder, plain):
    sweep = [*HELD, "shard=1/2,2/2"]
    folder.run(*sweep, *SLURM)
    assert len(folder.jobs()) == 2
    assert folder.rows() == plain(*sweep)
