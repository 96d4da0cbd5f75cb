"""vLLM's engine on a small random DeepSeek-V3.2: its own attention and indexer against the plug-in's.

    python benchmarks/vllm_engine.py PACK [--tensor-parallel 2] [--limit SECONDS]

PACK is the folder that `get_vllm.sh` made (vLLM 0.22.1 and what it needs). Every engine runs in a process of its own;
all start at the same time. While two of them are measured, the others are stopped:

- tokens: greedy continuations of prompts of 7 to 3000 tokens, compared one by one under the same text: where ours
  chooses another token than stock, that counts as one apart, and it goes on from stock's text. `gap_apart` is the
  largest difference of the two best log-probabilities at such places, `texts_equal` the number of prompts without one.
- log-probabilities of all prompt tokens: mean distance from the same engine with attention in float32, and
  `logprob_error_noise`, the standard error of the difference of the two means.
- decode: tokens a second, from steps in which every request gets one token. The host bounds a step of these small
  models, and a machine's CPUs change their speed by up to two within a second, for both engines alike. So engines take
  turns of blocks of 16 steps, and before and behind each block a fixed piece of Python is timed. What counts are the
  blocks of an engine around which that piece was fastest, a quarter of them: `tokens_per_s` is of the median of their
  steps, `loop_us` the piece's time around them, by which one sees whether both engines met CPUs of the same speed.
  `_low` and `_high`: of the slowest and the fastest of all blocks.
- `first_tokens_s`: until every request has its first token, the fastest of the repeats.
- `gpu_us`: the time in a decode step in which the GPU works on kernels or copies. Launches that overlap count once.
- with tensor parallelism also the tokens of the same kernels on one GPU, but no `gpu_us`.

Engines of one layer can be compared token by token. With more layers rounding changes what later indexers choose.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from configparser import ConfigParser
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent

Row = dict[str, Any]
PROMPTS = [7, 23, 64, 65, 130, 250, 400, 511, 512, 513, 600, 777, 1000, 1023, 1024, 1300, 1600, 2000, 2047, 2048, 2222,
           2500, 2800, 3000]  # fmt: skip
NEW_TOKENS = 8
VOCABULARY = 4096
SPEED_PROMPT, PREFILL_STEPS = 1024, 16  # tokens of each prompt; steps that prefill the most requests
BLOCKS, BLOCK_STEPS, WARM_TOKENS, PROFILED_STEPS = 4, 16, 24, 8  # blocks of a repeat
QUIETEST = 4  # of so many blocks one counts
REQUESTS = (1, 16, 64)
MEASURING = 40  # seconds of the limit that starting leaves
VARIANTS = ("stock", "ours", "float32")


class Setting(NamedTuple):
    """An engine.

    Attributes:
        mode: "graphs" (CUDA graphs of decodes), "compiled" (vLLM's default: torch.compile and all graphs) or "eager".
        place: CUPY_MLA_VLLM of the plug-in's process.
        repeats: of each measurement of speed; 0: none.
        two_gpus: whether it is measured with tensor parallelism, too.
    """

    cache: str
    heads: int
    layers: int
    topk: int
    mode: str
    place: str = "custom"
    repeats: int = 4
    two_gpus: bool = True

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
    Setting("fp8_ds_mla", 16, 1, 512, "eager", "override", 0, False),
    Setting("fp8", 64, 1, 512, "compiled", repeats=0, two_gpus=False),
    Setting("fp8", 64, 8, 2048, "graphs", repeats=3, two_gpus=False),
    Setting("auto", 128, 8, 2048, "graphs", repeats=3, two_gpus=False),
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


def prompts_of(lengths: list[int]) -> list[list[int]]:
    """Random tokens, the same in every process; none is the model's begin or end."""
    import numpy as np

    rng = np.random.default_rng(7)
    return [rng.integers(2, VOCABULARY, n).tolist() for n in lengths]


def continuations(engine: Any, texts: dict[int, list[int]]) -> dict[int, list[tuple[int, float]]]:
    """The tokens that end a continuation of NEW_TOKENS, each with the distance of the two best log-probabilities.

    Args:
        texts: by the prompt's number, the tokens that it begins with.
    """
    from vllm import SamplingParams

    prompts = prompts_of(PROMPTS)
    given = [{"prompt_token_ids": prompts[i] + text} for i, text in texts.items()]
    params = [
        SamplingParams(temperature=0, max_tokens=NEW_TOKENS - len(text), ignore_eos=True, detokenize=False, logprobs=2)
        for text in texts.values()
    ]
    found = {}
    for i, answer in zip(texts, engine.generate(given, params, use_tqdm=False), strict=True):
        out = answer.outputs[0]
        best = [sorted((x.logprob for x in at.values()), reverse=True) for at in out.logprobs]
        found[i] = [(token, b[0] - b[1]) for token, b in zip(out.token_ids, best, strict=True)]
    return found


def prompt_logprobs(engine: Any) -> list[list[float]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, prompt_logprobs=0)
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts_of(PROMPTS)]
    return [
        [at[token].logprob for token, at in zip(a.prompt_token_ids[1:], a.prompt_logprobs[1:], strict=True)]
        for a in engine.generate(prompts, params, use_tqdm=False)
    ]


