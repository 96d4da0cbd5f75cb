"""vLLM's engine on small random models: its own attention and indexer against the plug-in's.

    python benchmarks/vllm_engine.py PACK [--tensor-parallel 2] [--limit SECONDS] [--kernels-only | --kernels-there]
    python benchmarks/vllm_engine.py --merge FOLDER...

PACK is the folder that `get_vllm_new.sh` made: a vLLM and what it needs. First the kernels that the plug-in makes ready
are compiled, by all cores, into CuPy's disk cache; `--kernels-only` ends then, and a later run finds them where
ENGINE_CACHES says (`--kernels-there`). Every engine runs in a process of its own; all start at the same time. While two
of them are measured, the others are stopped:

- tokens: greedy continuations of prompts of 7 to 3000 tokens, compared one by one under the same text: where ours
  chooses another token than stock, that counts as one apart, and it goes on from stock's text. `gap_apart` is the
  largest difference of the two best log-probabilities at such places, `texts_equal` the number of prompts without one.
- `_alone`, of DeepSeek-V4 and V4.1: the tokens of the same engine that serves one prompt after the other, not all at
  once. That rounds otherwise, and a rounding may give a token another expert.
- log-probabilities of all prompt tokens: mean distance from the same engine with attention in float32, and
  `logprob_error_noise`, the standard error of the difference of the two means. `_within_topk`: of tokens whose indexer
  has nothing to choose.
- decode: tokens a second by the wall clock, from steps in which every request gets one token. The host bounds a step
  of the models of one layer, and a machine's CPUs change their speed by up to two within a second, for both engines
  alike. So both serve the same requests at the same time, in turn: a block of 8 steps of one, then one of the other,
  which goes first changing. On one GPU both run on the same core, the fastest when it was last looked for. With
  several the main threads of both engines' processes have the same cores, which do not slow one another down, and the
  other engine is stopped; pairs are more. Before and behind each block a fixed piece of Python is timed. What counts
  are the pairs of blocks around which that piece was fastest, half of them: `tokens_per_s` is of the median of their
  steps, `loop_us` the piece's time around them. `_low` and `_high`: of the slowest and the fastest of all blocks.
  `tokens_per_s_ratio`: ours to stock's in a pair, the median of all pairs; `_noise` its standard error.
- `first_tokens_ms`: until every request has its first token, of prompts as long as the engine has not seen yet. The
  median of a few times, ours and stock in turn, on the fastest core.
- traffic, of engines with a prefix cache, with speculation (ngram) or without: requests that come while others are
  served, of which a part shares its beginning and another repeats itself, three times over. `traffic_tokens_per_s` and
  `traffic_first_token_ms` (of a request, from when it came): the median of the three, of which each has the median of
  its requests; `longest_step_ms`: of all three, so that what is compiled in service counts. `texts_equal_thrice`: of
  so many requests the text was the same each time; `traffic_texts_equal`: the texts of ours that are stock's.
- `gpu_us`: the time in a decode step in which the GPU works on kernels or copies. Launches that overlap count once.
- with tensor parallelism no `gpu_us`, but `_one_gpu`: the tokens of the same engine on one GPU, which differ by
  roundings: each GPU's part of a sum becomes bfloat16, and with fewer heads other kernels are chosen.
  `_one_gpu_alike`: ours without these two: sums in float32 (`vllm_float32_sums.py`), the kernel ALIKE for all batches.

Engines of one layer can be compared token by token. With more layers rounding changes what later indexers choose.

`--merge` makes one record of runs beside each other, on a GPU each, say, with OUT of their own: FOLDERs.

The models are DeepSeek-V3.2 and, where the name of a setting says so, DeepSeek-V3 (no indexer), DeepSeek-V4 with one
layer of each kind, and DeepSeek-V4.1 with six layers, which share compressed rows, lists and candidate blocks. V4, V4.1
and GPUs that share rows need TileLang, CuTe DSL and a newer NCCL, in whose place both engines have `vllm_stand_ins.py`.
These have no engine in float32 beside them. `--only "DeepSeek-V4 "` leaves V4.1 out.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from configparser import ConfigParser
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

ROOT = Path(__file__).resolve().parent.parent

Row = dict[str, Any]
MORE_PROMPTS = [3000] * 24 + [511] * 96  # for log-probabilities
PROMPTS = [7, 23, 64, 65, 130, 250, 400, 511, 512, 513, 600, 777, 1000, 1023, 1024, 1300, 1600, 2000, 2047, 2048, 2222,
           2500, 2800, 3000]  # fmt: skip
NEW_TOKENS = 8
VOCABULARY = 4096
KV_BYTES = 200 << 20  # a layer
SPEED_PROMPT, PREFILL_STEPS = 1024, 16  # tokens of each prompt; steps that prefill the most requests
PAIRS, SEVERAL_PAIRS = 40, 60  # of blocks; of engines of several GPUs, whose processes wait for one another
BLOCK_STEPS, PROFILED_STEPS = 8, 8
PAIRS_A_CORE = 8  # until the fastest cores are looked for again
QUIETEST = 2  # of so many pairs one counts
SETTLED = 0.012  # seconds until the GPUs have ended what an engine asked for ahead
REQUESTS = (1, 16, 64)
FIRST_TOKENS = {1: 8, 16: 4, 64: 2}  # how often first tokens are timed, by requests
ALIKE = "bf16_sm90"
TRAFFIC_REQUESTS, TRAFFIC_NEW_TOKENS, TRAFFIC_A_STEP, TRAFFIC_ROUNDS = 120, 24, 2, 3
TRAFFIC_LENGTHS, TRAFFIC_SHARED = (20, 1500), 1024  # tokens of a prompt, and of the beginning of some
MEASURING = 40  # seconds of the limit that starting leaves
PATIENCE, GRACE = 120, 20  # seconds that an answer is waited for, and at the limit's end
VARIANTS = ("stock", "ours", "float32")
STOCK_SHARES_BELOW = 32  # heads of a GPU: vLLM's MIN_HEADS_FOR_BF16_PREFILL
MOST_REQUESTS, MOST_TOKENS = 64, 4096  # of an engine; the latter of a batch and of a sequence
V4_WINDOW, V4_BLOCK = 128, 256  # tokens
V41_CANDIDATES = 128  # blocks of 8 keys: of half of them where a sequence has 2048


class Setting(NamedTuple):
    """An engine.

    Attributes:
        family: of the model: "V3.2", "V3" (dense), or "V4" and "V4.1" (with `place` "override").
        mode: "graphs" (CUDA graphs of decodes), "compiled" (vLLM's default: torch.compile and all graphs) or "eager".
        place: CUPY_MLA_VLLM of the plug-in's process.
        speed: whether decode is timed.
        traffic: whether a prefix cache is on and traffic is served, instead.
        speculation: tokens that are guessed for each decode.
        two_gpus: whether it is measured with tensor parallelism, too.
        sharing: GPUs that have parts of each request's rows (decode context parallelism), of those of tensor
            parallelism; more than one: it is measured with that alone, and its decode is not timed, for
            what stands in for CuTe DSL is slow. vLLM's engine may have tensor parallelism alone (`sharing_of`).
    """

    cache: str
    heads: int
    layers: int
    topk: int
    mode: str
    place: str = "custom"
    speed: bool = True
    two_gpus: bool = True
    traffic: bool = False
    speculation: int = 0
    sharing: int = 1
    family: str = "V3.2"

    def __str__(self) -> str:
        layers = "1 layer" if self.layers == 1 else f"{self.layers} layers"
        more = " prefix cache" * self.traffic + f" {self.speculation} guessed" * (self.speculation > 0)
        more += f" {self.sharing} GPUs share rows" * (self.sharing > 1)
        family = "" if self.family == "V3.2" else f"DeepSeek-{self.family} "
        topk = f" topk {self.topk}" * (self.topk > 0)
        return f"{family}{self.cache} {self.heads} heads {layers}{topk} {self.mode}{more}"

    @property
    def model(self) -> str:
        return f"{self.family}h{self.heads}l{self.layers}k{self.topk}"

    @property
    def compared(self) -> bool:
        """Whether tokens can be compared."""
        return (self.layers == 1 or self.family != "V3.2") and not self.traffic

    @property
    def has_exact(self) -> bool:
        """Whether an engine in float32 is there to compare with."""
        return self.compared and self.family == "V3.2" and self.mode != "compiled"

    @property
    def stands_in(self) -> bool:
        """Whether vLLM needs packages that are not there."""
        return self.of_v4 or self.sharing > 1

    @property
    def of_v4(self) -> bool:
        """Whether layers have sliding windows, and rows of a compressed cache beside them."""
        return self.family in ("V4", "V4.1")


def serving(setting: Setting, speculation: int = 0) -> Setting:
    """The same engine under traffic."""
    return setting._replace(speed=False, two_gpus=False, traffic=True, speculation=speculation)


SETTINGS = (
    Setting("fp8", 64, 1, 512, "graphs"),
    Setting("auto", 64, 1, 512, "graphs"),
    Setting("fp8_ds_mla", 16, 1, 512, "eager", "override", speed=False, two_gpus=False),
    Setting("fp8", 64, 1, 512, "compiled", speed=False, two_gpus=False),
    Setting("fp8", 64, 16, 2048, "graphs", two_gpus=False),
    Setting("auto", 128, 16, 2048, "graphs", two_gpus=False),
    serving(Setting("fp8", 64, 1, 512, "graphs")),
    serving(Setting("fp8", 64, 1, 512, "graphs"), speculation=3),
    serving(Setting("auto", 64, 1, 512, "graphs")),
    serving(Setting("fp8", 64, 16, 2048, "graphs")),
    Setting("fp8", 16, 1, 512, "graphs", speed=False, sharing=2),
    Setting("fp8", 64, 1, 512, "graphs", speed=False, sharing=2),
    Setting("auto", 64, 1, 512, "graphs", speed=False, sharing=2),
    Setting("fp8", 64, 1, 512, "eager", two_gpus=False),
    Setting("auto", 64, 1, 512, "eager", two_gpus=False),
    Setting("auto", 64, 2, 0, "graphs", two_gpus=False, family="V3"),
    Setting("fp8", 64, 2, 0, "graphs", two_gpus=False, family="V3"),
    Setting("auto", 16, 2, 0, "eager", two_gpus=False, family="V3"),
    Setting("fp8", 64, 3, 512, "graphs", "override", two_gpus=False, family="V4"),
    Setting("fp8", 64, 3, 512, "eager", "override", two_gpus=False, family="V4"),
    Setting("fp8", 64, 6, 512, "graphs", "override", two_gpus=False, family="V4.1"),
)


def chosen_settings(parts: list[str], gpus: int, without: Sequence[str] = ()) -> list[Setting]:
    """Settings of so many GPUs whose name contains one of these parts, and none of the others."""
    fit = [s for s in SETTINGS if (s.two_gpus and gpus % s.sharing == 0 if gpus > 1 else s.sharing == 1)]
    fit = [s for s in fit if not any(part in str(s) for part in without)]
    return [s for s in fit if any(part in str(s) for part in parts)]


# --- kernels --------------------------------------------------------------------------------------------------


def layers_of(setting: Setting, gpus: int) -> list[Any]:
    """What the plug-in is told of an engine's layers: a config of each kind."""
    from cupy_mla.integrations.vllm import warm
    from cupy_mla.typing import ModelKind

    guessing = SimpleNamespace(num_speculative_tokens=setting.speculation) if setting.speculation else None
    engine = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=MOST_REQUESTS, max_num_batched_tokens=MOST_TOKENS),
        model_config=SimpleNamespace(
            max_model_len=MOST_TOKENS, get_num_attention_heads=lambda parallel: setting.heads // gpus,
            hf_config=SimpleNamespace(index_topk=setting.topk, sliding_window=V4_WINDOW),
        ),
        speculative_config=guessing, parallel_config=None,
    )  # fmt: skip
    heads, fp8 = setting.heads // gpus * min(setting.sharing, gpus), "fp8" in setting.cache
    if setting.of_v4:
        kind: ModelKind = "v4" if setting.family == "V4" else "v41"
        return warm.v4_layers_of(engine, heads, kind)
    if setting.family == "V3":
        return [warm.dense_layers_of(engine, heads, fp8)]
    return [warm.layers_of(engine, heads, setting.topk, "v32_fp8" if fp8 else "bf16", rope=True)]


