"""benchmarks/run.py and gpu_check.sh with programs that only sleep, fail or hang, on GPUs that are not there."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cupy_mla.cuda import all_kernels

from .spread import pytest_xdist_setupnodes

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import json, os, subprocess, sys, time
began, name = time.monotonic(), os.path.basename(__file__).removesuffix(".py")
print(name, *sys.argv[1:])
print("last line", flush=True)
if "hang" in sys.argv:
    child = subprocess.Popen(["sleep", "60"], preexec_fn=os.setpgrp)
    open("child", "w").write(str(child.pid))
    time.sleep(60)
time.sleep(0.4 if name in ("training", "cache_ops") else 0.1)
row = [name, *sys.argv[1:]], os.environ["CUDA_VISIBLE_DEVICES"], began, time.monotonic()
with open("runs", "a") as file:
    file.write(json.dumps(row) + "\\n")
sys.exit(int(sys.argv[sys.argv.index("status") + 1]) if "status" in sys.argv else 0)
"""
ENV = {name: value for name, value in os.environ.items() if name != "OUT"}
NAMES = ("load_kernels", "accuracy", "cache_ops", "training", "context_parallel", "vllm_engine")


class Folder:
    """A folder of such programs, and run.py."""

    def __init__(self, path: Path) -> None:
        self.path = path
        shutil.copy(ROOT / "benchmarks" / "run.py", path)
        for name in NAMES:
            (path / f"{name}.py").write_text(PROGRAM)
        (path / "report.py").write_text("print('rewritten')")

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        kept = {name: value for name, value in ENV.items() if name != "CUDA_VISIBLE_DEVICES"}
        command = [sys.executable, "run.py", "--log", "log", *arguments]
        return subprocess.Popen(command, cwd=self.path, env=kept | env, stdout=subprocess.PIPE, text=True)

    def run(self, *arguments: str, **env: str) -> tuple[int, list[str]]:
        """Its exit status, and the lines that it prints, every space one."""
        process = self.start(*arguments, **env)
        lines = process.communicate()[0].splitlines()
        return process.returncode, [" ".join(line.split()) for line in lines]

    def runs(self) -> list[Any]:
        """Command, GPUs, begin and end of the programs that ended, as they began."""
        rows = [json.loads(line) for line in (self.path / "runs").read_text().splitlines()]
        return sorted(rows, key=lambda row: row[2])

    def child(self) -> str:
        """The state of what the program that hangs has started, once it is gone or 2 seconds have passed."""
        until = time.monotonic() + 2  # SIGKILL ends a process a little later
        while time.monotonic() < until:
            try:
                stat = Path(f"/proc/{(self.path / 'child').read_text()}/stat").read_text()
            except FileNotFoundError:
                return "gone"
            if stat.split()[2] == "Z":
                return "gone"
            time.sleep(0.02)
        return "runs"


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_a_gpu_has_one_program_at_a_time(folder: Folder) -> None:
    """The longest first, those of several GPUs when all others have ended, kernels before all."""
    tensor = "vllm_engine pack --tensor-parallel 2"
    asked = (
        tensor,
        "accuracy",
        "context_parallel",
        "accuracy 2",
        "cache_ops",
        "load_kernels",
        "training",
        "accuracy 3",
    )
    status, lines = folder.run(*asked, CUDA_VISIBLE_DEVICES="4,7")
    runs = folder.runs()
    assert status == 0
    assert {(*command, gpus) for command, gpus, *_ in runs[:2]} == {
        ("load_kernels", "0", "2", "4"), ("load_kernels", "1", "2", "7"),
    }  # fmt: skip
    assert {command[0] for command, *_ in runs[2:4]} == {"training", "cache_ops"}
    assert [command[0] for command, *_ in runs[4:]] == [*["accuracy"] * 3, "vllm_engine", "context_parallel"]
    assert [gpus for _, gpus, *_ in runs[-2:]] == ["4,7", "4,7"]
    for number, (_, gpus, began, _) in enumerate(runs):
        before = [run for run in runs[:number] if {*run[1].split(",")} & {*gpus.split(",")}]
        assert all(end < began for *_, end in before)
    assert runs[3][2] < runs[2][3]  # two at a time
    assert "training GPU" in lines[3] + lines[4]
    assert lines[-3].startswith("context_parallel GPU 4,7 status 0 0 s | last line")
    assert lines[-2] == "9 done"
    assert (folder.path / "log" / "accuracy_2.log").read_text() == "accuracy 2\nlast line\n"


def test_a_program_that_hangs_is_ended_with_what_it_has_started(folder: Folder) -> None:
    status, lines = folder.run("accuracy hang", "accuracy", "--limit", "1", "--gpus", "0")
    assert status == 1
    assert lines[1].startswith("accuracy hang GPU 0 timed out 1 s | last line")
    assert lines[2].startswith("accuracy GPU 0 status 0")
    assert folder.child() == "gone"


