"""`from_pretrained(gguf_file=..., cpu_optimize=...)`: the weights of the file, as they are."""

from __future__ import annotations

import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM
from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS
from transformers.integrations.gguf.utils import GgufLinear

import hf_cpu_accel
from hf_cpu_accel import explain, restore
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from tests.frontends.gguf_files import FAMILIES, write_file


def call(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_model_is_that_of_transformers_own_loader(tmp_path: Path, model_type: str) -> None:
    path = write_file(tmp_path, model_type)
    unpacked = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)
    before = dict(GGUF_ARCHS)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, cpu_optimize="float32")
    assert before == GGUF_ARCHS
    linears = [module for module in model.modules() if isinstance(module, PackedLinear)]
    assert {linear.packed_dtype for linear in linears} <= {"affine4", "affine8"}
    ids = torch.randint(1, 160, (2, 9), generator=torch.Generator().manual_seed(1))
    expected = call(unpacked, ids)
    assert torch.allclose(call(model, ids), expected, atol=1e-3 * float(expected.abs().max()))
    assert explain(model).counts()["decoder layer"] == 2
    tokens = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(tokens, unpacked.generate(ids, max_new_tokens=6, do_sample=False))
    # The linears of the file come back, and compute the same without us.
    restore(model)
    assert any(isinstance(module, GgufLinear) for module in model.modules())
    assert torch.allclose(call(model, ids), expected, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_model_without_a_head_is_read_too(tmp_path: Path, model_type: str) -> None:
    path = write_file(tmp_path, model_type)
    # Of some types transformers' own loader leaves out weights where there is no head.
    unpacked = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name).model
    model = AutoModel.from_pretrained(tmp_path, gguf_file=path.name, cpu_optimize="float32")
    linears = [module for module in model.modules() if isinstance(module, PackedLinear)]
    assert {linear.packed_dtype for linear in linears} <= {"affine4", "affine8"}
    ids = torch.randint(1, 160, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, expected = (one(ids).last_hidden_state for one in (model, unpacked))
    assert torch.allclose(found, expected, atol=1e-3 * float(expected.abs().max()))
    assert explain(model).counts()["decoder layer"] == 2


def test_damaged_files_are_refused_or_read_as_by_transformers() -> None:
    from tests.frontends.mutated_gguf import run

    counts, wrong = run(14, seed=20_000)
    assert not wrong
    assert any(what.endswith("refused") for what in counts)


def test_what_the_file_lacks_gets_no_random_values(tmp_path: Path) -> None:
    path = write_file(tmp_path, "qwen2")
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_norm", b"blk.1.ffn_mron"))
    with pytest.raises(ValueError, match=r"it lacks model\.layers\.1\.post_attention_layernorm\.weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, cpu_optimize=True)


def number(value: int) -> bytes:
    return value.to_bytes(4, "little")


@pytest.mark.parametrize(
    ("name", "before", "after", "said"),
    [
        ("llama.block_count", 2, 1 << 30, "it has 20 tensors for 1073741824 layers"),
        ("llama.attention.head_count", 4, 5, "is damaged"),
        ("tokenizer.ggml.padding_token_id", 0, 1 << 20, "is damaged"),
    ],
)
def test_settings_that_cannot_be_are_refused_at_once(
    tmp_path: Path, name: str, before: int, after: int, said: str
) -> None:
    path = write_file(tmp_path, "llama")
    content = path.read_bytes()
    setting = name.encode() + number(int(gguf.GGUFValueType.UINT32))
    assert setting + number(before) in content
    path.write_bytes(content.replace(setting + number(before), setting + number(after)))
    with pytest.raises(ValueError, match=said):
        AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, cpu_optimize=True)


def test_a_tensor_with_more_rows_than_the_model_is_not_cut_off(tmp_path: Path) -> None:
    path = write_file(tmp_path, "llama")
    rows = b"blk.0.attn_q.weight" + number(2) + (64).to_bytes(8, "little")
    content = path.read_bytes()
    assert rows + number(64) in content
    path.write_bytes(content.replace(rows + number(64), rows + number(96)))
    with pytest.raises(ValueError, match=r"96 rows, where its settings make it 64|is damaged"):
        AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, cpu_optimize=True)


def test_the_path_of_a_file_is_enough(tmp_path: Path) -> None:
    path = write_file(tmp_path, "llama")
    model = AutoModelForCausalLM.from_pretrained(str(path), cpu_optimize=True)
    item = next(item for item in explain(model).replaced if item.name.endswith("0.mlp.down_proj"))
    assert (item.structure, item.dtype) == ("linear (GGUF Q4_1)", "affine4")


def test_without_the_keyword_transformers_unpacks_as_before(tmp_path: Path) -> None:
    path = write_file(tmp_path, "llama")
    AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, cpu_optimize=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)
    assert not any(isinstance(module, GgufLinear) for module in model.modules())


def test_an_architecture_that_is_not_known_is_unpacked_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_cpu_accel.frontends import gguf as frontend

    path = write_file(tmp_path, "qwen2")
    monkeypatch.delitem(frontend._ARCHITECTURES, "qwen2")
    with pytest.warns(UserWarning, match="packed anew; kept as they are: those of gemma2, gemma3"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, cpu_optimize="float32")
    assert {m.packed_dtype for m in model.modules() if isinstance(m, PackedLinear)} == {"float32"}
    assert any(note.startswith("all weights: dequantized from GGUF") for note in explain(model).notes)


def test_a_transformers_without_blocks_unpacks_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_cpu_accel.frontends.gguf import weights_in_blocks

    monkeypatch.setitem(sys.modules, "transformers.quantizers.quantizer_gguf", None)
    with pytest.warns(UserWarning, match="this transformers unpacks"), weights_in_blocks():
        assert "llama" not in GGUF_ARCHS


def test_loads_in_several_threads_do_not_meet(tmp_path: Path) -> None:
    path = write_file(tmp_path, "llama")

    def load(_: int) -> bool:
        model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, cpu_optimize="float32")
        dtypes = {m.packed_dtype for m in model.modules() if isinstance(m, PackedLinear)}
        return dtypes <= {"affine4", "affine8"} and bool(dtypes)

    before = dict(GGUF_ARCHS)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(load, range(6))) == [True] * 6
    assert before == GGUF_ARCHS


def test_a_file_that_ends_early_loads_nothing(tmp_path: Path) -> None:
    path = write_file(tmp_path, "llama")
    before = dict(GGUF_ARCHS)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises((ValueError, RuntimeError)):
        AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, cpu_optimize=True)
    assert before == GGUF_ARCHS


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_the_weights_of_a_file_are_saved_packed_as_they_are(tmp_path: Path, model_type: str) -> None:
    path = write_file(tmp_path, model_type)
    model = AutoModelForCausalLM.from_pretrained(str(path), cpu_optimize="float32")
    model.save_pretrained(tmp_path / "packed", packed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    ids = torch.randint(1, 160, (2, 9), generator=torch.Generator().manual_seed(1))
    assert torch.equal(call(loaded, ids), call(model, ids))
    packed = {m.packed_dtype for m in loaded.modules() if isinstance(m, PackedLinear)}
    assert packed == {m.packed_dtype for m in model.modules() if isinstance(m, PackedLinear)}
    tokens = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(loaded.generate(ids, max_new_tokens=6, do_sample=False), tokens)


assert hf_cpu_accel  # the keyword is there because it is imported
