"""Download the weights and images of a run.

    dap-bench fetch model=vit_t,vit_b sampler=balanced,non_balanced

For clusters whose compute nodes have no network: call it on a node that has one, with the arguments of the run (methods
and metrics do not matter; experiment=paper works too), then run with HF_HUB_OFFLINE=1. Both need the same cache_dir and
the same HF_HOME. Repeat the command to resume an interrupted download.
"""

from typing import Annotated

from omegaconf import OmegaConf

from dap_bench import config
from dap_bench.command import command

ASIDE = ("method", "metric", "name")  # keys that need nothing from elsewhere
DRAW = ("data", "sampler")  # those that say which images


def fetch(*overrides: str) -> None:
    """Download the weights and the images of runs, as far as they are not here.

    Args:
        *overrides: Options of a sweep, as on the command line: "model=vit_t,vit_b", "sampler=balanced".

    Raises:
        UserError: If an option is wrong, or something cannot be downloaded.
    """
    from dap_bench.runner import sample_set

    done = set()
    for cell in config.sweep(*overrides, aside=ASIDE):
        cfg = config.compose(*cell)
        config.check(cfg)
        draw, model = (
            str([OmegaConf.to_container(cfg[key], resolve=True) for key in keys]) for keys in (DRAW, ("model",))
        )
        if draw not in done:
            samples = sample_set(cfg)
            print(f"{len(samples)} images are in {samples.folder}")
        if model not in done:
            config.instantiate(cfg.model, device="cpu", precision="fp32")
            print(f"the weights of {cfg.model.get('tag', 'the model')} are here")
        done |= {draw, model}


@command()
def main(*overrides: Annotated[str, "options of a run, as for a sweep: model=A,B sampler=..."]) -> None:
    fetch(*(text for text in overrides if text not in ("-m", "--multirun")))


if __name__ == "__main__":
    main()
