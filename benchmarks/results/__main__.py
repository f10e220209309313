"""Generate from this folder's data: its pages, benchmarks/RESULTS.md, the README's table and the charts."""

from __future__ import annotations

from benchmarks.results import charts, pages


def main() -> None:
    """Write the files and print their names."""
    for path in [*pages.write(), *charts.write()]:
        print(path)


if __name__ == "__main__":
    main()
