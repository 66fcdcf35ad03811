"""How Sphinx makes the site: `sphinx-build -W --keep-going -n docs build/site`."""

import sys
from importlib.metadata import version as version_of
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "rollflow"
author = "the authors of rollflow"
version = release = version_of("rollflow")

extensions = ["myst_parser", "sphinx.ext.autodoc", "pictures", "public_names"]
exclude_patterns = ["_extensions"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

highlight_language = "text"
html_theme = "furo"
html_title = f"rollflow {version}"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["narrow.css"]

# What others document; and types in signatures that no user makes.
nitpick_ignore_regex = [("py:.*", r"(?!rollflow\.).*"), ("py:class", r"rollflow\.(stream|nodes|policy|sinks)\.\w+\..*")]

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
maximum_signature_line_length = 100


def setup(app: Sphinx) -> None:
    """Have the bytes on the protocol's page shown as text."""
    app.add_lexer("hex", TextLexer)
