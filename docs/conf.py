"""How 'make docs' builds the documentation: Sphinx, whose search works from disk."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
project, author = "Duel", "The Duel authors"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
myst_heading_anchors = 3
myst_enable_extensions = ["fieldlist"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
exclude_patterns = ["_build"]
# Links to files outside this folder, such as cluster.yaml, are for readers of the repository.
suppress_warnings = ["myst.xref_missing"]
