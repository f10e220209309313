import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_cpu_accel.runtime import mapped_files
from hf_cpu_accel.runtime.mapped_files import MappedFiles, SourceFile

VALUES = {"a": torch.randn(64, 1000), "b": torch.randn(3), "c": torch.randn(100, 512).bfloat16()}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a file.safetensors"
    save_file(VALUES, path)
    return path


def test_mapped_tensors_have_a_source(path):
    tensors = load_file(path)
    mapped = MappedFiles()
    files = {mapped.source_of(tensor) for tensor in tensors.values()}
    assert [file.path for file in files] == [path.resolve()]
    views = (tensors["a"][3:5], tensors["c"].view(torch.uint8), tensors["a"].detach())
    assert all(mapped.source_of(view) in files for view in views)


def test_memory_of_ones_own_has_none(path):
    tensors = load_file(path)
    mapped = MappedFiles()
    others = (tensors["a"].clone(), tensors["a"].t(), torch.empty(0), torch.empty(3, device="meta"))
    assert [mapped.source_of(tensor) for tensor in others] == [None] * 4
    shared = torch.from_file(str(path), shared=True, size=100)
    assert MappedFiles().source_of(shared) is None  # whoever maps it may write to it
    assert MappedFiles(path.parent).source_of(tensors["a"]) is None  # a system without /proc


@pytest.mark.parametrize("row", [0, 31, 63])
def test_what_was_written_to_is_memory_of_ones_own(path, row):
    tensors = load_file(path)
    mapped = MappedFiles()
    tensors["a"].data[row, 999] += 1
    assert mapped.source_of(tensors["a"]) is None
    assert mapped.give_back(tensors["a"]) is None
    assert tensors["a"][row, 999] == VALUES["a"][row, 999] + 1


def _resident(name):
    with open("/proc/self/smaps") as file:
        lines = iter(file)
        return sum(
            int(next(line for line in lines if line.startswith("Rss:")).split()[1])
            for area in lines
            if area.rstrip().endswith(name)
        )


def test_pages_that_were_given_back_are_read_again(path):
    tensors = load_file(path)
    mapped = MappedFiles()
    assert torch.equal(tensors["a"], VALUES["a"])
    before = _resident(path.name)
    assert mapped.give_back(tensors["a"]) is not None
    assert _resident(path.name) <= before - 200  # of 250 kB
    assert torch.equal(tensors["a"], VALUES["a"])


def test_a_deleted_file_is_unchanged_and_a_written_one_is_not(path):
    file = SourceFile(path)
    path.rename(path.with_name("moved"))
    file.check()
    path.with_name("moved").unlink()
    file.check()
    save_file(VALUES, path)
    for change in (_append, _write_in_the_middle, _write_and_keep_the_time):
        file = SourceFile(path)
        file.check()
        change(path)
        with pytest.raises(RuntimeError, match=rf"{path.name}, which has changed.*from_pretrained"):
            file.check()


def _append(path):
    with path.open("ab") as file:
        file.write(b"x")


def _write_in_the_middle(path):
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(100_000)
        file.write(b"x")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def _write_and_keep_the_time(path):
    status = path.stat()
    with path.open("r+b") as file:
        file.write(b"x")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_the_list_is_not_read_for_tensors_in_the_heap(path, monkeypatch):
    """A block of 100 bytes lies there; one of 64 MB, which glibc maps, does not, and neither does a mapped file."""
    small, large, tensors = torch.ones(25), torch.ones(16 << 20), load_file(path)
    reads = []
    real = mapped_files._areas
    monkeypatch.setattr(mapped_files, "_areas", lambda text: reads.append(1) or real(text))
    mapped = MappedFiles()
    assert mapped.source_of(small) is None
    assert not reads
    assert mapped.source_of(large) is None
    assert mapped.source_of(tensors["b"]) is not None
    assert len(reads) == 1
