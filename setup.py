"""Metadata lives in pyproject.toml. Here: a wheel carries configs/ and scripts/ too, inside the package.

`megatron-fp8 launch` and --args-file look for them there and, in a checkout, beside it.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = "configs", "scripts"


class BuildWithShipped(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:
            for folder in SHIPPED:
                shutil.copytree(folder, Path(self.build_lib, "megatron_fp8", folder), dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithShipped})
