"""vLLM's engine on a small random DeepSeek-V3.2: its own attention and indexer against the plug-in's.

    python benchmarks/vllm_engine.py PACK [--tensor-parallel 2] [--limit SECONDS]

PACK is the folder that `get_vllm.sh` made (vLLM 0.22.1 and what it needs). Every engine runs in a process of its own;
all start at the same time, wait, and are then measured one after the other, stock and plug-in in turn:

- tokens: greedy continuations of prompts of 7 to 3000 tokens, compared one by one. Once two engines part they read
  different texts, so what follows counts as different too. `gap_apart` is the largest difference of the two best
  log-probabilities where they part.
- log-probabilities of all prompt tokens: mean distance from the same engine with attention in float32.
- decode: tokens a second beyond the first token, with CUDA graphs, median of repeats.

Engines of one layer can be compared token by token. With more layers rounding changes what later indexers choose.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from configparser import ConfigParser
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent

PROMPTS = [7, 23, 64, 65, 130, 250, 400, 511, 512, 513, 600, 777, 1000, 1023, 1024, 1300, 1600, 2000, 2047, 2048, 2222,
           2500, 2800, 3000]  # fmt: skip
NEW_TOKENS = 8
VOCABULARY = 4096
SPEED_PROMPT, SPEED_TOKENS = 1024, 64
REQUESTS = (1, 16, 64)
VARIANTS = ("stock", "ours", "float32")


class Setting(NamedTuple):
    """An engine.

    Attributes:
        mode: "graphs" (CUDA graphs of decodes), "compiled" (vLLM's default: torch.compile and all graphs) or "eager".
        place: CUPY_MLA_VLLM of the plug-in's process.
        repeats: of each measurement of speed; 0: none.
    """

    cache: str
    heads: int
    layers: int
    topk: int
    mode: str
    place: str = "custom"
    repeats: int = 3

    def __str__(self) -> str:
        layers = "1 layer" if self.layers == 1 else f"{self.layers} layers"
        return f"{self.cache} {self.heads} heads {layers} topk {self.topk} {self.mode}"

    @property
    def model(self) -> str:
        return f"h{self.heads}l{self.layers}k{self.topk}"

    @property
    def compared(self) -> bool:
        """Whether tokens can be compared."""
        return self.layers == 1


SETTINGS = (
    Setting("fp8", 64, 1, 512, "graphs"),
    Setting("auto", 64, 1, 512, "graphs"),
    Setting("fp8_ds_mla", 16, 1, 512, "eager", "override", 0),
    Setting("fp8", 64, 1, 512, "compiled", repeats=0),
    Setting("fp8", 64, 8, 2048, "graphs"),
    Setting("auto", 128, 8, 2048, "graphs"),
)


# --- an engine's process --------------------------------------------------------------------------------------


def serve(pipe: Connection, log: str, setting: Setting, variant: str, model: str, tensor_parallel: int) -> None:
    """Start an engine, say so, and answer questions until there are no more."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        began = time.perf_counter()
        engine = start(setting, variant, model, tensor_parallel)
        pipe.send(round(time.perf_counter() - began, 1))
        while (question := pipe.recv()) is not None:
            name, *arguments = question
            pipe.send(QUESTIONS[name](engine, *arguments))
    except EOFError:
        pass
    except BaseException:
        traceback.print_exc()
        pipe.send(None)


def start(setting: Setting, variant: str, model: str, tensor_parallel: int) -> Any:
    from vllm import LLM

    if variant == "float32":
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum.CUSTOM, "vllm_float32.Float32Backend")
    selected = variant == "float32" or (variant == "ours" and setting.place == "custom")
    graphs: dict[str, Any] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
    if setting.mode == "graphs":
        graphs |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    eager = setting.mode == "eager" or variant == "float32"
    return LLM(
        model, skip_tokenizer_init=True, max_model_len=4096, max_num_batched_tokens=4096, max_num_seqs=64,
        kv_cache_dtype=setting.cache, block_size=64, enable_prefix_caching=False, gpu_memory_utilization=0.04,
        kv_cache_memory_bytes=setting.layers << 28, enforce_eager=eager, seed=0, max_logprobs=2,
        tensor_parallel_size=tensor_parallel, disable_custom_all_reduce=tensor_parallel > 1,
        **({} if eager else {"compilation_config": graphs}),
        **({"attention_backend": "CUSTOM"} if selected else {}),
    )  # fmt: skip


