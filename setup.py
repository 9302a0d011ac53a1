"""What pyproject.toml cannot say: packages are found, and two folders outside dap_bench/ are packages inside it."""

from setuptools import find_packages, setup

OUTSIDE = {"dap_bench.conf": "conf", "dap_bench.paper": "results/paper"}  # in the wheel -> in the source tree

setup(packages=[*find_packages(include=["dap_bench*"]), *OUTSIDE], package_dir={"dap_bench": "dap_bench", **OUTSIDE})
