"""Metadata lives in pyproject.toml. Here: a wheel carries configs/, scripts/, the entry points, the measured rows of
table 5 and the commit too, in the package; and the page of an index is README without what leads into the repository.

`megatron-fp8 launch` and --args-file look for them there and, in a checkout, beside it (megatron_fp8/shipped.py).
"""

import re
import shutil
import subprocess
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
            if Path(".git").exists() and shutil.which("git"):
                command = ["git", "describe", "--always", "--dirty", "--match="]
                found = subprocess.run(command, capture_output=True, text=True)
                Path(self.build_lib, "megatron_fp8/COMMIT.txt").write_text(found.stdout)


def page() -> str:
    """README for an index, which has no other file of the repository: pictures go, and links to files become words."""
    text = re.sub(r"^!\[.*\]\(docs/.*\)\n", "", Path("README.md").read_text(), flags=re.M)
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", text)


setup(cmdclass={"build_py": BuildWithShipped}, long_description=page(), long_description_content_type="text/markdown")
