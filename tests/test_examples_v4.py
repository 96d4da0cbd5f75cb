"""The DeepSeek V4 example runs as it stands, and complains where attention is not what the model means."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .test_examples import ROOT, needs_transformers, python

EXAMPLE = "examples/04_deepseek_v4.py"
SHORT = ("--prompt", "300", "--new", "4")


@pytest.mark.long
@needs_transformers
def test_transformers_deepseek_v4() -> None:
    printed = python(EXAMPLE, *SHORT)
    assert re.search(r"README\.md: 300 bytes prefilled, 4 decoded", printed)
    for part in ("prefill", "decode"):
        assert len(re.findall(rf"^  {part} +ours( +[\d.]+%?){{6}}$", printed, re.M)) == 2
    assert len(re.findall(r"^  (?:eager .*?|ours) +(?:\d+\*? *){4}$", printed, re.M)) == 4
    assert re.search(r"^  ours +[\d.]+%  +[\d.]+%$", printed, re.M)
    assert re.search(r"\(at most 1\.25\), its indexer's recall 0\.9\d+ \(at least 0\.9\): agrees$", printed, re.M)


@pytest.mark.long
@needs_transformers
@pytest.mark.parametrize(
    ("what", "instead"),
    [("paged_cache(model.config,", "paged_cache(DeepseekV4Config(**{**CONFIG, 'sliding_window': 63}),"),
     ("RECALL = 1.25, 0.9", "RECALL = 1.25, 1.0")],
    ids=["window", "recall"],
)  # fmt: skip
def test_it_fails_where_it_disagrees(tmp_path: Path, what: str, instead: str) -> None:
    """With a window one token short the difference is beyond its bound; FP8 cannot choose all the same rows."""
    program = (ROOT / EXAMPLE).read_text()
    assert program.count(what) == 1
    (tmp_path / "spoilt.py").write_text(program.replace(what, instead))
    with pytest.raises(AssertionError, match="DISAGREES"):
        python(str(tmp_path / "spoilt.py"), *SHORT, "--text", "README.md")