def make_kernels(layers: list[Any]) -> None:
    """Compile what such layers need into CuPy's disk cache, by all cores. Their own warm-up then finds it."""
    from cupy_mla.selfcheck.warmup import kernels_of, load_all

    began = time.perf_counter()
    number = load_all(kernels_of(layers, 0), 0, os.cpu_count() or 1)
    print(f"{number} kernels of {len(layers)} kinds of layers in {time.perf_counter() - began:.0f} s", flush=True)


# --- an engine's process --------------------------------------------------------------------------------------


def serve(pipe: Connection, log: str, setting: Setting, variant: str, model: str, tensor_parallel: int) -> None:
    """Start an engine, say so, and answer questions until there are no more. Its processes are a group."""
    os.setpgrp()
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


def sharing_of(setting: Setting, variant: str, gpus: int) -> int:
    """GPUs that share an engine's rows. vLLM's own attention on Hopper can over FP8 rows, with few heads a GPU."""
    able = variant != "stock" or ("fp8" in setting.cache and setting.heads // gpus < STOCK_SHARES_BELOW)
    return min(setting.sharing, gpus) if able else 1


def start(setting: Setting, variant: str, model: str, tensor_parallel: int) -> Any:
    from vllm import LLM

    if variant == "float32":
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum.CUSTOM, "vllm_float32.Float32Backend")
    selected = variant in ("float32", "alike") or (variant == "ours" and setting.place == "custom")
    graphs: dict[str, Any] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
    if setting.mode == "graphs":
        graphs |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    eager = setting.mode == "eager" or variant in ("float32", "alike")
    guessing: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": setting.speculation}
    guessing |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    return LLM(
        model, load_format="random" if setting.of_v4 else "auto", skip_tokenizer_init=True, max_model_len=MOST_TOKENS,
        max_num_batched_tokens=MOST_TOKENS, max_num_seqs=MOST_REQUESTS, tensor_parallel_size=tensor_parallel,
        decode_context_parallel_size=sharing_of(setting, variant, tensor_parallel), kv_cache_dtype=setting.cache,
        block_size=V4_BLOCK if setting.family == "V4" else 64, enable_prefix_caching=setting.traffic,
        gpu_memory_utilization=0.04, kv_cache_memory_bytes=setting.layers * KV_BYTES, enforce_eager=eager, seed=0,
        max_logprobs=2,
        disable_custom_all_reduce=tensor_parallel > 1,
        **({} if eager else {"compilation_config": graphs}),
        **({"kernel_config": {"enable_jit_warmup": False}} if setting.of_v4 else {}),  # it would import TileLang
        **({"limit_mm_per_prompt": {"image": 0}} if setting.family == "V4.1" else {}),
        **({"attention_backend": "CUSTOM"} if selected else {}),
        **({"speculative_config": guessing} if setting.speculation else {}),
    )  # fmt: skip


