"""The documentation as a site, by Sphinx: python -m sphinx -W -c docs . docs/site

Its root is that of the repository, so that a link between two pages, or to a file, is the same here and there.
"""

from cupy_mla import __version__

project = "cupy_mla"
release = __version__
html_title = f"cupy_mla {release}"
html_theme = "furo"
html_copy_source = False
html_extra_path = ["index.html"]  # leads to the README
root_doc = "docs/contents"
include_patterns = ["*.md", "benchmarks/results/README.md", "benchmarks/log/*.md", "docs/**"]
exclude_patterns = ["docs/site"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
default_role = "code"
smartquotes = False
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

autodoc_mock_imports = ["torch", "transformers"]
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
