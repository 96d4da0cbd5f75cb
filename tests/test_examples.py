"""The examples and the README's programs run as they stand, and the README's commands are what CI runs."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import cupy_mla

from .kinds import installed

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGE = (ROOT / "docs" / "examples.md").read_text()
COMMANDS = re.findall(r"```bash\n(.*?)```", README, re.S)

SHORT = ("--prompt", "300", "--new", "4")
needs_transformers = pytest.mark.skipif(
    not (installed("torch") and installed("transformers")), reason="torch or transformers is not installed"
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that finds this checkout, after it has ended."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_WAIT_POLICY": "passive",  # torch's threads spin otherwise, which takes minutes on a busy machine
    }
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True)


def python(*arguments: str) -> str:
    """What a program prints; fails with what it complained of."""
    result = run(*arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


# Runs a program where what only other extras bring cannot be imported.
WITHOUT_EXTRAS = """
import runpy, sys
sys.modules.update(dict.fromkeys(["torch", "transformers", "rich", "matplotlib", "pytest"]))
runpy.run_path(sys.argv[1], None, "__main__")
"""


def test_quickstart() -> None:
    """The README's first command: its example needs nothing that it does not install."""
    assert re.findall(r"-e '\.\[(.*?)\]'", COMMANDS[0]) == ["cuda12"]
    (example,) = re.findall(r"bin/python (\S+)", COMMANDS[0])
    printed = python("-c", WITHOUT_EXTRAS, example)
    for operation in ("decode", "prefill"):
        assert re.search(rf"^{operation} .* queries x 128 heads x 2048 .* ms  ", printed, re.M)
    assert printed.endswith("within the tolerances\n")


def test_full_pipeline() -> None:
    printed = python("-c", WITHOUT_EXTRAS, "examples/05_full_pipeline.py")
    assert len(re.findall(r"dense attention over rows as .*: 0\.\d+ \(at most", printed)) == 2
    assert re.search(r"the indexer chose 9\d\.\d% of the tokens", printed)
    assert printed.endswith("within the bounds\n")


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.mark.long
@pytest.mark.skipif(not installed("torch"), reason="torch is not installed")
def test_two_ranks() -> None:
    printed = python(*TORCHRUN, "examples/06_two_gpus.py")
    assert sorted(re.findall(r"^rank (\d) of 2 on c", printed, re.M)) == ["0", "1"]
    for line in (
        r"\d+ steps of \d+ requests, .* ms each; (?:100|99)\.\d % of the chosen",
        r"attention differs by \S+ from",
    ):
        assert len(re.findall(f"^  {line}", printed, re.M)) == 2


# Runs a program where a module cannot be found, as where it is not installed.
WITHOUT = """
import runpy, sys
sys.modules[sys.argv[2]] = None
runpy.run_path(sys.argv[1], None, "__main__")
"""


@pytest.mark.parametrize(
    ("program", "module", "extra"),
    [("01_quickstart", "cupy_mla", "."), ("02_transformers_deepseek_v32", "torch", ".[examples]"),
     ("03_serve_batch", "rich", ".[examples]"), ("04_deepseek_v4", "torch", ".[examples]"),
     ("05_full_pipeline", "cupy_mla", "."), ("06_two_gpus", "torch", ".[examples]"),
     ("08_transformers_training", "torch", ".[examples]")],
)  # fmt: skip
def test_examples_say_what_to_install(program: str, module: str, extra: str) -> None:
    """No traceback where what they need is missing."""
    with pytest.raises(AssertionError) as failed:
        python("-c", WITHOUT, f"examples/{program}.py", module)
    said = str(failed.value).partition("\nassert")[0]
    assert "Traceback" not in said
    assert f"{module}" in said
    assert f"in a checkout of cupy_mla, pip install -e '{extra}'" in said


@pytest.mark.long
@pytest.mark.skipif(not installed("torch"), reason="torch is not installed")
def test_training() -> None:
    printed = python("examples/07_training.py")
    assert re.search(r"cosine with those of torch's attention 0\.9999?\d+ or more", printed)
    assert "training again gives the same losses\n" in printed
    assert re.search(r"the 3 rows it scores highest have \d+% of the attention, \d+% before\n$", printed)