def prompts_of(lengths: list[int]) -> list[list[int]]:
    """Random tokens, the same in every process; none is the model's begin or end."""
    import numpy as np

    rng = np.random.default_rng(7)
    return [rng.integers(2, VOCABULARY, n).tolist() for n in lengths]


def continuations(engine: Any, texts: dict[int, list[int]], alone: bool) -> dict[int, list[tuple[int, float]]]:
    """The tokens that end a continuation of NEW_TOKENS, each with the distance of the two best log-probabilities.

    Args:
        texts: by the prompt's number, the tokens that it begins with.
        alone: whether each is served by itself.
    """
    from vllm import SamplingParams

    if alone:
        return {i: continuations(engine, {i: text}, False)[i] for i, text in texts.items()}

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
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts_of(PROMPTS + MORE_PROMPTS)]
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


def loop_us(repeats: int = 5) -> float:
    """A piece of Python: how fast this process runs at all."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        sum(i * i for i in range(4000))
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times)


class Block(NamedTuple):
    """Consecutive decode steps: the median's seconds, and the slower `loop_us` of before and behind."""

    step: float
    loop_us: float


def first_tokens(engine: Any, requests: int, length: int, core: int | None) -> float:
    """Serve requests of one token each, of prompts of a length. Returns the seconds."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    prompts = [{"type": "token", "prompt_token_ids": prompt} for prompt in prompts_of([length] * requests)]
    llm = engine.llm_engine
    with on_core(core):
        began = time.perf_counter()
        for prompt in prompts:
            llm.add_request(f"first {next(NUMBERS)}", prompt, params)
        while llm.has_unfinished_requests():
            llm.step()
        return time.perf_counter() - began


class Traffic(NamedTuple):
    """What serving the requests of `traffic` took.

    Attributes:
        seconds: of all.
        first_token: seconds from when a request came to its first token, the median.
        longest_step: seconds.
        texts: of each request.
    """

    seconds: float
    first_token: float
    longest_step: float
    texts: list[list[int]]


def traffic_prompts() -> list[list[int]]:
    """Of four prompts one begins as others do, and one says the same again and again."""
    import numpy as np

    rng = np.random.default_rng(11)
    (shared,) = prompts_of([TRAFFIC_SHARED])
    prompts = []
    for i, length in enumerate(rng.integers(*TRAFFIC_LENGTHS, TRAFFIC_REQUESTS)):
        prompt = rng.integers(2, VOCABULARY, length).tolist()
        prompts.append([shared + prompt, prompt, (prompt[:20] * length)[:length], prompt][i % 4])
    return prompts


def traffic(engine: Any, core: int | None) -> Traffic:
    """Serve requests of which a few come with each step, from an empty prefix cache on."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm, waiting = engine.llm_engine, [*enumerate(traffic_prompts())][::-1]
    params = SamplingParams(
        temperature=0, max_tokens=TRAFFIC_NEW_TOKENS, ignore_eos=True, detokenize=False,
        output_kind=RequestOutputKind.CUMULATIVE,
    )  # fmt: skip
    assert llm.reset_prefix_cache()
    came: dict[str, float] = {}
    first: dict[str, float] = {}
    texts: dict[str, list[int]] = {}
    steps, run = [], next(NUMBERS)
    with on_core(core):
        began = time.perf_counter()
        while waiting or llm.has_unfinished_requests():
            for _ in range(min(TRAFFIC_A_STEP, len(waiting))):
                number, prompt = waiting.pop()
                name = f"traffic {run} {number:04}"
                came[name] = time.perf_counter()
                llm.add_request(name, {"type": "token", "prompt_token_ids": prompt}, params)
            start = time.perf_counter()
            answers = llm.step()
            now = time.perf_counter()
            steps.append(now - start)
            for answer in answers:
                if answer.outputs[0].token_ids:
                    first.setdefault(answer.request_id, now - came[answer.request_id])
                    texts[answer.request_id] = list(answer.outputs[0].token_ids)
        seconds = time.perf_counter() - began
    return Traffic(seconds, statistics.median(first.values()), max(steps), [texts[name] for name in sorted(texts)])


@contextlib.contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """Run on one core of the machine; None: where it is."""
    if core is None:
        yield
        return
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, CORES)