def prompts_of(lengths: list[int]) -> list[dict[str, list[int]]]:
    """Random tokens, the same in every process; none is the model's begin or end."""
    import numpy as np

    rng = np.random.default_rng(7)
    return [{"prompt_token_ids": rng.integers(2, VOCABULARY, n).tolist()} for n in lengths]


def generate(engine: Any, lengths: list[int], new: int, logprobs: int | None = None) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=logprobs)
    return engine.generate(prompts_of(lengths), params, use_tqdm=False)


def tokens(engine: Any) -> list[list[tuple[int, float]]]:
    """For each prompt its new tokens, each with the distance of the two best log-probabilities."""
    answers = []
    for answer in generate(engine, PROMPTS, NEW_TOKENS, logprobs=2):
        out = answer.outputs[0]
        best = [sorted((x.logprob for x in at.values()), reverse=True) for at in out.logprobs]
        answers.append([(token, b[0] - b[1]) for token, b in zip(out.token_ids, best, strict=True)])
    return answers


def prompt_logprobs(engine: Any) -> list[list[float]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, prompt_logprobs=0)
    answers = engine.generate(prompts_of(PROMPTS), params, use_tqdm=False)
    return [
        [at[token].logprob for token, at in zip(a.prompt_token_ids[1:], a.prompt_logprobs[1:], strict=True)]
        for a in answers
    ]


def speed(engine: Any, requests: int) -> float:
    """Decoded tokens a second, the first of each request aside."""
    lengths, times = [SPEED_PROMPT] * requests, []
    for new in (1, 1 + SPEED_TOKENS):
        began = time.perf_counter()
        generate(engine, lengths, new)
        times.append(time.perf_counter() - began)
    return requests * SPEED_TOKENS / (times[1] - times[0])


QUESTIONS = {"tokens": tokens, "prompt_logprobs": prompt_logprobs, "speed": speed}


# --- the measuring process ------------------------------------------------------------------------------------


class Engine:
    """An engine in its process.

    Attributes:
        seconds: that starting it took; None: not yet.
    """

    def __init__(self, folder: Path, setting: Setting, variant: str, tensor_parallel: int) -> None:
        self.name = f"{setting}, {variant}"
        self.seconds: float | None = None
        self._log = folder / f"{setting} {variant}.log".replace(" ", "_")
        self.pipe, theirs = multiprocessing.get_context("spawn").Pipe()
        os.environ["CUPY_MLA_VLLM"] = setting.place if variant == "ours" else "off" if variant == "float32" else ""
        self.process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(theirs, str(self._log), setting, variant, str(folder / setting.model), tensor_parallel)
        )
        self.process.start()
        theirs.close()

    def ask(self, *question: Any) -> Any:
        self.pipe.send(question)
        answer = self.pipe.recv()
        if answer is None:
            raise RuntimeError(self.last_lines())
        return answer

    def stop(self) -> None:
        """End the process, and those that it started: they end with it unless it is killed."""
        try:
            self.pipe.send(None)
            self.process.join(5)
        except OSError:
            pass
        self.process.kill()

    def last_lines(self, count: int = 12) -> str:
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return "\n".join([f"--- {self.name}", *(line[:230] for line in lines[-count:])])


