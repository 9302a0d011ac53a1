"""python -m dap_bench.settings: every setting that cells were run with, the newest of each first.

results=FOLDER     or several: A,B (results/runs)
remove=true        remove all but the newest of each cell
"""

import shutil

from dap_bench.errors import one_of
from dap_bench.report.command import command
from dap_bench.report.rows import settings


@command(results="results/runs", remove="false")
def main(results: str, remove: str) -> None:
    """List the settings, or remove the older ones."""
    one_of("remove", remove, ("true", "false"))
    found = settings(results)
    for setting in found:
        print(setting)
    older = [setting for setting in found if not setting.newest]
    if remove == "true":
        for setting in older:
            shutil.rmtree(setting.cell.folder)
        print(f"removed {len(older)} older settings.")
    elif older:
        print(f"{len(older)} are older; remove=true removes them.")


if __name__ == "__main__":
    main()