class Served:
    """What this process is decoding."""

    steps: Iterator[float] = iter(())


def serve_requests(engine: Any, requests: int, new: int) -> bool:
    """Begin with requests, until all have their first token."""
    Served.steps = decoding(engine, requests, new)
    next(Served.steps)
    return True


def block(engine: Any, core: int | None) -> Block:
    """A few steps on a core of the machine. The first is not counted: caches hold what ran before."""
    with on_core(core):
        loop = loop_us()
        next(Served.steps)
        ends = [time.perf_counter(), *itertools.islice(Served.steps, BLOCK_STEPS)]
        return Block(statistics.median(b - a for a, b in itertools.pairwise(ends)), max(loop, loop_us()))


def end_requests(engine: Any) -> bool:
    """Serve what is left."""
    for _ in Served.steps:
        pass
    return True


CORES = os.sched_getaffinity(0)


def fastest_cores(count: int) -> list[int]:
    """The cores on which a piece of Python takes the least time now."""
    times = {}
    for core in CORES:
        with on_core(core):
            times[core] = loop_us(7)
    return sorted(times, key=times.__getitem__)[:count]


def undisturbed_cores(count: int) -> list[int]:
    """The fastest cores, each found while those before it are busy: two that share a physical core slow each other."""
    cores = fastest_cores(1)
    with contextlib.ExitStack() as busy:
        for _ in range(count - 1):
            busy.enter_context(busy_core(cores[-1]))
            cores += [core for core in fastest_cores(len(cores) + 1) if core not in cores][:1]
    return cores


@contextlib.contextmanager
def busy_core(core: int) -> Iterator[int]:
    """A process that does nothing else than to run on a core; gives its id."""
    program = f"import os\nos.sched_setaffinity(0, [{core}])\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-S", "-c", program], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout
            process.stdout.readline()
            yield process.pid
        finally:
            process.kill()


def kernels(engine: Any, requests: int) -> list[tuple[str, float]]:
    """Microseconds of a decode step in which the GPU is busy, by kernel, the longest first; see `alone_of`."""
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
    times = alone_of(
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    )
    return sorted(((name, us / PROFILED_STEPS) for name, us in times.items()), key=lambda named: -named[1])