def test_nothing_goes_on_after_the_deadline(folder: Folder) -> None:
    began = time.monotonic()
    status, lines = folder.run("training hang", "cache_ops hang", "accuracy", "context_parallel", "--gpus", "0,1",
                               "--seconds", "0.5")  # fmt: skip
    assert time.monotonic() - began < 10
    assert status == 1
    assert sorted(lines[3:5]) == ["accuracy not begun", "context_parallel not begun"]
    assert lines[-1] == "2 timed out, 2 not begun"
    assert not (folder.path / "runs").exists()


def test_a_signal_ends_what_runs(folder: Folder) -> None:
    process = folder.start("training hang", "accuracy", "--gpus", "0")
    while not (folder.path / "child").exists() or not (folder.path / "child").read_text():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode != 0
    assert folder.child() == "gone"


def test_a_failure_gives_status_1_and_no_peer_does_not(folder: Folder) -> None:
    status, lines = folder.run("training", "accuracy status 3", "--quick", "--rows", "h 64", "--gpus", "0")
    assert (status, lines[-1]) == (0, "1 done, 1 left out")
    status, lines = folder.run("accuracy status 2", "--gpus", "0")
    assert (status, lines[-1]) == (1, "1 failed")
    assert lines[1].startswith("accuracy status 2 GPU 0 status 2")
    commands = [command for command, *_ in folder.runs()]
    assert commands[:2] == [["training", "--quick", "--only", "h 64"], ["accuracy", "status", "3"]]


@pytest.mark.long(sample=1)
@pytest.mark.parametrize(
    ("arguments", "out", "rewrites"),
    [(["training"], {}, True), (["training --quick"], {}, False), (["training", "--quick"], {}, False),
     (["training"], {"OUT": "."}, False)],
)  # fmt: skip
def test_records_of_whole_programs_are_put_into_the_texts(folder: Folder, arguments, out, rewrites) -> None:
    status, lines = folder.run(*arguments, "--gpus", "0", **out)
    assert status == 0
    assert ("rewritten" in lines) == rewrites


def test_no_gpu_and_no_program(folder: Folder, capfd) -> None:
    for arguments, env, complaint in (
        (["accuracy"], {"CUDA_VISIBLE_DEVICES": ""}, "no GPU was found"),
        (["unknown", "--gpus", "0"], {}, "unknown is no program"),
    ):
        assert folder.run(*arguments, **env) == (2, [])
        assert complaint in capfd.readouterr().err


