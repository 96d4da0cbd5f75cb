"""No function of the package has more than eight parameters, but where another project's signature asks for them. Twins
take nothing that they ignore."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import cupy_mla

PACKAGE = Path(cupy_mla.__file__).parent
MOST_PARAMETERS = 8
# Functions that may have more, and why.
MORE = {
    "ops.compressed.write_c128a_topk_metadata": "the parameters of the public function that it stands behind",
    "ops.compressed.write_compressed_slot_mapping": "the parameters of the public function that it stands behind",
    "ops.indices.convert_to_front": "the parameters of the public function that it stands beside, and results",
    "backends.indexer.IndexerImpl.forward": "the engine's arguments, and by keyword what V4.1's and GLM's layers add",
    "backends.sparse_mla.SparseMLAImpl.forward_mqa": "the engine's arguments, and by keyword what kinds of layers add",
    "integrations.training.sparse_indexer_loss": "the parameters of the public functions that it calls",
    "integrations.training.warmup_loss": "the parameters of the public functions that it calls",
    "integrations.training.SparseMLATraining.forward": "the parameters of the public functions that it calls",
    "integrations.megatron.run_fused_qk_topk_with_loss": "Megatron-Core's signature",
    "integrations.megatron.run_fused_dsa_attention": "Megatron-Core's signature",
    "integrations.sglang.attention.forward_flashmla_kv": "SGLang's signature",
    "integrations.sglang.deepseek_v4.flash_mla_with_kvcache": "FlashMLA's signature, as SGLang calls it",
    "integrations.sglang.indexer.get_topk_ragged": "SGLang's signature",
    "integrations.vllm.fused.fused_norm_rope": "vLLM's signature",
    "integrations.vllm.fused.fused_q": "vLLM's signature",
    "integrations.vllm.indexer.sparse_attn_indexer": "vLLM's signature",
    "integrations.vllm.sparse_mla.CupyMLASparseBackend.supports_combination": "vLLM's signature",
}


def parameters(tree: ast.AST, name: str) -> Iterator[tuple[str, int]]:
    """The functions of a module by their full names, and how many parameters each has, without `self`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from parameters(node, f"{name}.{node.name}")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            of = node.args
            names = [a.arg for a in (*of.posonlyargs, *of.args, *of.kwonlyargs)]
            yield f"{name}.{node.name}", len(names) - (names[:1] in (["self"], ["cls"]))
            yield from parameters(node, name)
        else:
            yield from parameters(node, name)


def is_public(function: str) -> bool:
    """Whether it is a public name of the package or of a front door, which have the peers' signatures."""
    module, _, name = function.rpartition(".")
    floor = module.partition(".")[0]
    return (floor == "ops" and name in cupy_mla.__all__) or (
        module in ("flash_mla", "deep_gemm") and name in getattr(cupy_mla, module).__all__
    )


def test_functions_have_few_parameters() -> None:
    found: dict[str, int] = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found |= parameters(ast.parse(path.read_text()), name)
    assert len(found) > 900
    many = {name for name, count in found.items() if count > MOST_PARAMETERS and not is_public(name)}
    assert many - MORE.keys() == set()
    assert MORE.keys() - many == set(), "need no exception"


def unused(function: ast.FunctionDef) -> set[str]:
    """The parameters that a function's body does not name."""
    of = function.args
    named = {node.id for line in function.body for node in ast.walk(line) if isinstance(node, ast.Name)}
    return {a.arg for a in (*of.posonlyargs, *of.args, *of.kwonlyargs)} - named


def test_twins_use_what_they_take() -> None:
    """But for the GPU, which all launchers take."""
    found = {}
    for floor in ("reference", "cuda"):
        for path in (PACKAGE / floor).glob("*.py"):
            functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
            found |= {f"{floor}.{path.stem}.{function.name}": unused(function) - {"gpu"} for function in functions}
    assert len(found) > 100
    assert {name for name, names in found.items() if names} == set()


def test_unused_parameters_are_found() -> None:
    (function,) = ast.parse("def f(a, b, *, c=1): return a + (lambda: c)()").body
    assert isinstance(function, ast.FunctionDef)
    assert unused(function) == {"b"}


def test_parameters_are_counted() -> None:
    text = "class A:\n  def f(self, a, /, b, *c, d=1, **e):\n    def g(a): pass\nif True:\n  def h(): pass\n"
    assert dict(parameters(ast.parse(text), "m")) == {"m.A.f": 3, "m.A.g": 1, "m.h": 0}