def seconds_of_programs() -> float:
    """CPU time of all programs that this process has run: it does not depend on what runs beside them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.long
@needs_transformers
def test_transformers_training() -> None:
    """Gradients of three models, and losses that go down, of ours as of eager attention, within a minute of a CPU."""
    began = seconds_of_programs()
    printed = python("examples/08_transformers_training.py")
    assert cupy_mla.cuda_available() or seconds_of_programs() - began < 60
    assert len(re.findall(r"^(?:DeepSeek-V3\.2|GLM-5|DeepSeek-V4): gradients differ by 0\.\d+% of", printed, re.M)) == 3
    curves = re.findall(r"^ +(sparse|eager|indexers): loss (.*?)(?:   [\d.]+ s)?$", printed, re.M)
    assert [kind for kind, _ in curves] == ["sparse", "eager", "indexers"] * 3
    for ours, eager, _ in zip(*[iter(curves)] * 3, strict=True):
        losses = [[float(loss) for loss in curve.split()] for _, curve in (ours, eager)]
        assert len(losses[0]) == 5
        assert all(abs(a - b) < 0.1 for a, b in zip(*losses, strict=True))
    alone = re.findall(r"With all other weights fixed: loss (\S+)$", printed, re.M)
    assert all(float(a) < float(c.split()[-1]) for a, (_, c) in zip(alone, curves[2::3], strict=True))


@pytest.mark.long
@needs_transformers
def test_transformers_deepseek_v32() -> None:
    printed = python("examples/02_transformers_deepseek_v32.py", *SHORT)
    assert re.search(r"README\.md: 300 bytes prefilled, 4 decoded", printed)
    for part in ("prefill", "decode"):
        for cache in ("bf16", "FP8"):
            assert len(re.findall(rf"^  {part} +ours, {cache} cache( +[\d.]+%?){{6}}$", printed, re.M)) == 2
    assert len(re.findall(r"^  ours, FP8 cache +(\d+\*? *){4}$", printed, re.M)) == 2
    assert len(re.findall(r"^  ours, (?:bf16|FP8) cache(?: +[\d.]+%){3}$", printed, re.M)) == 2
    assert re.search(r"\(at most 1\.25\), its indexer's recall 0\.9\d+ \(at least 0\.9\): agrees$", printed, re.M)


@pytest.mark.long(sample=1)
@pytest.mark.skipif(not installed("rich"), reason="rich is not installed")
@pytest.mark.parametrize("cache", ["fp8_ds_mla", "bf16"])
def test_serve_batch(cache: str) -> None:
    printed = python("examples/03_serve_batch.py", "--cache", cache, "--requests", "7")
    assert re.search(r"served +│ 7 requests in \d+ steps", printed)
    assert re.search(r"speed +│ \d+ tokens/s", printed)
    assert re.search(r"cache use +│ \d+% at most", printed)
    assert "within the tolerances" in printed
    done = re.findall(r"(\d+)/(\d+)", printed)
    assert len(done) == 2
    assert all(a == b for a, b in done)


@pytest.mark.long
@needs_transformers
def test_transformers_deepseek_v4() -> None:
    printed = python("examples/04_deepseek_v4.py", *SHORT)
    assert re.search(r"README\.md: 300 bytes prefilled, 4 decoded", printed)
    for part in ("prefill", "decode"):
        assert len(re.findall(rf"^  {part} +ours( +[\d.]+%?){{6}}$", printed, re.M)) == 2
    assert len(re.findall(r"^  (?:eager .*?|ours) +(?:\d+\*? *){4}$", printed, re.M)) == 4
    assert re.search(r"^  ours +[\d.]+%  +[\d.]+%$", printed, re.M)
    assert re.search(r"\(at most 1\.25\), its indexer's recall 0\.9\d+ \(at least 0\.9\): agrees$", printed, re.M)


# --- examples that are spoilt ---------------------------------------------------------------------------------


def check_it_fails(
    folder: Path, example: str, changes: dict[str, str], said: str, *arguments: str, launcher: tuple[str, ...] = ()
) -> None:
    """A copy of an example says `said` and ends with status 1, where `changes` have replaced parts of its text. It does
    not crash, though `launcher`, which starts it, may add a traceback of its own."""
    program = (ROOT / "examples" / example).read_text()
    for what, instead in changes.items():
        assert program.count(what) == 1
        program = program.replace(what, instead)
    (folder / example).write_text(program)
    result = run(*launcher, str(folder / example), *arguments)
    printed = result.stdout + result.stderr
    assert result.returncode == 1, printed
    assert said in printed, printed
    assert launcher or "Traceback" not in printed, printed


@pytest.mark.long(sample=1)
@pytest.mark.parametrize(
    ("what", "instead"),
    [("sm_scale=SCALE", "sm_scale=(LATENT + ROPE) ** -0.5"), ("device(q_pe), q)", "device(q_pe * 0), q)"),
     ("positions=device(CONTEXTS - 1)", "positions=device(CONTEXTS * 0)"),
     ("device(index_q), device(weights)", "device(index_q), device(-weights)")],
    ids=["scale", "RoPE", "the indexer's RoPE", "its weights"],
)  # fmt: skip
def test_full_pipeline_fails_where_something_is_wrong(tmp_path: Path, what: str, instead: str) -> None:
    check_it_fails(tmp_path, "05_full_pipeline.py", {what: instead}, "OUT OF THE BOUNDS")


@pytest.mark.long(sample=1)
@pytest.mark.skipif(not installed("rich"), reason="rich is not installed")
@pytest.mark.parametrize(
    ("what", "instead"),
    [("self.cache, metadata, topk_indices)", "self.cache, metadata, topk_indices // 2)"),
     ("forward(keys, q8, w,", "forward(keys, q8, -w,")],
    ids=["attention", "indexer"],
)  # fmt: skip
def test_serve_batch_fails_where_something_is_wrong(tmp_path: Path, what: str, instead: str) -> None:
    """Attention over other rows than the chosen ones, and a choice by other logits, are noticed."""
    check_it_fails(tmp_path, "03_serve_batch.py", {what: instead}, "OUT OF THE TOLERANCES", "--requests", "4")


@pytest.mark.long
@pytest.mark.skipif(not installed("torch"), reason="torch is not installed")
def test_two_ranks_fail_where_a_part_is_missing(tmp_path: Path) -> None:
    changes = {"topk_length=length)": "topk_length=length - 40)"}
    check_it_fails(tmp_path, "06_two_gpus.py", changes, "DIFFERS from one process", launcher=TORCHRUN)


@pytest.mark.long
@needs_transformers
@pytest.mark.parametrize(
    ("example", "changes", "said"),
    [("02_transformers_deepseek_v32.py", {'"ours, bf16 cache": "bf16"': '"ours, bf16 cache": "v32_fp8"'}, "DISAGREES"),
     ("02_transformers_deepseek_v32.py", {"RECALL = 1.25, 0.9": "RECALL = 1.25, 1.0"}, "DISAGREES"),
     ("04_deepseek_v4.py",
      {"paged_cache(model.config,": "paged_cache(DeepseekV4Config(**{**CONFIG, 'sliding_window': 63}),"}, "DISAGREES"),
     ("04_deepseek_v4.py", {"RECALL = 1.25, 0.9": "RECALL = 1.25, 1.0"}, "DISAGREES"),
     ("08_transformers_training.py",
      {"STEPS // 4": "1", "loss = model(tokens,": "loss = model(tokens.roll(1, 1),"},
      "gradients are not those of eager attention"),
     ("08_transformers_training.py", {"STEPS // 4": "1", "INDEXER_LOSS = 21, 2e-3,": "INDEXER_LOSS = 2, 2e-3,"},
      "the loss has not gone down")],
    ids=["FP8 rows", "recall", "V4's window", "V4's recall", "gradients", "loss"],
)  # fmt: skip
def test_examples_with_transformers_fail_where_something_is_wrong(
    tmp_path: Path, example: str, changes: dict[str, str], said: str
) -> None:
    """With FP8 rows for bf16 ones, or a window one token short, the difference is beyond its bound. FP8 cannot choose
    all the same rows."""
    arguments = (*SHORT, "--text", "README.md") if said == "DISAGREES" else ()
    check_it_fails(tmp_path, example, changes, said, *arguments)


def test_readme_program() -> None:
    """It prints what stands behind its last line, as programs of docs/ that tests/test_docs.py runs may."""
    (program,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert python("-c", program).strip() == program.splitlines()[-1].partition("  # ")[2] != ""


def test_a_page_names_every_example() -> None:
    """And commands run those that are there."""
    examples = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
    assert re.findall(r"^\| `(\w+\.py)`", PAGE, re.M) == examples
    assert set(re.findall(r"examples/(\w+\.py)", README + PAGE)) <= set(examples)


def test_ci_runs_the_readmes_test_command() -> None:
    shown = subprocess.run(["bash", ROOT / ".ci" / "run", "--show"], check=True, capture_output=True, text=True).stdout
    assert shown in COMMANDS
    assert shown.endswith("-m pytest -n 2\n")
