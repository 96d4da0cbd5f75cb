"""The DeepSeek V4 example runs as it stands, and complains where attention is not what the model means."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .test_examples import ROOT, needs_transformers, python

EXAMPLE = "examples/04_deepseek_v4.py"
SHORT = ("--prompt", "300", "--new", "4")


@needs_transformers
def test_transformers_deepseek_v4() -> None:
    printed = python(EXAMPLE, *SHORT)
    assert re.search(r"README\.md: 300 bytes prefilled, 4 decoded", printed)
    for part in ("prefill", "decode"):
        assert len(re.findall(rf"^  {part} +ours( +[\d.]+%?){{6}}$", printed, re.M)) == 2
    assert len(re.findall(r"^  (?:eager .*?|ours) +(?:\d+\*? *){4}$", printed, re.M)) == 4
    assert re.search(r"\(at most 1\.25\): agrees$", printed, re.M)


@needs_transformers
@pytest.mark.parametrize(
    ("what", "instead"),
    [("window=config.sliding_window", "window=config.sliding_window - 1"), ("sinks.float(),", "sinks.float() * 0,")],
    ids=["window", "sinks"],
)  # fmt: skip
def test_it_fails_where_it_disagrees(tmp_path: Path, what: str, instead: str) -> None:
    """With a window one token short, and without the model's sinks, the difference is beyond the bound."""
    program = (ROOT / EXAMPLE).read_text()
    assert program.count(what) == 1
    (tmp_path / "spoilt.py").write_text(program.replace(what, instead))
    with pytest.raises(AssertionError, match="DISAGREES"):
        python(str(tmp_path / "spoilt.py"), *SHORT, "--text", "README.md")
