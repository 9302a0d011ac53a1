"""Is the Hugging Face Hub there, and may we read this repository? Asked once, before anything slow."""

from dap_bench.errors import UserError


def require(repo: str, repo_type: str, instead: str) -> None:
    """Raise a UserError that says what is wrong and what to do `instead`, unless `repo` can be read."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    page = f"https://huggingface.co/{'datasets/' if repo_type == 'dataset' else ''}{repo}"
    try:
        HfApi().auth_check(repo, repo_type=repo_type)
    except GatedRepoError as error:
        raise UserError(f"{repo} is gated: accept its terms on {page}, then run `hf auth login`. {instead}") from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{repo} is not visible to you: log in with `hf auth login` (a token from your Hugging Face "
            f"settings) after accepting its terms on {page}. {instead}"
        ) from error
    except Exception as error:  # no network, a proxy, a time-out, a broken answer: the remedy is the same
        raise UserError(
            f"The Hugging Face Hub cannot be reached for {repo} ({type(error).__name__}). {instead}"
        ) from error