def alone_of(launches: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """The time of launches (name, start, end) by name. What overlaps counts once, for the one that began first."""
    times: dict[str, float] = {}
    reached = -math.inf
    for name, start, end in sorted(launches, key=lambda launch: launch[1:]):
        times[name] = times.get(name, 0) + max(end - max(start, reached), 0)
        reached = max(reached, end)
    return times


QUESTIONS = {
    "continuations": continuations, "prompt_logprobs": prompt_logprobs, "kernels": kernels,
    "first_tokens": first_tokens, "serve_requests": serve_requests, "block": block, "end_requests": end_requests,
    "traffic": traffic,
}  # fmt: skip


# --- the measuring process ------------------------------------------------------------------------------------


def answer_of(pipe: Connection, seconds: float) -> Any:
    """What comes out of a pipe within so many seconds; None: nothing did."""
    return pipe.recv() if pipe.poll(max(seconds, 0)) else None


class Engine:
    """An engine in its process.

    Attributes:
        until: when no answer is waited for any more, of all engines; `time.monotonic`'s.
        seconds: that starting it took; None: not yet.
        group: of its processes.
    """

    until: ClassVar[float] = math.inf

    def __init__(self, folder: Path, setting: Setting, variant: str, tensor_parallel: int) -> None:
        self.name = f"{setting}, {variant}"
        self.seconds: float | None = None
        self._log = folder / f"{setting} {variant} {tensor_parallel}.log".replace(" ", "_")
        self.pipe, theirs = multiprocessing.get_context("spawn").Pipe()
        place = {"ours": setting.place, "stock": "", "float32": "off", "alike": "custom"}[variant]
        # no process of its own for the scheduler: that would decode on while the other engine is being timed
        own = {"CUPY_MLA_VLLM": place, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        own["VLLM_STAND_INS"] = "1" if setting.stands_in else "0"
        if variant == "alike":
            own |= {"CUPY_MLA_KERNELS": ALIKE, "VLLM_FLOAT32_SUMS": "1"}
        self.process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(theirs, str(self._log), setting, variant, str(folder / setting.model), tensor_parallel)
        )
        with environment_of(own):
            self.process.start()
        assert self.process.pid
        self.group = self.process.pid
        theirs.close()

    def ask(self, *question: Any) -> Any:
        self.send(*question)
        return self.answer()

    def send(self, *question: Any) -> None:
        self.pipe.send(question)

    def answer(self) -> Any:
        """What it says to the last question.

        Raises:
            RuntimeError: it failed, or says nothing for PATIENCE seconds or until `until`.
        """
        answer = answer_of(self.pipe, min(PATIENCE, self.until - time.monotonic()))
        if answer is None:
            raise RuntimeError(self.last_lines())
        return answer

    def pin(self, cores: list[int]) -> None:
        """Run the main thread of each of its processes on a core of its own; there are as many cores as processes."""
        group = [int(path.name) for path in Path("/proc").glob("[0-9]*") if is_of_group(int(path.name), self.group)]
        workers = [pid for pid in sorted(group) if b"Worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        for pid, core in zip([self.group, *workers], cores, strict=True):
            os.sched_setaffinity(pid, {core})

    def pause(self, now: bool) -> None:
        """Stop the processes where they stand, or let them go on."""
        os.killpg(self.group, signal.SIGSTOP if now else signal.SIGCONT)

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # none is left, or it has not begun
            os.killpg(self.group, signal.SIGKILL)
        self.process.kill()

    def last_lines(self, count: int = 12) -> str:
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return "\n".join([f"--- {self.name}", *(line[:230] for line in lines[-count:])])


def is_of_group(pid: int, group: int) -> bool:
    try:
        return os.getpgid(pid) == group
    except ProcessLookupError:
        return False


@contextlib.contextmanager
def environment_of(variables: dict[str, str]) -> Iterator[None]:
    """These variables for processes that are started meanwhile."""
    before = dict(os.environ)
    os.environ |= variables
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before


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
        engine.kill()
    return [engine for engine in engines if engine.seconds is not None]


def stop(engines: list[Engine], seconds: float = 8) -> None:
    """End the processes, and those that they started."""
    for engine in engines:
        with contextlib.suppress(OSError):
            engine.pipe.send(None)
    end = time.monotonic() + seconds
    for engine in engines:
        engine.process.join(max(end - time.monotonic(), 0))
        engine.kill()


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


def compare(
    ours: Engine, stock: Engine, prompts: int = len(PROMPTS), new_tokens: int = NEW_TOKENS, alone: bool = False
) -> dict[str, Any]:
    """How many tokens agree under the same text, and how near the two best tokens were where they do not.

    Args:
        ours, stock: continue texts; tests have stand-ins for them.
        prompts: how many the engines have.
        new_tokens: how many tokens they add to each.
        alone: whether `ours` serves each text by itself.
    """
    texts: dict[int, list[int]] = {i: [] for i in range(prompts)}
    wanted = stock.ask("continuations", texts, False)
    apart, gaps, parted = 0, [0.0], set()
    while texts:
        for i, found in ours.ask("continuations", texts, alone).items():
            at = len(texts.pop(i))
            for (token, gap), (expected, its_gap) in zip(found, wanted[i][at:], strict=True):
                at += 1
                if token != expected:
                    apart += 1
                    gaps.append(max(gap, its_gap))
                    parted.add(i)
                    if at < new_tokens:
                        texts[i] = [token for token, _ in wanted[i][:at]]
                    break
    tokens = new_tokens * prompts
    return {
        "tokens_equal": tokens - apart, "tokens": tokens, "gap_apart": round(max(gaps), 4),
        "texts_equal": prompts - len(parted),
    }  # fmt: skip


def logprob_errors(
    ours: list[list[float]], stock: list[list[float]], exact: list[list[float]], topk: int
) -> dict[str, float]:
    """Mean distances from the exact log-probabilities, and the standard error of their difference."""
    mine, theirs = ([[abs(a - b) for a, b in zip(*pair, strict=True)] for pair in zip(of, exact, strict=True)]
                    for of in (ours, stock))  # fmt: skip
    found = {}
    for part, end in (("", None), ("_within_topk", topk)):
        a, b = (list(itertools.chain(*(prompt[:end] for prompt in of))) for of in (mine, theirs))
        noise = statistics.stdev(x - y for x, y in zip(a, b, strict=True)) / math.sqrt(len(a))
        found[f"logprob_error{part}_ours"] = round(statistics.fmean(a), 6)
        found[f"logprob_error{part}_stock"] = round(statistics.fmean(b), 6)
        found[f"logprob_error{part}_noise"] = round(noise, 6)
    return found


def compare_results(setting: Setting, engines: dict[str, Engine], rows: list[Row]) -> None:
    """Add a setting's row: tokens and log-probabilities where they can be compared."""
    ours, stock = engines["ours"], engines["stock"]
    row: Row = {"setting": str(setting), "start_s_ours": ours.seconds, "start_s_stock": stock.seconds}
    if setting.compared:
        row |= compare(ours, stock)
        for variant in ("ours", "stock") if setting.of_v4 else ():
            same = compare(engines[variant], engines[variant], alone=True)
            row[f"tokens_equal_alone_{variant}"] = same["tokens_equal"]
            row[f"gap_apart_alone_{variant}"] = same["gap_apart"]
        for variant in ("ours", "stock", "alike"):
            if {variant, f"{variant} on one GPU"} <= engines.keys():
                same = compare(engines[variant], engines[f"{variant} on one GPU"])
                row[f"tokens_equal_one_gpu_{variant}"] = same["tokens_equal"]
                row[f"gap_apart_one_gpu_{variant}"] = same["gap_apart"]
    if setting.compared and "float32" in engines:
        for variant in VARIANTS:
            engines[variant].send("prompt_logprobs")
        found = {variant: engines[variant].answer() for variant in VARIANTS}
        row |= logprob_errors(found["ours"], found["stock"], found["float32"], setting.topk)
    rows.append(row)


def compare_speeds(setting: Setting, engines: dict[str, Engine], deadline: float, gpus: int, rows: list[Row]) -> None:
    """A setting's row becomes one for each number of requests, without those whose turn comes too late."""
    (row,) = rows
    rows.clear()
    for requests in REQUESTS:
        if time.monotonic() < deadline:
            name = f"{setting}, {requests} request{'s'[: requests > 1]}"
            rows.append({**row, "setting": name, **compare_speed(engines, requests, gpus)})


def ask_alone(engine: Engine, *question: Any) -> Any:
    """Ask a paused engine, and pause it again: where there are several, its processes wait in a busy loop."""
    engine.pause(False)
    try:
        return engine.ask(*question)
    finally:
        time.sleep(SETTLED)
        engine.pause(True)


def compare_speed(pair: dict[str, Engine], requests: int, gpus: int) -> Row:
    """Tokens a second of so many requests, ours and stock in turn."""
    for engine in pair.values():
        engine.ask("first_tokens", requests, SPEED_PROMPT, None)
    ask: Callable[..., Any] = Engine.ask
    pairs = PAIRS
    if gpus > 1:
        ask, pairs = ask_alone, SEVERAL_PAIRS
        time.sleep(SETTLED)
        for engine in pair.values():
            engine.pause(True)
    firsts: dict[str, list[float]] = {name: [] for name in pair}
    for turn in range(FIRST_TOKENS[requests]):
        core = choose_cores(pair, gpus)
        for name in reversed(pair) if turn % 2 else pair:
            firsts[name].append(ask(pair[name], "first_tokens", requests, SPEED_PROMPT - 1 - turn, core))
    tokens = 8 + (pairs + 1) * (BLOCK_STEPS + 1) + PREFILL_STEPS
    for engine in pair.values():
        ask(engine, "serve_requests", requests, tokens)
    blocks: dict[str, list[Block]] = {name: [] for name in pair}
    for turn in range(pairs):
        if turn % PAIRS_A_CORE == 0:
            core = choose_cores(pair, gpus)
        for name in reversed(pair) if turn % 2 else pair:
            blocks[name].append(ask(pair[name], "block", core))
    for engine in pair.values():
        ask(engine, "end_requests")
        engine.pause(False)
    medians = {f"first_tokens_ms_{name}": round(1e3 * statistics.median(times), 1) for name, times in firsts.items()}
    return speeds(requests, blocks) | medians


def choose_cores(pair: dict[str, Engine], gpus: int) -> int | None:
    """The core on which an engine of one GPU shall run; None where each of an engine's processes got one of its own."""
    if gpus == 1:
        return fastest_cores(1)[0]
    cores = undisturbed_cores(1 + gpus)
    for engine in pair.values():
        engine.pin(cores)
    return None


def speeds(requests: int, blocks: dict[str, list[Block]]) -> Row:
    """A row's fields of blocks in turn."""
    loops = [max(block.loop_us for block in pair) for pair in zip(*blocks.values(), strict=True)]
    quiet = sorted(range(len(loops)), key=loops.__getitem__)[: -(-len(loops) // QUIETEST)]
    row = {}
    for name, of in blocks.items():
        steps = [block.step for block in of]
        row |= {
            f"tokens_per_s_{name}": round(requests / statistics.median(steps[i] for i in quiet), 1),
            f"tokens_per_s_{name}_low": round(requests / max(steps), 1),
            f"tokens_per_s_{name}_high": round(requests / min(steps), 1),
            f"loop_us_{name}": round(statistics.median(of[i].loop_us for i in quiet), 1),
        }
    ratios = [stock.step / ours.step for ours, stock in zip(blocks["ours"], blocks["stock"], strict=True)]
    tenths = statistics.quantiles(ratios, n=10)
    noise = 1.253 * (tenths[-1] - tenths[0]) / 2.563 / math.sqrt(len(ratios))  # of the median of a normal distribution
    return row | {
        "tokens_per_s_ratio": round(statistics.median(ratios), 4),
        "tokens_per_s_ratio_noise": round(noise, 4),
    }


def compare_traffic(pair: dict[str, Engine], rows: list[Row]) -> None:
    """Add to a setting's row what traffic took, ours and stock in turn."""
    (row,) = rows
    served: dict[str, list[Traffic]] = {name: [] for name in pair}
    for turn in range(TRAFFIC_ROUNDS):
        for name in reversed(pair) if turn % 2 else pair:
            served[name].append(pair[name].ask("traffic", fastest_cores(1)[0]))
    row |= traffic_fields(served)


def traffic_fields(served: dict[str, list[Traffic]]) -> Row:
    """A row's fields of rounds of traffic, ours and stock's."""
    row: Row = {"traffic_requests": len(served["ours"][0].texts)}
    for name, rounds in served.items():
        tokens = sum(map(len, rounds[0].texts))
        row[f"traffic_tokens_per_s_{name}"] = round(tokens / statistics.median(one.seconds for one in rounds), 1)
        row[f"traffic_first_token_ms_{name}"] = round(1e3 * statistics.median(one.first_token for one in rounds), 1)
        row[f"longest_step_ms_{name}"] = round(1e3 * max(one.longest_step for one in rounds), 1)
        texts = zip(*(one.texts for one in rounds), strict=True)
        row[f"texts_equal_thrice_{name}"] = sum(all(text == others[0] for text in others) for others in texts)
    ours, stock = (served[name][0].texts for name in ("ours", "stock"))
    return row | {"traffic_texts_equal": sum(a == b for a, b in zip(ours, stock, strict=True))}


def compare_kernels(engines: dict[str, Engine], requests: int, heading: str, file: Path) -> dict[str, float]:
    """The GPU's time of a decode step; each kernel's goes into the file."""
    row = {}
    for name in ("ours", "stock"):
        found = engines[name].ask("kernels", requests)
        if found:  # a profiler that several engines ask for at a time may see nothing
            row[f"gpu_us_{name}"] = round(sum(us for _, us in found), 1)
        lines = [f"{us:9.1f} {kernel[:100]}" for kernel, us in found[:40]]
        with file.open("a") as log:
            log.write("\n".join([f"--- {heading}, {name}", *lines, ""]))
    return row


def profile_kernels(engines: dict[str, Engine], deadline: float, file: Path, rows: list[Row]) -> None:
    """Add the GPU's time to a setting's rows. Last, as a profiler that was on once costs host time."""
    for requests, row in zip(REQUESTS, rows, strict=False):
        if time.monotonic() < deadline:
            row |= compare_kernels(engines, requests, row["setting"], file)


def shown(row: dict[str, Any]) -> str:
    """A short line of ours:stock for whoever looks at the run."""
    parts = [row["setting"]]
    if "tokens" in row:
        parts.append(f"equal {row['tokens_equal']}/{row['tokens']} gap {row['gap_apart']}")
    parts += [
        f"{name.removeprefix('tokens_equal_')} {row[name]}" for name in row if "one_gpu" in name or "alone" in name
    ]
    for name, short in (
        ("logprob_error", "logp"), ("logprob_error_within_topk", "within topk"), ("tokens_per_s", "t/s"),
        ("loop_us", "loop"), ("first_tokens_ms", "first"), ("gpu_us", "gpu"), ("start_s", "start"),
        ("traffic_tokens_per_s", "traffic t/s"), ("traffic_first_token_ms", "first token"),
        ("longest_step_ms", "longest step"), ("texts_equal_thrice", "texts thrice"),
    ):  # fmt: skip
        if f"{name}_ours" in row:
            parts.append(f"{short} {row[f'{name}_ours']}:{row[f'{name}_stock']}")
    if "tokens_per_s_ratio" in row:
        parts.append(f"ratio {row['tokens_per_s_ratio']} +- {row['tokens_per_s_ratio_noise']}")
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
    more = "float32_sums = vllm_float32_sums:register\nstand_ins = vllm_stand_ins:register"
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]{points}\n{more}\n")
    paths = [str(ROOT), str(ROOT / "benchmarks"), str(info.parent), os.environ["PYTHONPATH"]]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    sys.path.extend(paths[1:])  # vLLM's packages after the machine's own
    os.environ["OMP_NUM_THREADS"] = "2"  # many engines start at the same time
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    # Collectives of several GPUs go through NCCL, without NVLink multicast and symmetric memory.
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
    os.environ |= {f"VLLM_USE_DIRECT_DCP_{part}": "0" for part in ("A2A", "KV_GATHER", "Q_GATHER")}


def restore_caches(pack: Path) -> None:
    """What compilers and vLLM made elsewhere, if the pack has it (a minute less to start); where they are kept.

    Caches that are there already stay: other programs may be reading them.
    """
    folder = Path(os.environ["ENGINE_CACHES"])
    folder.mkdir(parents=True, exist_ok=True)
    if (pack / "caches.tar.xz").exists() and not any(folder.iterdir()):
        shutil.unpack_archive(pack / "caches.tar.xz", folder)
    names = {
        "CUPY_CACHE_DIR": "cupy", "TRITON_CACHE_DIR": "triton", "DG_JIT_CACHE_DIR": "deep_gemm",
        "VLLM_CACHE_ROOT": "vllm",  # what it knows of a model's class: else a second process imports vLLM to look
    }  # fmt: skip
    os.environ |= {name: str(folder / value) for name, value in names.items()}


def keep(out: Path, here: Path, caches: bool) -> None:
    """The caches, if wanted, and one archive of the engines' logs, which are here."""
    folder = Path(os.environ["ENGINE_CACHES"])
    if caches:
        shutil.rmtree(folder / "vllm" / "torch_compile_cache", ignore_errors=True)  # of models in this run's own folder
        shutil.make_archive(str(out / "caches"), "xztar", folder)
    logs = here / "logs"
    logs.mkdir()
    for log in (*here.glob("*.log"), *here.glob("kernels.txt")):
        shutil.copy(log, logs)
    shutil.make_archive(str(out / "logs"), "xztar", logs)


def write_model(tiny: Any, folder: Path, setting: Setting) -> None:
    """A setting's model: a checkpoint, or of V4 and V4.1 its configuration alone, whose weights vLLM makes up.

    Args:
        tiny: the pack's module that writes DeepSeek-V3.2.
    """
    if setting.of_v4:
        folder.mkdir()
        config = v4_config(setting) if setting.family == "V4" else v41_config(setting)
        (folder / "config.json").write_text(json.dumps(config))
        return
    tiny.write(folder, heads=setting.heads, topk=setting.topk or 512, layers=setting.layers)
    if setting.family == "V3":
        from safetensors.torch import load_file, save_file  # type: ignore[import-not-found]

        config = json.loads((folder / "config.json").read_text())
        kept = {name: value for name, value in config.items() if not name.startswith("index_")}
        kept |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
        (folder / "config.json").write_text(json.dumps(kept))
        weights = load_file(folder / "model.safetensors")
        weights = {name: weight for name, weight in weights.items() if ".indexer." not in name}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def v41_config(setting: Setting) -> dict[str, Any]:
    """Of a DeepSeek-V4.1 without images and n-gram tables; as `v4_config`.

    A layer with a sliding window, then two groups that share compressed rows, of two tokens each and of one. In the
    second group one layer leaves candidate blocks, and a later one chooses among them.
    """
    text = {
        "model_type": "deepseek_v41", "vocab_size": VOCABULARY, "hidden_size": 512, "moe_intermediate_size": 256,
        "q_lora_rank": 256, "num_hidden_layers": setting.layers, "num_attention_heads": setting.heads,
        "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "o_groups": 8, "o_lora_rank": 256,
        "sliding_window": V4_WINDOW, "compress_ratios": [0, *[2] * 2, *[1] * (setting.layers - 3)],
        "kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 3, 5], "candidate_source_layer_id": 3,
        "candidate_topk_blocks": V41_CANDIDATES, "candidate_block_size": 8, "index_n_heads": 32, "index_head_dim": 128,
        "index_topk": setting.topk, "max_position_embeddings": 16384, "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu", "hc_mult": 4,
        "hc_sinkhorn_iters": 2, "hc_eps": 1e-6, "num_experts_per_tok": 2, "n_routed_experts": 8, "n_shared_experts": 1,
        "norm_topk_prob": True, "scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.0, "swiglu_limit": 10.0,
        "topk_method": "noaux_tc", "expert_dtype": "bf16", "num_nextn_predict_layers": 0,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 1024, "beta_fast": 32,
            "beta_slow": 1,
        },
    }  # fmt: skip
    return {
        "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "dtype": "bfloat16",
        "bos_token_id": 0, "eos_token_id": 1, "text_config": text,
    }  # fmt: skip


def v4_config(setting: Setting) -> dict[str, Any]:
    """Of a DeepSeek-V4 whose layers have the widths that kernels see; the rest is small."""
    kinds = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
    return {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "dtype": "bfloat16",
        "vocab_size": VOCABULARY, "hidden_size": 512, "moe_intermediate_size": 256, "q_lora_rank": 256,
        "num_hidden_layers": setting.layers, "num_attention_heads": setting.heads, "num_key_value_heads": 1,
        "head_dim": 512, "o_groups": 8, "o_lora_rank": 256, "sliding_window": V4_WINDOW,
        "layer_types": [kinds[i % len(kinds)] for i in range(setting.layers)],
        "mlp_layer_types": ["hash_moe"] + ["moe"] * (setting.layers - 1), "num_experts_per_tok": 2,
        "n_routed_experts": 8, "n_shared_experts": 1, "topk_method": "noaux_tc", "hc_sinkhorn_iters": 2,
        "index_n_heads": 64, "index_topk": setting.topk, "max_position_embeddings": 16384, "expert_dtype": "bf16",
        "num_nextn_predict_layers": 0, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip


def measure_all(
    engines: dict[tuple[Setting, str], Engine],
    deadline: float,
    gpus: int,
    profiles: Path | None,
    rows: dict[Setting, list[Row]],
) -> None:
    """Fill in the rows of each setting: results of all at once, then decode, one by one, then the GPU's time.

    A setting whose results fail has no rows, and is asked nothing more: answers may be left in its engines' pipes.

    Args:
        profiles: file for the kernels of decode steps; None: they are not timed.
    """
    of: dict[Setting, dict[str, Engine]] = {}
    for (setting, variant), engine in engines.items():
        of.setdefault(setting, {})[variant] = engine

    def attempt(part: Callable[..., None], setting: Setting, *arguments: Any) -> None:
        if time.monotonic() > deadline:
            print(f"left out: {part.__name__} of {setting}", flush=True)
            return
        try:
            part(*arguments, rows=rows[setting])
        except (RuntimeError, EOFError, OSError) as error:
            print(error, *(e.last_lines() for e in of[setting].values()), sep="\n", flush=True)

    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda s: attempt(compare_results, s, s, of[s]), rows))
    print(f"{deadline - time.monotonic():.0f} s left behind the results", flush=True)
    for setting in rows:
        pair = {name: of[setting][name] for name in ("ours", "stock")}
        if rows[setting] and (setting.speed or setting.traffic):
            with alone(list(engines.values()), list(pair.values())):
                if setting.traffic:
                    attempt(compare_traffic, setting, pair)
                else:
                    attempt(compare_speeds, setting, setting, pair, deadline, gpus)
        print(*map(shown, rows[setting]), sep="\n", flush=True)
    print(f"{deadline - time.monotonic():.0f} s left behind decode", flush=True)
    for setting in rows if profiles is not None else ():
        pair = {name: of[setting][name] for name in ("ours", "stock")}
        if setting.speed and rows[setting]:
            with alone(list(engines.values()), list(pair.values())):
                attempt(profile_kernels, setting, pair, deadline, profiles)
            print(*(f"{row['setting']} | gpu {row.get('gpu_us_ours')}:{row.get('gpu_us_stock')}"
                    for row in rows[setting]), sep="\n", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path, nargs="?", help="the folder that get_vllm_new.sh made")
    parser.add_argument("--merge", type=Path, nargs="+", help="measure nothing: one record of those in these folders")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that an engine is divided over")
    parser.add_argument("--limit", type=float, default=130, help="seconds after which nothing more is begun")
    parser.add_argument("--only", nargs="+", default=[""], help="settings whose name contains one of these")
    parser.add_argument("--without", nargs="+", default=[], help="settings whose name contains none of these")
    parser.add_argument("--kernels-only", action="store_true", help="compile our kernels, and measure nothing")
    parser.add_argument("--kernels-there", action="store_true", help="compile none: an earlier run did")
    options = parser.parse_args()
    out = Path(os.environ.get("OUT", ROOT / "benchmarks" / "results"))
    if options.merge:
        merge(out, options.merge)
        return
    if options.pack is None:
        parser.error("a pack, or --merge")
    deadline = time.monotonic() + options.limit
    Engine.until = deadline + GRACE
    folder = Path(tempfile.mkdtemp(prefix="vllm_engine"))
    os.environ.setdefault("ENGINE_CACHES", str(folder / "caches"))
    restore_caches(options.pack)
    prepare(options.pack, folder)
    print(f"unpacked after {time.monotonic() - deadline + options.limit:.0f} s", flush=True)
    sys.path.insert(0, str(options.pack.resolve()))
    import tiny_v32  # type: ignore[import-not-found]

    several = options.tensor_parallel > 1
    settings = chosen_settings(options.only, options.tensor_parallel, options.without)
    layers = {of for s in settings for gpus in {1, options.tensor_parallel} for of in layers_of(s, gpus)}
    if not options.kernels_there:
        maker = multiprocessing.get_context("spawn").Process(target=make_kernels, args=(sorted(layers, key=repr),))
        maker.start()
        maker.join()
        print(f"kernels are there after {time.monotonic() - deadline + options.limit:.0f} s", flush=True)
        if maker.exitcode:
            raise SystemExit("the kernels could not be compiled")
    if options.kernels_only:
        return

    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda s: write_model(tiny_v32, folder / s.model, s), {s.model: s for s in settings}.values()))
    since = f"{time.monotonic() - deadline + options.limit:.0f} s"
    print(f"models written after {since}", flush=True)
    engines: dict[tuple[Setting, str], Engine] = {}
    for setting in settings:
        for variant in VARIANTS:
            if variant != "float32" or (setting.has_exact and not several):
                engines[setting, variant] = Engine(folder, setting, variant, options.tensor_parallel)
            if variant != "float32" and several and setting.compared:
                engines[setting, f"{variant} on one GPU"] = Engine(folder, setting, variant, 1)
        if several and setting.compared and setting.cache == "auto" and setting.sharing == 1:
            engines[setting, "alike"] = Engine(folder, setting, "alike", options.tensor_parallel)
            engines[setting, "alike on one GPU"] = Engine(folder, setting, "alike", 1)
    up = set(started(list(engines.values()), deadline - MEASURING))
    print(
        f"{len(up)} of {len(engines)} engines up after {time.monotonic() - deadline + options.limit:.0f} s", flush=True
    )
    there = {key: engine for key, engine in engines.items() if engine in up}
    rows: dict[Setting, list[Row]] = {s: [] for s in settings if {(s, "ours"), (s, "stock")} <= there.keys()}
    try:
        measure_all(there, deadline, options.tensor_parallel, None if several else folder / "kernels.txt", rows)
    finally:
        stop(list(engines.values()))
    write(out, version("vllm"), options.tensor_parallel, [row for of in rows.values() for row in of])
    if "OUT" in os.environ:
        keep(out, folder, caches=not options.kernels_there)
    print(f"done after {time.monotonic() - deadline + options.limit:.0f} s", flush=True)


