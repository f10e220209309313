"""Every type of GGUF block that the package gguf unpacks: left in blocks, or unpacked tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.gguf import dequant
from transformers.integrations.gguf.utils import GgufEmbedding, GgufLinear

import hf_cpu_accel
from hf_cpu_accel import explain, restore
from hf_cpu_accel.checkpoints.gguf import FORMATS, unpacked_tensors
from hf_cpu_accel.frontends.gguf import load_in_blocks
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from tests.frontends.gguf_files import Kind, blocks_of, write_file
from tests.frontends.mutated_gguf import first_difference, numbers, numbers_in

FLOATS = {Kind.F32, Kind.F16, Kind.BF16}
SIZES = {"hidden_size": 256, "intermediate_size": 256}
PATH = "model.layers.{}.self_attn.v_proj"


def unpacked_by_gguf(kind: Kind) -> bool:
    """Whether the package gguf has the values of such blocks."""
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


KINDS = [kind for kind in gguf.GGML_QUANT_SIZES if kind not in FLOATS and unpacked_by_gguf(kind)]
UNPACKED = [kind for kind in KINDS if kind not in FORMATS]


def write(folder: Path, kind: Kind, part: str = "v_proj", **others: Any) -> Path:
    """Write a Llama whose tensors with `part` in their names have blocks of `kind`."""
    return write_file(folder, "llama", kinds={part: kind, "": Kind.Q8_0}, **SIZES, **others)


def call(model: Any) -> torch.Tensor:
    ids = torch.randint(1, 160, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids).logits


def test_the_types_that_files_have_are_among_these() -> None:
    assert {"Q5_0", "Q5_1", "TQ1_0", "TQ2_0", "MXFP4", "IQ2_XXS", "IQ1_M"} <= {kind.name for kind in KINDS}
    assert {"Q5_0", "Q5_1"} <= {kind.name for kind in KINDS} - {kind.name for kind in UNPACKED}


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_each_type_loads_with_the_values_of_gguf(tmp_path: Path, kind: Kind) -> None:
    path = write(tmp_path, kind)
    model = load_in_blocks(AutoModelForCausalLM.from_pretrained, tmp_path, gguf_file=path.name)
    v_proj = model.get_submodule(PATH.format(0))
    assert isinstance(v_proj, GgufLinear) == (kind in FORMATS)
    assert isinstance(
        model.get_submodule("model.layers.0.mlp.up_proj"), GgufLinear
    )  # the rest stays in blocks
    expected = numbers_in(path)
    found = numbers(model)
    assert first_difference(found, expected) is None
    name = f"{PATH.format(0)}.weight"
    assert torch.equal(found[name], expected[name])
    assert unpacked_tensors(model) == (
        ()
        if kind in FORMATS
        else (f"model.layers.[0-1].self_attn.v_proj.weight: dequantized from GGUF {kind.name} at loading",)
    )


@pytest.mark.parametrize(
    "kind", [Kind.Q5_0, Kind.Q5_1, *(kind for kind in UNPACKED if kind.name[:2] in ("TQ", "MX"))]
)
def test_a_file_with_one_such_tensor_is_computed(tmp_path: Path, kind: Kind) -> None:
    path = write(tmp_path, kind)
    expected = call(AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, cpu_optimize="float32")
    assert torch.allclose(call(model), expected, atol=1e-3 * float(expected.abs().max()))
    item = next(item for item in explain(model).replaced if item.name == PATH.format(1))
    note = f"model.layers.[0-1].self_attn.v_proj.weight: dequantized from GGUF {kind.name} at loading"
    if kind in FORMATS:
        assert f"(GGUF {kind.name})" in item.structure
        assert item.dtype == "affine8"
    assert (note in explain(model).notes) == (kind not in FORMATS)
    assert (note in str(explain(model))) == (kind not in FORMATS)
    restore(model)
    assert isinstance(model.get_submodule(PATH.format(0)), GgufLinear) == (kind in FORMATS)
    assert torch.allclose(call(model), expected, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", [Kind.Q5_0, Kind.MXFP4])
def test_tables_of_such_types_are_read(tmp_path: Path, kind: Kind) -> None:
    path = write(tmp_path, kind, "embed_tokens")
    expected = call(AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, cpu_optimize="float32")
    table = model.get_input_embeddings()
    assert isinstance(table, GgufEmbedding) == (kind in FORMATS)
    assert torch.allclose(call(model), expected, atol=1e-3 * float(expected.abs().max()))
    note = f"model.embed_tokens.weight: dequantized from GGUF {kind.name} at loading"
    assert (note in explain(model).notes) == (kind not in FORMATS)


def test_five_bits_are_saved_packed_as_they_are(tmp_path: Path) -> None:
    path = write(tmp_path, Kind.Q5_0, "proj")
    model = AutoModelForCausalLM.from_pretrained(str(path), cpu_optimize="float32")
    model.save_pretrained(tmp_path / "packed", packed=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert torch.equal(call(loaded), call(model))
    assert {m.packed_dtype for m in loaded.modules() if isinstance(m, PackedLinear)} == {"affine8"}


def test_transformers_tables_keep_only_the_types_of_blocks(tmp_path: Path) -> None:
    before = set(dequant.GGML_BLOCK)
    path = write(tmp_path, Kind.MXFP4)
    load_in_blocks(AutoModelForCausalLM.from_pretrained, tmp_path, gguf_file=path.name)
    for table in (dequant.GGML_BLOCK, dequant.GGML_NAME, dequant._DEQUANT):
        assert set(table) == before | {int(Kind.Q5_0), int(Kind.Q5_1)}


def test_integers_are_refused(tmp_path: Path) -> None:
    """ggml's integers and activations are no weights: the package gguf has no values for them."""
    path = write(tmp_path, Kind.Q5_0)
    kind, at = (number.to_bytes(4, "little") for number in (int(Kind.Q5_0), int(Kind.Q8_1)))
    content = path.read_bytes()
    place = content.index(b"blk.0.attn_v.weight") + len(b"blk.0.attn_v.weight") + 4 + 2 * 8
    assert content[place : place + 4] == kind
    path.write_bytes(content[:place] + at + content[place + 4 :])
    with pytest.raises(ValueError, match="ggml type 9, which is not supported yet"):
        AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, cpu_optimize=True)


def test_random_blocks_are_finite() -> None:
    for kind in UNPACKED:
        assert np.isfinite(gguf.dequantize(blocks_of(np.ones((2, 256), dtype=np.float32), kind), kind)).all()


assert hf_cpu_accel  # the keyword is there because it is imported
