"""Where weights and data come from: a file, or the Hugging Face Hub.

Whether the Hub is there, and whether we may read a repository, is asked once, before anything slow. All that is asked
of it goes through `retry`, which does not wait for ever: a Hub that sends next to nothing is given up.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dap_bench.errors import UserError, path, redacted

PAUSES = (1, 2)  # seconds before asking again; most of the client's own requests have been repeated for longer
ENOUGH = 2**15  # bytes within the time of our patience that are a sign of life: about 1 KiB a second
WINDOW = 300  # seconds that the Hub may tell us to wait: its limits are per five minutes


class Unreachable(UserError):
    """The Hub itself cannot be reached, whatever is asked of it."""


def resolve_checkpoint(checkpoint: str) -> Path:
    """The file that a checkpoint names.

    Args:
        checkpoint: A path; `package://` stands for the folder where dap_bench is installed.

    Returns:
        The path; whether there is such a file is not checked.

    Raises:
        UserError: If it is not a path.
    """
    if str(checkpoint).startswith("package://"):
        return Path(__file__).parent / checkpoint.removeprefix("package://")
    return path("model.checkpoint", checkpoint)


def require(repo: str, repo_type: str, instead: str) -> None:
    """Make sure that a repository of the Hugging Face Hub can be read.

    The weights of a model are fetched too, so that whatever goes wrong on their way is said here.

    Args:
        repo: The repository, OWNER/NAME.
        repo_type: model or dataset.
        instead: What the user can do instead, for the message.

    Raises:
        UserError: If it cannot be read, with the reason.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

    page = f"https://huggingface.co/{'datasets/' if repo_type == 'dataset' else ''}{repo}"
    try:
        retry(lambda: HfApi().auth_check(repo, repo_type=repo_type), passing)
        if repo_type == "model":
            retry(lambda: _download(repo, "model.safetensors"), passing)
    except GatedRepoError as error:
        raise UserError(f"{repo} is gated: accept its terms on {page}, then run `hf auth login`. {instead}") from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{repo} is not visible to you: log in with `hf auth login` (a token from your Hugging Face "
            f"settings) after accepting its terms on {page}. {instead}"
        ) from error
    except Exception as error:
        if isinstance(error, EntryNotFoundError) and _status(error) == 404:
            return  # weights in another format: timm knows
        if isinstance(error, UserError):
            raise UserError(f"{error} {instead}") from error
        if _status(error) in (401, 403):  # the token itself: it is old, or may not read gated repositories
            raise UserError(
                f"The Hugging Face Hub does not let your token read {repo} ({one_line(error)}): "
                f"run `hf auth login` with one that may read gated repositories. {instead}"
            ) from error
        # no network, a proxy, a time-out, a broken answer: the remedy is the same
        raise Unreachable(
            f"The Hugging Face Hub cannot be reached for {repo} ({one_line(error)}); repeat the same command. {instead}"
        ) from error


def _download(repo: str, name: str) -> str:
    """A whole file, kept by the Hub's client in its own cache."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):  # moves also where bytes do not travel by HTTP
        def update(self, n: float | None = 1) -> bool | None:
            _life.received(int(n or 0))
            return super().update(n)

    return hf_hub_download(repo, name, tqdm_class=Bar)


def retry(ask: Callable[[], Any], again: Callable[[Exception], bool]) -> Any:
    """Ask the Hub, and ask again a few times after errors that may pass.

    Args:
        ask: The request.
        again: Whether an error is worth another attempt.

    Returns:
        What `ask` returns.

    Raises:
        UserError: If the Hub sends next to nothing for too long.
    """
    for pause in PAUSES:
        try:
            return _with_timeout(ask)
        except Exception as error:
            if not again(error):
                raise
        time.sleep(pause)
    return _with_timeout(ask)


def passing(error: Exception) -> bool:
    """Whether the same request may succeed a moment later: the Hub is busy or an answer was cut; it did not refuse.

    Args:
        error: What the request raised.

    Returns:
        True if it is worth another attempt.
    """
    status = _status(error)
    if status:
        return status in (408, 429) or status >= 500
    return not isinstance(error, OSError | UserError)  # those are final: offline mode, no such dataset, our patience


def one_line(error: BaseException) -> str:
    """An error on one line.

    Args:
        error: The error.

    Returns:
        Its type and message, at most some 300 characters.
    """
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".removesuffix(": ")


def _status(error: Exception) -> int:
    """The status of the Hub's answer, or 0 where there was none."""
    return getattr(getattr(error, "response", None), "status_code", 0)


# ---------------------------------------------------------------------- patience


class _Life:
    """When the Hub last gave a sign of life: an answer to its end, or a good part of a long one."""

    def __init__(self) -> None:
        self.last, self._bytes = 0.0, 0
        self.thread = threading.local()  # .count: who wants to know how much arrives

    def received(self, size: int) -> None:
        self._bytes += size
        if self._bytes >= ENOUGH:
            self.sign()
        getattr(self.thread, "count", int)(size)

    def sign(self, wait: float = 0) -> None:
        self._bytes, self.last = 0, max(self.last, time.monotonic() + wait)

    def listen(self, response: Any) -> None:
        """What the client calls with every answer, before its body is read."""
        if response.status_code == 429 or "Retry-After" in response.headers:
            self.sign(WINDOW)
        read = response.iter_raw

        def heard(*args: Any, **options: Any) -> Iterator[bytes]:
            del response.iter_raw  # the class's own again: else answer and function keep each other in memory
            for chunk in read(*args, **options):
                self.received(len(chunk))
                yield chunk
            if not response.has_redirect_location:
                self.sign()

        response.iter_raw = heard


_life = _Life()


@contextmanager
def counting(count: Callable[[int], Any]) -> Iterator[None]:
    """Tell `count` the sizes of what arrives for this thread.

    Args:
        count: A function that is called with each number of bytes.
    """
    _life.thread.count = count
    try:
        yield
    finally:
        del _life.thread.count


def _with_timeout(ask: Callable[[], Any]) -> Any:
    """What `ask` gives, unless the Hub falls silent.

    It is asked in a thread, for there is no other end to an answer that comes byte by byte; a daemon, because it is
    left behind then and must not keep the program from ending.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    def work() -> None:
        try:
            done.set_result(ask())
        except BaseException as error:
            done.set_exception(error)

    logging.getLogger("huggingface_hub.utils._http").addFilter(_discreet)
    done: Future[Any] = Future()
    patience = 3 * constants.HF_HUB_DOWNLOAD_TIMEOUT
    start = time.monotonic()
    _listen(get_session())
    threading.Thread(target=work, daemon=True).start()
    while not wait([done], 0.5).done:
        _listen(get_session())  # the client makes itself a new session after some errors
        if time.monotonic() - max(start, _life.last) > patience:
            raise UserError(
                f"The Hugging Face Hub has sent next to nothing for {patience:g} seconds; repeat the same command "
                f"to resume, or wait longer: HF_HUB_DOWNLOAD_TIMEOUT={2 * patience:g} (seconds)."
            )
    return done.result()


def _listen(session: Any) -> None:
    hooks = session.event_hooks
    if _life.listen not in hooks["response"]:
        session.event_hooks = {**hooks, "response": [*hooks["response"], _life.listen]}


def _discreet(record: logging.LogRecord) -> bool:
    """Leave what signs an address out of the client's messages."""
    record.msg, record.args = redacted(record.getMessage()), ()
    return True
