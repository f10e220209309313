"""The prose linter of `make lint`: proselint's checks and those of `style`, over Markdown pages and docstrings.

    python -m tests.prose            # README.md, docs/, the other pages, and the docstrings of src/
    python -m tests.prose FILE...    # these files

It prints `FILE:LINE: CHECK: MESSAGE` for each finding, and exits with 1 if there is one.
"""