def write(out: Path, of_vllm: str, tensor_parallel: int, rows: list[Row]) -> None:
    """`vllm.json`: these rows and those of the record of other tensor parallelism, each with version and commit.

    `notes` of the record, by commit, stay with their rows.
    """
    from harness import environment

    head = environment()
    common = {"version": of_vllm, "tensor_parallel": tensor_parallel}
    rows = [{**common, **row, "commit": head["commit"]} for row in rows]
    write_record(out, head, rows, lambda row: bool(row["tensor_parallel"] == tensor_parallel))


def write_record(out: Path, head: Row, rows: list[Row], replaced: Callable[[Row], bool]) -> None:
    """The record's rows but for those that are replaced, then these."""
    from harness import RESULTS

    record = RESULTS / "vllm.json"
    before = json.loads(record.read_text()) if record.exists() else {"rows": []}
    rows = [row for row in before["rows"] if not replaced(row)] + rows
    commits = {row["commit"] for row in rows}
    notes = {commit: note for commit, note in before.get("notes", {}).items() if commit in commits}
    (out / "vllm.json").write_text(json.dumps({**head, "notes": notes, "rows": rows}, indent=1) + "\n")


def setting_of(row: Row) -> tuple[int, str]:
    """GPUs and setting that a row is of; rows of several numbers of requests are of one."""
    return row["tensor_parallel"], row["setting"].partition(", ")[0]


def merge(out: Path, folders: Sequence[Path]) -> None:
    """`vllm.json` of runs at one commit, whose own are in these folders; of a setting measured twice the last counts.

    Settings that no run measured keep the record's rows.
    """
    parts = [json.loads((folder / "vllm.json").read_text()) for folder in folders]
    commits = {part["commit"] for part in parts}
    if len(commits) > 1:
        raise SystemExit(f"--merge: runs of several commits, {', '.join(sorted(commits))}")
    found: dict[tuple[int, str], list[Row]] = {}
    for part in parts:
        measured = [row for row in part["rows"] if row["commit"] in commits]  # others are the record's of before
        found |= {setting: list(rows) for setting, rows in itertools.groupby(measured, setting_of)}
    names = [str(setting) for setting in SETTINGS]
    order = sorted(found, key=lambda setting: (setting[0], names.index(setting[1])))
    head = {name: value for name, value in parts[-1].items() if name not in ("notes", "rows")}
    write_record(out, head, [row for setting in order for row in found[setting]], lambda row: setting_of(row) in found)


if __name__ == "__main__":
    main()
