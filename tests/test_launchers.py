"""Sweeps on existing engines give the rows of Hydra's own launcher: joblib, submitit, Slurm, Ray, and plain shards."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest
from cells import FAST, close, values

from dap_bench import store
from dap_bench.report.status import progress

ENGINES = [
    pytest.param(["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"], id="joblib", marks=pytest.mark.slow),
    pytest.param(["hydra/launcher=submitit_local"], id="submitit", marks=pytest.mark.slow),
    pytest.param(
        ["hydra/launcher=ray", "+hydra.launcher.ray.init.num_cpus=2"],
        id="ray",
        marks=pytest.mark.skipif(
            not find_spec("hydra_plugins.hydra_ray_launcher"), reason="hydra-ray-launcher is not installed"
        ),
    ),
]
SBATCH = """#!/bin/bash
cp "$1" "$SLURM_FAKE/script"
for task in 0 1; do
    SLURM_JOB_ID=$((8 + task)) SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=$task SLURM_JOB_NUM_NODES=1 SLURM_NODEID=0 \\
        SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_LOCALID=0 bash "$SLURM_FAKE/script" >> "$SLURM_FAKE/log" 2>&1 &
done
echo Submitted batch job 7
"""
SRUN = """#!/bin/bash
[ "$1 $2 $4" = "--unbuffered --output --error" ] || exit 1
exec "${@:6}"
"""
SCRIPT = """#!/bin/bash

# Parameters
#SBATCH --array=0-1%2
#SBATCH --cpus-per-task=6
#SBATCH --error=FOLDER/.sweep/.submitit/%A_%a/%A_%a_0_log.err
#SBATCH --gpus-per-node=1
#SBATCH --job-name=dap_bench
#SBATCH --mem=32GB
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=FOLDER/.sweep/.submitit/%A_%a/%A_%a_0_log.out
#SBATCH --partition=gpu
#SBATCH --requeue
#SBATCH --signal=USR2@300
#SBATCH --time=240
#SBATCH --wckey=submitit

# setup
job=$SLURM_JOB_ID; [ -z "$SLURM_ARRAY_TASK_ID" ] || job=$SLURM_ARRAY_JOB_ID"_$SLURM_ARRAY_TASK_ID"
trap '[ $? = 137 ] && [ $((SLURM_RESTART_COUNT)) -lt 3 ] && scontrol requeue $job' EXIT

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output FOLDER/.sweep/.submitit/%A_%a/%A_%a_%t_log.out --error FOLDER/.sweep/.submitit/%A_%a/%A_%a_%t_log.err PYTHON -u -m submitit.core._submit FOLDER/.sweep/.submitit/%j
"""  # noqa: E501


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Start `python -m dap_bench -m` on two cells; one thread each, so that rows are equal to the last bit."""

    def start(folder, *overrides, **environment):
        home = tmp_path_factory.getbasetemp()
        command = [sys.executable, "-m", "dap_bench", "-m", "method=ar,gradcam", *FAST, *overrides]
        return subprocess.Popen(
            [*command, f"results_dir={folder}", f"cache_dir={home}/cache"],
            env={**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(home), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    """The results folder of the sweep on Hydra's own launcher."""
    folder = tmp_path_factory.mktemp("whole")
    process = start(folder)
    error = process.communicate()[1]
    assert process.returncode == 0, error
    return folder


def sweep_of(folder):
    cells = store.cells(folder)
    assert [cell.info["n"] for cell in cells] == [12, 12]
    return {cell.info["method"]: values(cell) for cell in cells}


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_gives_the_rows_of_hydras_own_launcher(start, whole, tmp_path, engine):
    process = start(tmp_path, *engine)
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 0, error
    assert sweep_of(tmp_path) == sweep_of(whole)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_cell_that_cannot_run_is_a_sentence_and_the_others_run(start, whole, tmp_path, engine):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    process = start(tmp_path, *engine, "method=gradcam", "precision=fp8,fp32")
    out, error = process.communicate(timeout=300)
    assert process.returncode == 2, error
    assert "dap_bench: precision must be one of fp32, tf32, bf16, not fp8." in error.splitlines()
    assert "Traceback" not in error
    if "hydra/launcher=ray" not in engine:  # it may end before it has passed on what its workers print
        logs = [file.read_text() for file in tmp_path.rglob("*_log.out")]  # submitit's jobs write there
        assert sum("12 of 12 images" in text for text in (out, *logs)) == 1


@pytest.mark.slow
def test_slurm_gets_one_job_per_cell_with_one_gpu_each(start, whole, tmp_path):
    """The batch script that submitit makes, line by line; it is then run by a stand-in for Slurm."""
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("sacct", "#!/bin/bash\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    folder = tmp_path / "results"
    process = start(folder, "hydra/launcher=slurm", "hydra.launcher.partition=gpu", PATH=path, SLURM_FAKE=str(tmp_path))
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 0, error + (tmp_path / "log").read_text()
    script = (tmp_path / "script").read_text().replace(str(folder), "FOLDER").replace(sys.executable, "PYTHON")
    assert script.splitlines() == SCRIPT.splitlines()
    assert sweep_of(folder) == sweep_of(whole)


@pytest.mark.slow
def test_one_process_per_gpu_shares_a_sweep_by_shards(start, whole, tmp_path):
    both = [start(tmp_path, f"shard={number}/2") for number in (1, 2)]
    errors = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    assert [cell.state for cell in progress(tmp_path)] == ["done, n=12", "done, n=12"]
    undivided, shared = sweep_of(whole), sweep_of(tmp_path)
    assert undivided.keys() == shared.keys()
    for method, rows in undivided.items():
        assert rows.keys() == shared[method].keys()
        for sample, row in rows.items():
            assert all(close(shared[method][sample][name], row[name]) for name in ("confidence", "cs", "afs"))


def test_slurm_where_there_is_none_is_a_sentence(tmp_path):
    """With no srun on the PATH."""
    arguments = ["-m", "method=ar,gradcam", "hydra/launcher=slurm", f"results_dir={tmp_path}"]
    environment = {**os.environ, "PATH": str(tmp_path)}
    command = [sys.executable, "-m", "dap_bench", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("dap_bench: hydra/launcher=slurm needs Slurm's srun and sbatch")
