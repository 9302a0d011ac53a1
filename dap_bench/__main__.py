"""python -m dap_bench: the Hydra entry, nothing else."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from tqdm import tqdm

from dap_bench import runner
from dap_bench.config import COMPOSING, CONF, check_overrides, names_of, sentence
from dap_bench.errors import Interrupted, UserError, redacted
from dap_bench.hub import Unreachable

ERRORS = (UserError, *COMPOSING)  # what a user can correct
log = logging.getLogger(__name__)
_said: list[Exception] = []  # of cells of a sweep in this process


@hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
def cell(cfg: DictConfig) -> None:
    """Run one cell; in a sweep a cell that cannot run does not stop the others.

    Args:
        cfg: The config that Hydra composed.
    """
    job = HydraConfig.get()
    try:
        names = names_of(cfg, job.runtime.choices)
        if job.mode == RunMode.MULTIRUN:
            with _named(runner.title(names)):
                runner.run(cfg, names, _asked(job))
        else:
            runner.run(cfg, names, _asked(job))
    except ERRORS as error:
        if job.mode == RunMode.MULTIRUN:
            raise
        _stop(error)


@contextmanager
def _named(cell: str) -> Iterator[None]:
    """Let all messages about a cell of a sweep begin with its name, also what stops it."""

    class Named(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            tqdm.write(f"{cell}: {record.getMessage()}", file=sys.stderr)

    handler = Named()
    logging.getLogger().addHandler(handler)
    try:
        yield
    except ERRORS as error:
        again = isinstance(error, Unreachable) and any(isinstance(each, Unreachable) for each in _said)
        log.error("%s", "not run; the Hugging Face Hub cannot be reached (see above)." if again else sentence(error))
        _said.append(error)
        raise
    finally:
        logging.getLogger().removeHandler(handler)


def _asked(job: Any) -> list[str]:
    """The arguments that ask for this cell alone."""
    folders = [source.path for source in job.runtime.config_sources if source.provider == "command-line"]
    here = [os.path.relpath(folder) for folder in folders]
    task = list(job.overrides.task)
    single = job.mode == RunMode.RUN and any(text.startswith("experiment=") for text in task)  # an experiment sweeps
    return [*(part for folder in here for part in ("--config-dir", folder)), *task, *["hydra.mode=RUN"] * single]


def main() -> None:
    """Errors that a user can correct are one sentence and exit code 2; others keep their traceback."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let Hydra's exceptions reach us instead of being printed by it
    _said.clear()
    try:
        check_overrides(sys.argv[1:])
        cell()
    except KeyboardInterrupt as stop:
        print("\nstopped; every finished batch is saved; repeat the same command to resume.", file=sys.stderr)
        sys.exit(stop.code if isinstance(stop, Interrupted) else 130)
    except ERRORS as error:
        count = "1 cell" if len(_said) == 1 else f"{len(_said)} cells"
        _stop(UserError(f"{count} could not be run (see above).") if error in _said else error)
    except RuntimeError as error:
        if type(error).__module__.startswith("submitit."):
            _stop(_job_error(error))
        if "srun" not in str(error):
            raise
        _stop(UserError("hydra/launcher=slurm needs Slurm's srun and sbatch, which are not installed here."))
    except OSError as error:
        if error.filename is None:
            raise
        _stop(UserError(f"{error.filename} cannot be used ({error.strerror})."))


def _job_error(error: Exception) -> UserError:
    """What submitit says of a job that Slurm did not take, or that ended without an answer, in one sentence."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    reason = next((line for line in reversed(lines) if "rror: " in line), lines[0])
    where = "job logs are in results_dir, under .sweep/.submitit/"
    return UserError(f"Slurm: {reason.strip(' .')}; {where}. Repeat the same command to resume.")


def _stop(error: Exception) -> None:
    print(f"dap_bench: {redacted(sentence(error, sys.argv[1:]))}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
