"""List the settings that each cell was run with, newest first."""

import shutil
from typing import Annotated

from dap_bench.command import Results, command
from dap_bench.report.rows import settings


@command()
def main(
    results: Results = "results/runs",
    remove: Annotated[bool, "remove all but the newest setting of each cell"] = False,
) -> None:
    found = settings(results)
    for setting in found:
        print(setting)
    older = [setting for setting in found if not setting.newest]
    if remove:
        for setting in older:
            shutil.rmtree(setting.cell.folder)
        print(f"removed {len(older)} older settings.")
    elif older:
        print(f"{len(older)} older settings; remove=true removes them.")


if __name__ == "__main__":
    main()