def test_visible_gpus(module, monkeypatch, tmp_path: Path) -> None:
    """Those that are set, or all that nvidia-smi lists."""
    visible_gpus = module("run").visible_gpus
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-5")
    assert visible_gpus() == ["3", "GPU-5"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus() == []
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\necho 'GPU 1: NVIDIA H200 (UUID: GPU-2)'\n")
    tool.chmod(0o755)
    assert visible_gpus() == ["0", "1"]


def test_parts_of_the_kernels(module, monkeypatch, capsys) -> None:
    """Together they are all that suit the GPU, each once."""
    load_kernels, loaded = module("load_kernels"), []
    monkeypatch.setattr(load_kernels.driver, "gpu", lambda device: SimpleNamespace(capability=80))
    monkeypatch.setattr(load_kernels, "load_all", lambda kernels, device, threads: loaded.append(kernels))
    for arguments in ([], ["0", "3"], ["1", "3"], ["2", "3"]):
        monkeypatch.setattr(sys, "argv", ["load_kernels", *arguments])
        load_kernels.main()
    whole, *parts = loaded
    assert whole == [kernel for kernel in all_kernels() if kernel.suits(80)]
    assert sorted(repr(kernel) for part in parts for kernel in part) == sorted(map(repr, whole))
    assert all(len(part) >= len(whole) // 3 for part in parts)
    assert capsys.readouterr().out.startswith(f"{len(whole)} kernels in 0 s")


TESTS = """
import os, sys, time
import pytest

pytestmark = pytest.mark.gpu
AT_IMPORT = os.environ.get("CUDA_VISIBLE_DEVICES"), "torch" in sys.modules or "cupy" in sys.modules

@pytest.mark.parametrize("number", range(6))
def test_it(number):
    with open("seen", "a") as file:
        print(os.environ["PYTEST_XDIST_WORKER"], *AT_IMPORT, file=file)
    assert number != 3

def test_hangs():
    time.sleep(0 if os.environ.get("GOES_ON") else 60)
"""


def gpu_check(path: Path, *arguments: str, **env: str) -> tuple[int, str, set[str]]:
    """gpu_check.sh over TESTS in two workers: exit status, what it prints, and what the workers saw."""
    pytest.importorskip("xdist")
    folder = path / "benchmarks"
    folder.mkdir()
    for name in ("run.py", "gpu_check.sh"):
        shutil.copy(ROOT / "benchmarks" / name, folder)
    for name in ("load_kernels", "small_cases", "racecheck"):
        (folder / f"{name}.py").write_text("print('a case: clean\\n1 of 1')")
    (path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "spread.py", path / "tests" / "conftest.py")
    (path / "tests" / "test_it.py").write_text(TESTS)
    (path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\nmarkers = gpu\n")
    nproc = path / "nproc"
    nproc.write_text("#!/bin/sh\necho ${OMP_NUM_THREADS-40}\n")
    nproc.chmod(0o755)
    env = {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        **env,
    }
    done = subprocess.run(
        ["bash", str(folder / "gpu_check.sh"), *arguments, "-p", "xdist", "-n", "2"],
        env=ENV | env, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout, {*(path / "seen").read_text().splitlines()}


@pytest.mark.long
def test_workers_have_gpus_in_turn(tmp_path: Path) -> None:
    status, printed, seen = gpu_check(tmp_path, CUDA_VISIBLE_DEVICES="5,7", GOES_ON="1")
    assert printed.startswith("2 GPUs, 32 test workers; ")
    assert seen == {"gw0 5,7 False", "gw1 7,5 False"}
    assert status == 1
    assert "\nFAILED tests/test_it.py::test_it[3] \n" in printed
    assert " 1 FAILED\n 6 PASSED\n" in printed.replace("     ", "")
    assert printed.count("1 of 1") == 1
    assert "clean" not in printed


@pytest.mark.long
def test_tests_that_the_time_ends_are_counted(tmp_path: Path) -> None:
    status, printed, seen = gpu_check(tmp_path, "--seconds", "10", CUDA_VISIBLE_DEVICES="5")
    assert printed.startswith("1 GPUs, 16 test workers; ")
    assert seen == {f"gw{n} 5 False" for n in range(2)}
    assert status == 1
    assert re.search("^tests: status (124|137)$", printed, re.M)  # 137: it is run where SIGINT is ignored
    assert " 1 FAILED\n 5 PASSED\n" in printed.replace("     ", "")
    assert "\nsanitizers: not begun\n" in printed


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [("", [None] * 4), ("3", [None] * 4), ("0,1,4", ["0,1,4", "1,4,0", "4,0,1", "0,1,4"])],
)
def test_gpus_of_workers(monkeypatch, gpus: str, expected: list[str | None]) -> None:
    """Without several GPUs they are left as they are."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    specs = [SimpleNamespace(env={}) for _ in range(4)]
    pytest_xdist_setupnodes(specs)
    assert [spec.env.get("CUDA_VISIBLE_DEVICES") for spec in specs] == expected


SANITIZER = """#!/bin/sh
echo $CUDA_VISIBLE_DEVICES
while [ "$1" != --exactly ]; do shift; done
shift
echo "$@"
case " $* " in *" bad "*|*" one other "*) echo 'RACECHECK SUMMARY: 2 hazards'; exit 1; esac
echo 'RACECHECK SUMMARY: 0 hazards'
"""


def test_sanitized_cases(module, monkeypatch, tmp_path: Path, capfd) -> None:
    """They share processes, which have the GPUs in turn, by one tool after the other; those of an unclean process are
    checked alone, and reports that none of them has alone are told of. A case without time for it is not clean."""
    pytest.importorskip("cupy")
    racecheck = module("racecheck")
    tool, names = tmp_path / "tool", ["a", "b", "bad", "c d"]
    tool.write_text(SANITIZER)
    tool.chmod(0o755)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.setattr(racecheck, "SANITIZER", str(tool))

    def checked(seconds: str, names: list[str]) -> tuple[int, str]:
        monkeypatch.setattr(racecheck.small_cases, "cases", lambda: [(name, None) for name in names])
        options = ["--log", str(tmp_path), "--at-once", "2", "--all-seconds", seconds]
        monkeypatch.setattr(sys, "argv", ["racecheck", *options])
        with pytest.raises(SystemExit) as end:
            racecheck.main()
        return end.value.code, capfd.readouterr().out

    status, printed = checked("60", names)
    assert status == 1
    assert printed.startswith("a: clean\nb: clean\nbad: 2 reports, status 1 (memcheck)\nc d: clean\n3 of 4 cases ")
    logs = {path.stem: path.read_text().split("\n")[:2] for path in tmp_path.glob("*.txt")}
    assert logs == {
        "memcheck_a_and_1_more": ["5", "a bad"], "memcheck_b_and_1_more": ["7", "b c d"], "memcheck_a": ["5", "a"],
        "racecheck_b_and_1_more": ["7", "b c d"], "racecheck_a": ["5", "a"], "memcheck_bad": ["7", "bad"],
    }  # fmt: skip
    assert checked("0", names)[1].startswith("a: not begun (memcheck)\nb: not begun (memcheck)\n")
    assert checked("60", ["a", "b"])[0] == 0
    status, printed = checked("60", ["one", "a", "other", "b"])
    assert status == 1
    assert printed.startswith("one: clean alone; 2 cases together: 2 reports, status 1 (memcheck)\na: clean\n")
    assert "other: clean alone; " in printed
    many = [f"case {number}" for number in range(40)]
    assert "40 of 40 cases are clean" in checked("60", many)[1]
    assert max(int(path.stem.split("_and_")[1].split("_")[0]) for path in tmp_path.glob("*_case_*_more.txt")) == 7
