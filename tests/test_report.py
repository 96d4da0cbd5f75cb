"""The README's benchmark table says what the records say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_readme_agrees_with_the_records():
    subprocess.run([sys.executable, ROOT / "benchmarks" / "report.py", "--check"], check=True)
