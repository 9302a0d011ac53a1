"""python -m dap_bench.fetch model=vit_t,vit_b sampler=balanced,non_balanced: weights and images, and nothing else.

For clusters whose compute nodes have no network: run it on a node that has one, with the arguments of the run (those of
methods and metrics do not matter; experiment=paper works too), then run with HF_HUB_OFFLINE=1. Both need the same
cache_dir and the same HF_HOME. A download that was stopped goes on where it was when the command is repeated.
"""

import sys

from omegaconf import OmegaConf

from dap_bench import config
from dap_bench.report.command import answer, with_folders

ASIDE = ("method", "metric", "name")  # keys that need nothing from elsewhere
DRAW = ("data", "sampler")  # those that say which images


def fetch(*overrides: str) -> None:
    """Have the weights and the frozen images of all cells that `overrides` stand for."""
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


def main(arguments: list[str]) -> None:
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    fetch(*(text for text in with_folders(arguments) if text not in ("-m", "--multirun")))


if __name__ == "__main__":
    answer("fetch", lambda: main(sys.argv[1:]))
