"""Metadata lives in pyproject.toml. Here: a wheel carries configs/, scripts/, the entry points and the
measured rows of table 5 too, in the package.

`megatron-fp8 launch` and --args-file look for them there and, in a checkout, beside it (megatron_fp8/shipped.py).
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = "configs", "scripts"
RESULTS = "benchmarks/results/table5.csv"  # which `megatron-fp8 table 5` prints
# In scripts/: a script's folder is the first that Python looks for modules in.
SCRIPTS = "pretrain_gpt_fp8.py", "dpo_gpt_fp8.py"


class BuildWithShipped(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:
            for folder in SHIPPED:
                shutil.copytree(folder, Path(self.build_lib, "megatron_fp8", folder), dirs_exist_ok=True)
            for script in SCRIPTS:
                shutil.copy(script, Path(self.build_lib, "megatron_fp8/scripts"))
            results = Path(self.build_lib, "megatron_fp8", RESULTS)
            results.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(RESULTS, results)


setup(cmdclass={"build_py": BuildWithShipped})
