"""Where weights and data come from: a file, or the Hugging Face Hub.

Whether the Hub is there, and whether we may read a repository, is asked once, before anything slow.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dap_bench.errors import UserError, path

PAUSES = (1, 2)  # seconds before asking again; most of the client's own requests have been repeated for longer


def resolve_checkpoint(checkpoint: str) -> Path:
    """A path; `package://` is where dap_bench itself is installed."""
    if str(checkpoint).startswith("package://"):
        return Path(__file__).parent / checkpoint.removeprefix("package://")
    return path("model.checkpoint", checkpoint)


def require(repo: str, repo_type: str, instead: str) -> None:
    """Raise a UserError that says what is wrong and what to do `instead`, unless `repo` can be read."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    page = f"https://huggingface.co/{'datasets/' if repo_type == 'dataset' else ''}{repo}"
    try:
        retry(lambda: HfApi().auth_check(repo, repo_type=repo_type), passing)
    except GatedRepoError as error:
        raise UserError(f"{repo} is gated: accept its terms on {page}, then run `hf auth login`. {instead}") from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{repo} is not visible to you: log in with `hf auth login` (a token from your Hugging Face "
            f"settings) after accepting its terms on {page}. {instead}"
        ) from error
    except Exception as error:
        if _status(error) in (401, 403):  # the token itself: it is old, or may not read gated repositories
            raise UserError(
                f"The Hugging Face Hub does not let your token read {repo} ({one_line(error)}): "
                f"run `hf auth login` with one that may read gated repositories. {instead}"
            ) from error
        # no network, a proxy, a time-out, a broken answer: the remedy is the same
        raise UserError(
            f"The Hugging Face Hub cannot be reached for {repo} ({one_line(error)}); repeat the same command. {instead}"
        ) from error


def retry(ask: Callable[[], Any], again: Callable[[Exception], bool]) -> Any:
    """What `ask` gives; after an error of which `again` is true it is asked again, a few times."""
    for pause in PAUSES:
        try:
            return ask()
        except Exception as error:
            if not again(error):
                raise
        time.sleep(pause)
    return ask()


def passing(error: Exception) -> bool:
    """Whether the same request may succeed a moment later: the Hub is busy or an answer was cut; it did not refuse."""
    status = _status(error)
    if status:
        return status in (408, 429) or status >= 500
    return not isinstance(error, OSError)  # those are final: offline mode, no such dataset


def one_line(error: BaseException) -> str:
    """An error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".removesuffix(": ")


def _status(error: Exception) -> int:
    """The status of the Hub's answer, or 0 where there was none."""
    return getattr(getattr(error, "response", None), "status_code", 0)
