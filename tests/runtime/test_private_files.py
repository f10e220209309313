"""What nobody else can have written, and what is done without the rest."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_cpu_accel.cli import checks
from hf_cpu_accel.patching.originals import DiskStore
from hf_cpu_accel.providers.autotune import NATIVE
from hf_cpu_accel.providers.store import Choice, Store
from hf_cpu_accel.runtime import home_folder as home
from hf_cpu_accel.runtime.home_folder import cache_folder
from hf_cpu_accel.runtime.private_files import make_folder, problem


@pytest.fixture(autouse=True)
def _warn_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home._warn.cache_clear()
    home._temporary.cache_clear()
    monkeypatch.setenv("HF_CPU_ACCEL_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077])
def test_folders_are_for_this_user_alone_whatever_the_mask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        made = make_folder(tmp_path / "home" / "providers" / "below")
    finally:
        os.umask(before)
    for path in (made, made.parent, made.parent.parent):
        assert path.stat().st_mode & 0o777 == 0o700
    assert make_folder(made) == made


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotADirectoryError):
            make_folder(path)


@pytest.mark.parametrize(
    ("mode", "found"),
    [
        (0o700, None),
        (0o755, None),
        (0o770, "other users can write to it (mode 770)"),
        (0o757, "other users can write to it (mode 757)"),
        (0o1777, "other users can write to it (mode 1777)"),
    ],
)
def test_modes(tmp_path: Path, mode: int, found: str | None) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    path.chmod(mode)
    assert problem(path) == found


def test_links_owners_and_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problem(tmp_path / "nothing" / "here") is None
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nothing")
    assert problem(link) == "it is a symbolic link"
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    assert str(problem(tmp_path)).startswith("it belongs to user ")


def test_what_cannot_be_looked_at(tmp_path: Path) -> None:
    path = tmp_path / (
        "long" * 100
    )  # as a folder of root would, if these tests were not run by root at times
    assert problem(path) == "it cannot be read (File name too long)"


def test_a_cache_of_ones_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert cache_folder("providers") == tmp_path / "home" / "providers"
    assert not (tmp_path / "home").exists()
    make_folder(cache_folder("providers"))
    assert cache_folder("providers") == tmp_path / "home" / "providers"
    assert not caplog.records


def test_the_home_may_be_elsewhere_by_a_link_of_its_user(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    assert cache_folder("providers") == tmp_path / "disk" / "providers"


@pytest.mark.parametrize("level", ["home", "home/providers"])
def test_one_warning_and_no_cache_where_others_write(
    tmp_path: Path, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Store(cache_folder("providers"), {"cpu": "some"})
    kept.add({"a": Choice(NATIVE, {NATIVE: 1e-3}, 16)})
    (tmp_path / level).chmod(0o775)
    with caplog.at_level(logging.WARNING):
        found = [cache_folder("providers") for _ in range(3)]
    assert len({*found}) == 1
    assert not found[0].is_relative_to(tmp_path)
    (record,) = caplog.records
    assert record.getMessage() == (
        f"hf_cpu_accel: the cache folder {tmp_path / level} is not used: other users can write to it (mode 775). "
        "If it is yours, `chmod go-w` it; else set HF_CPU_ACCEL_HOME to a folder of your own."
    )
    store = Store(found[0], {"cpu": "some"})
    assert store.load() == {}
    store.add({"b": Choice(NATIVE, {NATIVE: 1e-3}, 16)})
    assert set(store.load()) == {"b"}  # for this process
    assert set(kept.load()) == {"a"}


def test_the_temporary_folder_goes_with_the_process(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home").chmod(0o777)
    program = (
        "import os, sys\n"
        "from hf_cpu_accel.runtime.home_folder import cache_folder\n"
        "from hf_cpu_accel.runtime.private_files import make_folder\n"
        "made = make_folder(cache_folder('x'))\n"
        "pid = os.fork()\n"
        "if pid == 0: sys.exit()\n"
        "os.waitpid(pid, 0)\n"
        "print(made, made.is_dir(), oct(made.parent.stat().st_mode & 0o777))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    made, existed, mode = done.stdout.split()
    assert (existed, mode) == ("True", "0o700")
    assert not Path(made).parent.exists()


def test_original_weights_have_no_name_and_stay_where_there_is_room(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "home" / "originals")
    store.reserve(1)
    assert (tmp_path / "home" / "originals").stat().st_mode & 0o777 == 0o700


def test_doctor_tells_of_it(tmp_path: Path) -> None:
    path = tmp_path / "home"
    assert checks.folder(make_folder(path)).status == "ok"
    path.chmod(0o770)
    found = checks.folder(path)
    assert (found.status, "other users can write to it (mode 770)" in found.value) == ("problem", True)
    assert "chmod go-w" in found.fix
