"""Files of packed weights: they come back bit for bit as views of the file, and what was changed is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from hf_cpu_accel.packing import packed_file
from hf_cpu_accel.packing.linear import FORMS, PackedWeight, pack_linear
from hf_cpu_accel.packing.packed_file import read_packed, write_packed
from hf_cpu_accel.packing.saved_weight import SavedWeight, check_packed, check_permutation
from hf_cpu_accel.packing.tensor_file import DamagedFile, TensorFile, write
from tests.packing.mutated_files import contents, run, write_example


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "cpu_accel.safetensors"
    write_example(path)
    return path


@pytest.mark.parametrize("rows", [70, 1])
@pytest.mark.parametrize("dtype", FORMS)
def test_a_packed_weight_comes_back_bit_for_bit(tmp_path, dtype, rows):
    packed = pack_linear(torch.randn(rows, 130), dtype)
    write_packed(tmp_path / "file", [SavedWeight("ffn", ("a.weight", "b.weight"), packed)], {}, {})
    (found,) = read_packed(tmp_path / "file").weights
    assert (found.rule, found.parameters) == ("ffn", ("a.weight", "b.weight"))
    assert (found.packed.dtype, found.packed.in_features, found.packed.out_features) == (dtype, 130, rows)
    assert torch.equal(found.packed.data, packed.data)
    assert packed.scale is None or torch.equal(found.packed.scale, packed.scale)


def test_tensors_are_views_of_the_file_on_whole_lines(path):
    file = read_packed(path)
    stored = {w.packed.data.untyped_storage().data_ptr() for w in file.weights}
    assert len(stored) == 1
    assert all(w.packed.data.data_ptr() % 64 == 0 for w in file.weights)


def test_others_read_it_as_safetensors(path):
    file, tensors = read_packed(path), load_file(path)
    for weight in file.weights:
        for name, tensor in weight.tensors().items():
            assert torch.equal(tensors[name], tensor)
    assert torch.equal(tensors["norm.weight"], file.plain["norm.weight"])


def test_writing_again_leaves_what_was_mapped(path):
    file = read_packed(path)
    before = contents(file)
    write_packed(path, file.weights, {"norm.weight": torch.zeros(3)}, {})
    assert contents(file) == before
    assert list(read_packed(path).plain) == ["norm.weight"]
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="complex64 cannot be written"):
        write(tmp_path / "file", {"a": torch.randn(2, dtype=torch.complex64)}, {})
    assert not list(tmp_path.iterdir())


def test_a_truncated_file_is_refused(path):
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedFile, match=r"truncated.*Nothing was loaded"):
        read_packed(path)


def test_a_foreign_file_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.randn(3)}, tmp_path / "file")
    with pytest.raises(DamagedFile, match="not written by hf_cpu_accel"):
        read_packed(tmp_path / "file")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DamagedFile, match="truncated, or not a safetensors file"):
        read_packed(tmp_path / "file")


def test_a_newer_file_is_refused_by_its_version(path, monkeypatch):
    file = read_packed(path)
    monkeypatch.setattr(packed_file, "FORMAT_VERSION", 2)
    write_packed(path, file.weights, {}, {})
    monkeypatch.undo()
    with pytest.raises(
        DamagedFile, match="format version 2, and this version of hf_cpu_accel reads 1: install"
    ):
        read_packed(path)


def test_a_flipped_bit_of_a_weight_is_named(path):
    content = bytearray(path.read_bytes())
    file = TensorFile(path)
    at = content.index(file["layers.2.weight.packed"].numpy().tobytes())
    content[at + 77] ^= 16
    path.unlink()
    path.write_bytes(content)
    with pytest.raises(
        DamagedFile, match=r"'layers.2.weight.packed' has changed since it was written \(CRC-32\)"
    ):
        read_packed(path)


def test_a_header_that_is_no_json_of_ours_is_refused(path):
    for text in (b"[]", b"{}", b"1", b'{"__metadata__": 3}', b"\xff\xff", b"[" * 5000):
        encoded = text + b" " * (-(8 + len(text)) % 64)
        path.write_bytes(len(encoded).to_bytes(8, "little") + encoded)
        with pytest.raises(DamagedFile):
            read_packed(path)


def test_hundreds_of_mutated_files_are_refused():
    counts, wrong = run(300, seed=10_000)
    assert not wrong
    assert sum(count for what, count in counts.items() if what.endswith("refused")) > 250


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"scale": torch.full((2, 70), torch.nan)}, "NaN or infinity"),
        ({"scale": torch.ones(2, 69)}, "does not fit 70 output features"),
        ({"scale": torch.ones(2, 70, dtype=torch.float64)}, "torch.float64"),
        ({"in_features": 1300}, "70 x 1300"),
        ({"out_features": 0}, "0 x 130"),
        ({"dtype": "float32"}, "not a float32 weight"),
        ({"dtype": "?"}, "'\\?'"),
    ],
)
def test_sizes_that_kernels_would_trust_are_checked(change, says):
    fields = {**vars(pack_linear(torch.randn(70, 130), "int8")), **change}
    with pytest.raises(ValueError, match=says):
        check_packed(PackedWeight(**fields))


@pytest.mark.parametrize(
    "permutation", [torch.arange(129), torch.arange(130, dtype=torch.int32), torch.arange(130).clamp(max=128)]
)
def test_an_order_of_input_features_is_one(permutation):
    check_permutation(None, 130)
    check_permutation(torch.randperm(130), 130)
    with pytest.raises(ValueError, match="a permutation"):
        check_permutation(permutation, 130)


def test_the_header_tells_the_form(path):
    metadata = TensorFile(path).metadata
    header = json.loads(metadata["cpu_accel"])
    assert header["format_version"] == 1
    assert {row["dtype"] for row in header["weights"]} == set(FORMS)
