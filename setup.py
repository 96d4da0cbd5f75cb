"""Metadata stands in setup.cfg, but for the text on a package index: the README, whose relative links end there.

A link becomes its text and the path of its target in the source distribution; pictures are left out.
"""

import re
from pathlib import Path

from setuptools import setup

readme = Path(__file__).with_name("README.md").read_text()
readme = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]+\)\n*", "", readme)
setup(long_description=re.sub(r"\[([^\]]+)\]\((?!https?:|#)([^)]+)\)", r"\1 (`\2`)", readme))
