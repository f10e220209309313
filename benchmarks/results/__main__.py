"""Write what follows from the data of this folder anew: its pages, benchmarks/RESULTS.md, the README's table, the charts."""

from __future__ import annotations

from benchmarks.results import charts, pages


def main() -> None:
    """Print what was written."""
    for path in [*pages.write(), *charts.write()]:
        print(path)


if __name__ == "__main__":
    main()