def started(engines: list[Engine], deadline: float) -> list[Engine]:
    """The engines that came up in time; what the others wrote last is printed."""
    waiting = {engine.pipe: engine for engine in engines}
    seen: set[str] = set()  # engines often fail alike
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(waiting), timeout=left):
            engine = waiting.pop(pipe)
            try:
                engine.seconds = pipe.recv()
            except EOFError:
                engine.seconds = None
            if engine.seconds is None:
                lines = engine.last_lines()
                print(f"--- {engine.name} failed likewise" if lines.splitlines()[-1] in seen else lines, flush=True)
                seen.add(lines.splitlines()[-1])
    for engine in waiting.values():
        print(f"{engine.last_lines()}\n(not up in time)", flush=True)
        engine.process.kill()
    return [engine for engine in engines if engine.seconds is not None]


def compare(ours: list[list[tuple[int, float]]], stock: list[list[tuple[int, float]]]) -> dict[str, Any]:
    """How many tokens agree, and how near the two best tokens were where they do not."""
    equal, gaps = 0, [0.0]
    for mine, theirs in zip(ours, stock, strict=True):
        for (a, gap_a), (b, gap_b) in zip(mine, theirs, strict=True):
            if a != b:
                gaps.append(max(gap_a, gap_b))
                break
            equal += 1
    return {"tokens_equal": equal, "tokens": sum(map(len, stock)), "gap_apart": round(max(gaps), 4)}


def distance(some: list[list[float]], others: list[list[float]]) -> float:
    """Mean distance of log-probabilities."""
    return statistics.fmean(
        abs(a - b) for x, y in zip(some, others, strict=True) for a, b in zip(x, y, strict=True)
    )  # fmt: skip


def measure(setting: Setting, engines: dict[str, Engine]) -> list[dict[str, Any]]:
    """The rows of a setting, one a number of requests."""
    ours, stock = engines["ours"], engines["stock"]
    row: dict[str, Any] = {"start_s_ours": ours.seconds, "start_s_stock": stock.seconds}
    if setting.compared:
        row |= compare(ours.ask("tokens"), stock.ask("tokens"))
        if "float32" in engines:
            exact = engines["float32"].ask("prompt_logprobs")
            row["logprob_error_ours"] = round(distance(ours.ask("prompt_logprobs"), exact), 6)
            row["logprob_error_stock"] = round(distance(stock.ask("prompt_logprobs"), exact), 6)
    if not setting.repeats:
        return [{"setting": str(setting), **row}]
    rows = []
    for requests in REQUESTS:
        for engine in (ours, stock):
            engine.ask("speed", requests)
        times = [(ours.ask("speed", requests), stock.ask("speed", requests)) for _ in range(setting.repeats)]
        rates = [round(statistics.median(of), 1) for of in zip(*times, strict=True)]
        rows.append(
            {"setting": f"{setting}, {requests} request{'s'[: requests > 1]}", **row, "tokens_per_s_ours": rates[0],
             "tokens_per_s_stock": rates[1]}
        )  # fmt: skip
    return rows


def prepare(pack: Path, folder: Path) -> None:
    """Unpack vLLM, make our plug-in known to it, and say to this process's children what they need."""
    exports = subprocess.check_output(["bash", str(pack / "setup_vllm.sh")], text=True).splitlines()
    for line in exports:
        for setting in line.removeprefix("export ").split():
            name, _, value = setting.partition("=")
            os.environ[name] = value.partition(":")[0].partition("$")[0]
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    info = folder / "plugin" / "cupy_mla-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cupy_mla\nVersion: 0\n")
    points = setup["options.entry_points"]["vllm.general_plugins"]
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]{points}\n")
    paths = [str(ROOT), str(ROOT / "benchmarks"), str(info.parent), os.environ["PYTHONPATH"]]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    sys.path.extend(paths[1:])  # vLLM's packages after the machine's own
    os.environ["OMP_NUM_THREADS"] = "2"  # many engines start at the same time
    os.environ |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "NCCL_NVLS_ENABLE": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}