NUMBERS = itertools.count()  # of requests


def decoding(engine: Any, requests: int, new: int) -> Iterator[float]:
    """Serve requests of equal length. Yields the time at which a step ends that gave each of them a token."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    core = engine.llm_engine
    for prompt in prompts_of([SPEED_PROMPT] * requests):
        params = SamplingParams(
            temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.CUMULATIVE
        )
        core.add_request(f"speed {next(NUMBERS)}", {"type": "token", "prompt_token_ids": prompt}, params)
    while core.has_unfinished_requests():
        if len(core.step()) == requests:
            yield time.perf_counter()


def loop_us() -> float:
    """A piece of Python: how fast this process runs at all."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        sum(i * i for i in range(4000))
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times)


class Block(NamedTuple):
    """Consecutive decode steps: the median's seconds, and the slower `loop_us` of before and behind."""

    step: float
    loop_us: float


def speed(engine: Any, requests: int, blocks: int = BLOCKS) -> tuple[float, list[Block]]:
    """Seconds until all requests have their first token, and the blocks after that."""
    began = time.perf_counter()
    steps = decoding(engine, requests, 1 + blocks * BLOCK_STEPS + PREFILL_STEPS)
    first = next(steps) - began
    found, loop = [], loop_us()
    for _ in range(blocks):
        ends = [time.perf_counter(), *itertools.islice(steps, BLOCK_STEPS)]
        before, loop = loop, loop_us()
        found.append(Block(statistics.median(b - a for a, b in itertools.pairwise(ends)), max(before, loop)))
    for _ in steps:
        pass
    return first, found


