"""Metadata stands in setup.cfg, but for two things.

The text on a package index is the README, whose relative links end there: a link becomes its text and the path of its
target in the source distribution; pictures are left out.

An editable install is a .pth file that names the checkout, which type checkers read. Setuptools writes one where all
packages lie below one folder; otherwise it installs an import hook, and they would not find the package. The kernels
lie beside the package, and there it finds them (`cupy_mla.cuda.kernel.kernels_root`).
"""

import re
import sys
from pathlib import Path

from setuptools import setup

readme = Path(__file__).with_name("README.md").read_text()
readme = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]+\)\n*", "", readme)
editable = {"packages": ["cupy_mla"], "package_dir": {"": "."}} if "editable_wheel" in sys.argv else {}
setup(long_description=re.sub(r"\[([^\]]+)\]\((?!https?:|#)([^)]+)\)", r"\1 (`\2`)", readme), **editable)
