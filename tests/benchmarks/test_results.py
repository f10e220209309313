"""The results that are kept: data and pages say the same, and a run replaces the one before."""

import re
from pathlib import Path

import pytest
import typer

from benchmarks.results import charts, headline, pages, store
from benchmarks.results.store import Machine, Table
from benchmarks.session import check_folder, keep


def table(title: str, date: str = "2026-11-23 14:00 UTC", group: str = "Beside torch") -> Table:
    rows = (("eager-fp32", "10.0"), ("ours-fp32", "5.00"))
    return Table(
        group, title, date, "python -m benchmarks.run", "a CPU", "torch", ("system", "median ms"), rows
    )


@pytest.mark.parametrize("path", pages.pages(), ids=lambda path: path.name)
def test_pages_and_readme_are_what_the_data_says(path: Path) -> None:
    """If this fails: `python -m benchmarks.results`."""
    assert path.read_text(encoding="utf-8") == pages.pages()[path]


def test_the_readme_shows_the_latest_headline_table() -> None:
    known = store.machines()
    _, table = headline.latest(known)
    assert table.columns == headline.COLUMNS
    rows = headline.rows(known)
    assert 6 <= len(rows) <= 9
    assert all("hf_cpu_accel" in row.speedups for row in rows)
    text = pages.README.read_text(encoding="utf-8")
    assert text.count(pages.BEGIN) == text.count(pages.END) == 1
    assert pages.numbers(known) in text


def test_without_a_headline_table_the_command_is_named() -> None:
    with pytest.raises(KeyError, match=r"benchmarks\.headline"):
        headline.latest([Machine("a-cpu", "A CPU", tables=(table("a"),))])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_chart_shows_the_best_of_each_system(theme: str) -> None:
    """If this fails: `python -m benchmarks.results`."""
    drawn = (charts.FIGURES / f"speedups-{theme}.svg").read_text(encoding="utf-8")
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", drawn)
    for row in headline.rows(store.machines()):
        assert row.label in labels
        best = max(row.speedups.get(column, 0) for column in ("hf_cpu_accel", "hf_cpu_accel, quantized"))
        assert f"{best:.1f}x hf_cpu_accel" in labels


def test_figures_are_drawn_again_alike(tmp_path: Path) -> None:
    for path in charts.write(tmp_path):
        first = path.read_bytes()
        assert charts.write(tmp_path)
        assert path.read_bytes() == first


@pytest.mark.parametrize("figure", sorted({p.name.split("-")[0] for p in charts.FIGURES.glob("*.svg")}))
def test_light_and_dark_say_the_same(figure: str) -> None:
    light, dark = (
        re.findall(r"<text[^>]*>([^<]*)</text>", (charts.FIGURES / f"{figure}-{theme}.svg").read_text())
        for theme in ("light", "dark")
    )
    assert light == dark
    assert light


def test_a_run_replaces_the_one_before_and_others_stay(tmp_path: Path) -> None:
    keep(tmp_path, [table("a"), table("b", group="Beside rivals")])
    keep(tmp_path, [table("a", "2026-12-01 10:00 UTC"), table("c")])
    (machine,) = store.machines(tmp_path)
    assert [(t.title, t.date[:10]) for t in machine.tables] == [
        ("a", "2026-12-01"),
        ("c", "2026-11-23"),
        ("b", "2026-11-23"),
    ]
    assert store.load(tmp_path / f"{machine.key}.json") == machine
    page = (tmp_path / f"{machine.key}.md").read_text(encoding="utf-8")
    assert "| ours-fp32 | 5.00 |" in page
    assert "`python -m benchmarks.run`" in page


def test_what_is_not_in_the_data_is_refused(tmp_path: Path) -> None:
    machine = Machine("m", "M", "", (table("a"),))
    assert machine.table("a").cell("ours-fp32", "median ms") == "5.00"
    with pytest.raises(KeyError, match="no table"):
        machine.table("b")
    with pytest.raises(KeyError, match="no cell"):
        machine.table("a").cell("ours-int8", "median ms")
    with pytest.raises(ValueError, match="2 columns"):
        Table("g", "t", "", "", "", "", ("a", "b"), (("1",),))


def test_a_folder_that_is_not_there_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    check_folder(None)
    check_folder(tmp_path)
    with pytest.raises(typer.BadParameter, match="no folder"):
        check_folder(tmp_path / "nowhere")