def kernels(engine: Any, requests: int) -> tuple[float, list[tuple[str, float]]]:
    """Microseconds in which the GPU is busy in a decode step, and those of each kernel by name, the longest first."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    steps = decoding(engine, requests, 4 + PROFILED_STEPS + PREFILL_STEPS)
    for _ in range(4):
        next(steps)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            next(steps)
    for _ in steps:
        pass
    launched = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    times: dict[str, float] = {}
    for event in launched:
        us = event.time_range.end - event.time_range.start
        times[event.name] = times.get(event.name, 0) + us / PROFILED_STEPS
    busy = covered((event.time_range.start, event.time_range.end) for event in launched) / PROFILED_STEPS
    return busy, sorted(times.items(), key=lambda named: -named[1])


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return total


QUESTIONS = {"continuations": continuations, "prompt_logprobs": prompt_logprobs, "speed": speed, "kernels": kernels}


# --- the measuring process ------------------------------------------------------------------------------------


class Engine:
    """An engine in its process.

    Attributes:
        seconds: that starting it took; None: not yet.
    """

    def __init__(self, folder: Path, setting: Setting, variant: str, tensor_parallel: int) -> None:
        self.name = f"{setting}, {variant}"
        self.seconds: float | None = None
        self._log = folder / f"{setting} {variant} {tensor_parallel}.log".replace(" ", "_")
        self.pipe, theirs = multiprocessing.get_context("spawn").Pipe()
        os.environ["CUPY_MLA_VLLM"] = setting.place if variant == "ours" else "off" if variant == "float32" else ""
        self.process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(theirs, str(self._log), setting, variant, str(folder / setting.model), tensor_parallel)
        )
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(tensor_parallel > 1))
        self.process.start()
        theirs.close()

    def ask(self, *question: Any) -> Any:
        self.pipe.send(question)
        answer = self.pipe.recv()
        if answer is None:
            raise RuntimeError(self.last_lines())
        return answer

    def pause(self, now: bool) -> None:
        """Stop the process where it stands, or let it go on."""
        os.kill(self.process.pid or 0, signal.SIGSTOP if now else signal.SIGCONT)

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


def stop(engines: list[Engine], seconds: float = 8) -> None:
    """End the processes, and those that they started: these end with them unless they are killed."""
    for engine in engines:
        with contextlib.suppress(OSError):
            engine.pipe.send(None)
    end = time.monotonic() + seconds
    for engine in engines:
        engine.process.join(max(end - time.monotonic(), 0))
        engine.process.kill()


@contextlib.contextmanager
def alone(engines: list[Engine], measured: list[Engine]) -> Iterator[None]:
    """No other engine runs meanwhile."""
    others = [engine for engine in engines if engine not in measured and engine.process.is_alive()]
    for engine in others:
        engine.pause(True)
    try:
        yield
    finally:
        for engine in others:
            engine.pause(False)


def compare(ours: Engine, stock: Engine) -> dict[str, Any]:
    """How many tokens agree under the same text, and how near the two best tokens were where they do not."""
    texts: dict[int, list[int]] = {i: [] for i in range(len(PROMPTS))}
    wanted = stock.ask("continuations", texts)
    apart, gaps, parted = 0, [0.0], set()
    while texts:
        for i, found in ours.ask("continuations", texts).items():
            at = len(texts.pop(i))
            for (token, gap), (expected, its_gap) in zip(found, wanted[i][at:], strict=True):
                at += 1
                if token != expected:
                    apart += 1
                    gaps.append(max(gap, its_gap))
                    parted.add(i)
                    if at < NEW_TOKENS:
                        texts[i] = [token for token, _ in wanted[i][:at]]
                    break
    tokens = NEW_TOKENS * len(PROMPTS)
    return {
        "tokens_equal": tokens - apart, "tokens": tokens, "gap_apart": round(max(gaps), 4),
        "texts_equal": len(PROMPTS) - len(parted),
    }  # fmt: skip


def logprob_errors(ours: list[list[float]], stock: list[list[float]], exact: list[list[float]]) -> dict[str, float]:
    """Mean distances from the exact log-probabilities, and the standard error of their difference."""
    flat = [list(itertools.chain(*values)) for values in (ours, stock, exact)]
    mine, theirs = ([abs(a - b) for a, b in zip(some, flat[2], strict=True)] for some in flat[:2])
    noise = statistics.stdev(a - b for a, b in zip(mine, theirs, strict=True)) / math.sqrt(len(mine))
    return {
        "logprob_error_ours": round(statistics.fmean(mine), 6),
        "logprob_error_stock": round(statistics.fmean(theirs), 6),
        "logprob_error_noise": round(noise, 6),
    }


def compare_results(engines: dict[str, Engine]) -> dict[str, Any]:
    """Tokens and log-probabilities of a setting's engines."""
    ours, stock = engines["ours"], engines["stock"]
    found: dict[str, Any] = compare(ours, stock)
    for variant in ("ours", "stock"):
        if f"{variant} on one GPU" in engines:
            same = compare(engines[variant], engines[f"{variant} on one GPU"])
            found[f"tokens_equal_one_gpu_{variant}"] = same["tokens_equal"]
    if "float32" in engines:
        exact = engines["float32"].ask("prompt_logprobs")
        found |= logprob_errors(ours.ask("prompt_logprobs"), stock.ask("prompt_logprobs"), exact)
    return found


def compare_speed(engines: dict[str, Engine], requests: int, repeats: int) -> dict[str, Any]:
    """Tokens a second of so many requests, ours and stock in turn."""
    pair = {name: engines[name] for name in ("ours", "stock")}
    for engine in pair.values():
        engine.ask("speed", requests, 1)
    firsts: dict[str, list[float]] = {name: [] for name in pair}
    blocks: dict[str, list[Block]] = {name: [] for name in pair}
    for turn in range(repeats):
        for name in reversed(pair) if turn % 2 else pair:
            first, of = pair[name].ask("speed", requests)
            firsts[name].append(first)
            blocks[name] += of
    return {k: v for name in pair for k, v in speed_of(name, requests, firsts[name], blocks[name]).items()}


