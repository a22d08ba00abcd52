"""How the book is built: sphinx-build -W --keep-going -b html docs docs/_build    (python -m pip install -e '.[docs]')

Everything that it needs is in this repository: nothing is fetched, neither when it is built nor when it is read.
"""
project = "refpar"
author = "the authors of refpar"
copyright = "the authors of refpar; Apache License 2.0"

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence"]
exclude_patterns = ["_build", "runs"]

html_theme = "furo"
html_title = "refpar"
html_show_sphinx = False
html_copy_source = False
pygments_style = "friendly"