def caches(pack: Path, out: Path, restore: bool) -> None:
    """What compilers made, kept from one machine to the next (a minute less to start), and the engines' logs."""
    folder = Path(os.environ["ENGINE_CACHES"])
    if restore:
        folder.mkdir(parents=True, exist_ok=True)
        if (pack / "caches.tar.xz").exists():
            shutil.unpack_archive(pack / "caches.tar.xz", folder)
        names = {"CUPY_CACHE_DIR": "cupy", "TRITON_CACHE_DIR": "triton", "DG_JIT_CACHE_DIR": "deep_gemm"}
        os.environ |= {name: str(folder / value) for name, value in names.items()}
    elif "OUT" in os.environ:
        shutil.make_archive(str(out / "caches"), "xztar", folder)
        for log in folder.parent.glob("*.log"):
            shutil.copy(log, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--limit", type=float, default=165, help="seconds after which no more is measured")
    parser.add_argument("--only", default="", help="settings whose name contains this")
    options = parser.parse_args()
    deadline = time.monotonic() + options.limit
    folder = Path(tempfile.mkdtemp(prefix="vllm_engine"))
    os.environ["ENGINE_CACHES"] = str(folder / "caches")
    out = Path(os.environ.get("OUT", ROOT / "benchmarks" / "results"))
    caches(options.pack, out, restore=True)
    prepare(options.pack, folder)
    print(f"unpacked after {time.monotonic() - deadline + options.limit:.0f} s", flush=True)
    sys.path.insert(0, str(options.pack.resolve()))
    import tiny_v32  # type: ignore[import-not-found]

    settings = [s for s in SETTINGS if options.only in str(s)]
    for setting in {s.model: s for s in settings}.values():
        tiny_v32.write(folder / setting.model, heads=setting.heads, topk=setting.topk, layers=setting.layers)
    if options.tensor_parallel > 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    print(f"models written after {time.monotonic() - deadline + options.limit:.0f} s", flush=True)
    engines = {
        (setting, variant): Engine(folder, setting, variant, options.tensor_parallel)
        for setting in settings
        for variant in VARIANTS
        if variant != "float32" or (setting.compared and options.tensor_parallel == 1 and setting.mode != "compiled")
    }
    warmups = [
        subprocess.Popen(
            [sys.executable, "-m", "cupy_mla", "warmup", "--heads", str(heads), "--layout", layout], cwd=ROOT,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for heads, layout in sorted({(s.heads, "fp8_ds_mla" if "fp8" in s.cache else "bf16") for s in settings})
    ]  # fmt: skip
    up = set(started(list(engines.values()), deadline - 45))
    print(
        f"{len(up)} of {len(engines)} engines up after {time.monotonic() - deadline + options.limit:.0f} s", flush=True
    )
    rows = []
    try:
        for setting in settings:
            of = {v: e for v in VARIANTS if (e := engines.get((setting, v))) in up and e is not None}
            if not {"ours", "stock"} <= of.keys() or time.monotonic() > deadline:
                print(f"left out: {setting}", flush=True)
                continue
            try:
                measured = measure(setting, of)
            except (RuntimeError, EOFError, OSError) as error:
                print(error, *(e.last_lines() for e in of.values()), sep="\n", flush=True)
                continue
            for row in measured:
                row = {"version": "0.22.1", "tensor_parallel": options.tensor_parallel, **row}
                rows.append(row)
                print({k: v for k, v in row.items() if k not in ("version", "tensor_parallel")}, flush=True)
    finally:
        for engine in engines.values():
            engine.stop()
        for process in warmups:
            process.kill()
    write(out, options.tensor_parallel, rows)
    caches(options.pack, out, restore=False)
    print(f"done after {time.monotonic() - deadline + options.limit:.0f} s", flush=True)


def write(out: Path, tensor_parallel: int, rows: list[dict[str, Any]]) -> None:
    """`vllm.json`: these rows and those of the record that have another tensor parallelism, each with its commit."""
    import json

    from harness import RESULTS, environment

    head, record = environment(), RESULTS / "vllm.json"
    before = json.loads(record.read_text())["rows"] if record.exists() else []
    kept = [row for row in before if row["tensor_parallel"] != tensor_parallel]
    rows = kept + [{**row, "commit": head["commit"]} for row in rows]
    (out / "vllm.json").write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