def speed_of(name: str, requests: int, firsts: list[float], blocks: list[Block]) -> dict[str, float]:
    """A row's fields of an engine."""
    steps = [block.step for block in blocks]
    quiet = sorted(blocks, key=lambda block: block.loop_us)[: -(-len(blocks) // QUIETEST)]
    return {
        f"tokens_per_s_{name}": round(requests / statistics.median(block.step for block in quiet), 1),
        f"tokens_per_s_{name}_low": round(requests / max(steps), 1),
        f"tokens_per_s_{name}_high": round(requests / min(steps), 1),
        f"loop_us_{name}": round(statistics.median(block.loop_us for block in quiet), 1),
        f"first_tokens_s_{name}": round(min(firsts), 4),
    }


def compare_kernels(engines: dict[str, Engine], requests: int, heading: str, file: Path) -> dict[str, float]:
    """The GPU's time of a decode step; each kernel's goes into the file."""
    row = {}
    for name in ("ours", "stock"):
        busy, found = engines[name].ask("kernels", requests)
        row[f"gpu_us_{name}"] = round(busy, 1)
        lines = [f"{us:9.1f} {kernel[:100]}" for kernel, us in found[:25]]
        with file.open("a") as log:
            log.write("\n".join([f"--- {heading}, {name}", *lines, ""]))
    return row


def measure(
    setting: Setting, engines: dict[str, Engine], deadline: float, profiles: Path | None, rows: list[Row]
) -> None:
    """Add the rows of a setting, one a number of requests, without those whose turn comes too late.

    Args:
        profiles: file for the kernels of decode steps; None: they are not timed.
    """
    row: Row = {"setting": str(setting)}
    row |= {"start_s_ours": engines["ours"].seconds, "start_s_stock": engines["stock"].seconds}
    if setting.compared:
        row |= compare_results(engines)
    if not setting.repeats:
        rows.append(row)
        return
    for requests in REQUESTS:
        if time.monotonic() < deadline:
            name = f"{setting}, {requests} request{'s'[: requests > 1]}"
            rows.append({**row, "setting": name, **compare_speed(engines, requests, setting.repeats)})
    if profiles is None:
        return
    for requests, of in zip(REQUESTS, rows, strict=False):  # last, as a profiler that was on once costs host time
        if time.monotonic() < deadline:
            of |= compare_kernels(engines, requests, of["setting"], profiles)


def shown(row: dict[str, Any]) -> str:
    """A short line of ours:stock for whoever looks at the run."""
    parts = [row["setting"]]
    if "tokens" in row:
        parts.append(f"equal {row['tokens_equal']}/{row['tokens']} gap {row['gap_apart']}")
    parts += [f"{name.removeprefix('tokens_equal_')} {row[name]}" for name in row if "one_gpu" in name]
    for name, short in (
        ("logprob_error", "logp"), ("tokens_per_s", "t/s"), ("loop_us", "loop"), ("first_tokens_s", "first"),
        ("gpu_us", "gpu"), ("start_s", "start"),
    ):  # fmt: skip
        if f"{name}_ours" in row:
            parts.append(f"{short} {row[f'{name}_ours']}:{row[f'{name}_stock']}")
    return " | ".join(parts)


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


def restore_caches(pack: Path) -> None:
    """What compilers and vLLM made elsewhere, if the pack has it (a minute less to start); where they are kept."""
    folder = Path(os.environ["ENGINE_CACHES"])
    folder.mkdir(parents=True, exist_ok=True)
    if (pack / "caches.tar.xz").exists():
        shutil.unpack_archive(pack / "caches.tar.xz", folder)
    names = {
        "CUPY_CACHE_DIR": "cupy", "TRITON_CACHE_DIR": "triton", "DG_JIT_CACHE_DIR": "deep_gemm",
        "VLLM_CACHE_ROOT": "vllm",  # what it knows of a model's class: else a second process imports vLLM to look
    }  # fmt: skip
    os.environ |= {name: str(folder / value) for name, value in names.items()}


def keep(out: Path) -> None:
    """The caches, and one archive of the engines' logs."""
    folder = Path(os.environ["ENGINE_CACHES"])
    shutil.rmtree(folder / "vllm" / "torch_compile_cache", ignore_errors=True)  # of models in this run's own folder
    shutil.make_archive(str(out / "caches"), "xztar", folder)
    logs = folder.parent / "logs"
    logs.mkdir()
    for log in (*folder.parent.glob("*.log"), *folder.parent.glob("kernels.txt")):
        shutil.copy(log, logs)
    shutil.make_archive(str(out / "logs"), "xztar", logs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--limit", type=float, default=130, help="seconds after which nothing more is begun")
    parser.add_argument("--only", default="", help="settings whose name contains this")
    options = parser.parse_args()
    deadline = time.monotonic() + options.limit
    folder = Path(tempfile.mkdtemp(prefix="vllm_engine"))
    os.environ["ENGINE_CACHES"] = str(folder / "caches")
    out = Path(os.environ.get("OUT", ROOT / "benchmarks" / "results"))
    restore_caches(options.pack)
    prepare(options.pack, folder)
    print(f"unpacked after {time.monotonic() - deadline + options.limit:.0f} s", flush=True)
    sys.path.insert(0, str(options.pack.resolve()))
    import tiny_v32  # type: ignore[import-not-found]

    several = options.tensor_parallel > 1
    settings = [s for s in SETTINGS if options.only in str(s) and (s.two_gpus or not several)]
    for setting in {s.model: s for s in settings}.values():
        tiny_v32.write(folder / setting.model, heads=setting.heads, topk=setting.topk, layers=setting.layers)
    print(f"models written after {time.monotonic() - deadline + options.limit:.0f} s", flush=True)
    engines: dict[tuple[Setting, str], Engine] = {}
    for setting in settings:
        for variant in VARIANTS:
            if variant != "float32" or (setting.compared and not several and setting.mode != "compiled"):
                engines[setting, variant] = Engine(folder, setting, variant, options.tensor_parallel)
            if variant != "float32" and several and setting.compared:
                engines[setting, f"{variant} on one GPU"] = Engine(folder, setting, variant, 1)
    warmups = [
        subprocess.Popen(
            [sys.executable, "-m", "cupy_mla", "warmup", "--heads", str(heads), "--layout", layout], cwd=ROOT,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for heads, layout in sorted({
            (s.heads // ranks, "fp8_ds_mla" if "fp8" in s.cache else "bf16")
            for s in settings for ranks in {1, options.tensor_parallel}
        })
    ]  # fmt: skip
    up = set(started(list(engines.values()), deadline - MEASURING))
    print(
        f"{len(up)} of {len(engines)} engines up after {time.monotonic() - deadline + options.limit:.0f} s", flush=True
    )
    for process in warmups:  # what they have not compiled yet, no engine needs
        process.kill()
    rows: list[Row] = []
    try:
        for setting in settings:
            of = {variant: engine for (s, variant), engine in engines.items() if s == setting and engine in up}
            if not {"ours", "stock"} <= of.keys() or time.monotonic() > deadline:
                print(f"left out: {setting}", flush=True)
                continue
            measured: list[Row] = []
            try:
                with alone([] if several else list(up), list(of.values())):
                    measure(setting, of, deadline, None if several else folder / "kernels.txt", measured)
            except (RuntimeError, EOFError, OSError) as error:
                print(error, *(e.last_lines() for e in of.values()), sep="\n", flush=True)
            rows += [{"version": "0.22.1", "tensor_parallel": options.tensor_parallel, **row} for row in measured]
            print(*map(shown, measured), sep="\n", flush=True)
    finally:
        stop(list(engines.values()))
    write(out, options.tensor_parallel, rows)
    if "OUT" in os.environ:
        keep(out)
    print(f"done after {time.monotonic() - deadline + options.limit:.0f} s", flush=True)


def write(out: Path, tensor_parallel: int, rows: list[Row]) -> None:
    """`vllm.json`: these rows and those of the record that have another tensor parallelism, each with its commit.

    `notes` of the record, by commit, stay with their rows.
    """
    import json

    from harness import RESULTS, environment

    head, record = environment(), RESULTS / "vllm.json"
    before = json.loads(record.read_text()) if record.exists() else {"rows": []}
    rows = [{**row, "commit": head["commit"]} for row in rows]
    rows = [row for row in before["rows"] if row["tensor_parallel"] != tensor_parallel] + rows
    commits = {row["commit"] for row in rows}
    notes = {commit: note for commit, note in before.get("notes", {}).items() if commit in commits}
    (out / "vllm.json").write_text(json.dumps({**head, "notes": notes, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
