"""The documentation as a site, by Sphinx: python -m sphinx -W -c docs . docs/site

Its root is that of the repository, so that a link between two pages, or to a file, is the same here and there. It needs
no network: formulas are MathML, which browsers set, and a source file that a page links is a page.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.addnodes import download_reference
from sphinx.application import Sphinx

from cupy_mla import __version__

ROOT = Path(__file__).parent.parent

project = "cupy_mla"
release = __version__
html_title = f"cupy_mla {release}"
html_theme = "furo"
html_copy_source = False
html_extra_path = ["index.html"]  # leads to the README
root_doc = "docs/contents"
include_patterns = ["*.md", "benchmarks/results/README.md", "benchmarks/log/*.md", "docs/**"]
exclude_patterns = ["docs/site"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_math_renderer = "mathml"
default_role = "code"
smartquotes = False
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

autodoc_mock_imports = ["torch", "transformers"]
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_rtype = False


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (set_in_line, None), (set_apart, None))
    app.connect("builder-inited", lambda app: vars(app.env).setdefault("linked_sources", {}))
    app.connect("doctree-read", link_pages_of_sources, priority=400)  # before Sphinx collects what is downloaded
    app.connect("html-collect-pages", pages_of_sources)


def set_in_line(writer: Any, node: nodes.math) -> None:
    writer.body.append(f'<span class="math">{tex2mathml(node.astext())}</span>')
    raise nodes.SkipNode


def set_apart(writer: Any, node: nodes.math_block) -> None:
    formula = tex2mathml(node.astext()).replace("<math ", '<math display="block" ', 1)
    writer.body.append(f'<div class="math">{formula}</div>')
    raise nodes.SkipNode


def link_pages_of_sources(app: Sphinx, doctree: nodes.document) -> None:
    """Links to files of the checkout lead to pages with their text, instead of downloads."""
    name = app.env.docname
    for link in list(doctree.findall(download_reference)):
        path = (ROOT / name).parent.joinpath(link["reftarget"]).resolve().relative_to(ROOT).as_posix()
        app.env.linked_sources[path] = page = f"sources/{path}"
        to_page = nodes.reference("", "", *link.children, refuri=app.builder.get_relative_uri(name, page))
        link.replace_self(to_page)


def pages_of_sources(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    for path, page in app.env.linked_sources.items():
        language = {".py": "python", ".json": "json", ".cu": "c++", ".cuh": "c++"}.get(Path(path).suffix, "text")
        text = app.builder.highlighter.highlight_block((ROOT / path).read_text(), language)
        yield page, {"title": path, "body": f"<h1>{escape(path)}</h1>{text}"}, "page.html"
