"""`from_pretrained(folder, cpu_optimize=...)` of folders that other tools quantized: exact, without their packages."""

from __future__ import annotations

import json
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)
from typer.testing import CliRunner

from hf_cpu_accel import explain, restore
from hf_cpu_accel.checkpoints.stored_linear import StoredLinear
from hf_cpu_accel.cli.main import app
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from tests.checkpoints.writers import awq, gptq
from tests.frontends.quantized_cases import (
    AWQ,
    FORMS,
    GPTQ,
    bert,
    gpt2,
    llama,
    logits,
    seed_of,
    t5,
    tokens,
    write_folder,
    write_form,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*asks for activations")

FAMILIES: dict[str, tuple[Any, Any]] = {
    "bert": (bert, AutoModelForMaskedLM),
    "t5": (t5, AutoModelForSeq2SeqLM),
    "gpt2": (gpt2, AutoModelForCausalLM),
}


def near(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("form", FORMS)
def test_results_equal_the_dequantized_weights(tmp_path: Path, form: str) -> None:
    expected = logits(write_form(tmp_path, form))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, cpu_optimize="float32")
    linears = {
        path: m for path, m in model.named_modules() if isinstance(m, PackedLinear) and "layers" in path
    }
    assert len(linears) == 14
    packed = {"fp8": "float32", "gptq-v2-8bits": "affine8"}.get(form, "affine4")
    assert {m.packed_dtype for m in linears.values()} == {packed}
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.group is attention.k_proj.group is attention.v_proj.group
    assert near(logits(model), expected) <= 1e-3
    rows = {item.name: item for item in explain(model).items}
    layers = [(row.structure, row.reason) for row in (rows[f"model.layers.{number}"] for number in range(2))]
    # The op for decoder layers takes no linear whose input features are in an order of their own; steps do.
    assert layers == [("recorded layer" if form == "gptq-by-activation" else "decoder layer", None)] * 2
    # The very tensors of the file come back, and compute the same without us.
    restore(model)
    assert sum(isinstance(module, StoredLinear) for module in model.modules()) == 14
    assert near(logits(model), expected) <= 1e-5
    state, file = model.state_dict(), load_file(tmp_path / "model.safetensors")
    assert set(state) == set(file)
    assert all(
        torch.equal(state[name].view(torch.uint8), file[name].view(torch.uint8))
        for name in file
        if file[name].dim()
    )
    assert all(state[name].dtype is file[name].dtype for name in file)


@pytest.mark.parametrize("form", ["gptq", "gptq-by-activation"])
def test_text_is_generated_as_by_the_dequantized_weights(tmp_path: Path, form: str) -> None:
    dense: Any = write_form(tmp_path, form)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, cpu_optimize="float32")
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(tokens(), **options), dense.generate(tokens(), **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_casts_no_scales(tmp_path: Path, dtype: torch.dtype) -> None:
    write = FORMS["gptq"][1]
    expected = logits(write_folder(tmp_path, llama(), GPTQ, write, dtype=dtype))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, cpu_optimize="float32")
    assert near(logits(model), expected) <= 0.02
    assert logits(model).dtype is dtype
    restore(model)
    file = load_file(tmp_path / "model.safetensors")
    assert {name: value.dtype for name, value in model.state_dict().items()} == {
        n: v.dtype for n, v in file.items()
    }
    name = "model.layers.1.mlp.down_proj.scales"
    assert torch.equal(model.state_dict()[name], file[name])


@pytest.mark.parametrize(
    ("family", "form", "fused"),
    [
        ("bert", "gptq", {"encoder layer": 2}),
        ("bert", "gptq-by-activation", {}),
        ("bert", "awq-gemm", {"encoder layer": 2}),
        ("bert", "fp8", {"encoder layer": 2}),
        ("t5", "gptq", {"encoder layer": 2, "decoder layer": 2}),
        ("gpt2", "gptq", {"decoder layer": 2}),
    ],
)
def test_layers_of_other_families_are_fused(
    tmp_path: Path, family: str, form: str, fused: dict[str, int]
) -> None:
    made, auto = FAMILIES[family]
    expected = logits(write_folder(tmp_path, made(), *FORMS[form]))
    model = auto.from_pretrained(tmp_path, cpu_optimize="float32")
    assert near(logits(model), expected) <= 1e-3
    counts = explain(model).counts()
    assert {name: counts[name] for name in ("encoder layer", "decoder layer") if name in counts} == fused
    restore(model)
    assert near(logits(model), expected) <= 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_fp8_is_rounded_to_dtype_and_the_error_is_reported(tmp_path: Path, dtype: str) -> None:
    expected = logits(write_form(tmp_path, "fp8"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, cpu_optimize=dtype)
    item = next(item for item in explain(model).items if item.name.endswith("0.mlp.down_proj"))
    assert item.structure.startswith(f"linear (fp8, e4m3 in blocks of 32x32; rounding to {item.dtype}: ")
    said = float(item.structure.split()[-1].rstrip(")"))
    assert said <= {"bfloat16": 3e-3, "int8": 2e-2, "int4": 0.12}[dtype]
    linear, stored = model.model.layers[0].mlp.down_proj, load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    each = stored[f"{name}_scale_inv"].repeat_interleave(32, 0).repeat_interleave(32, 1)
    weight = stored[name].float() * each[:64, :96]
    assert said == pytest.approx(float((linear.unpack() - weight).norm() / weight.norm()), rel=0.1)
    assert near(logits(model), expected) <= 40 * said


def test_ignored_activation_quantization_is_reported(tmp_path: Path) -> None:
    write_form(tmp_path, "fp8")
    with pytest.warns(UserWarning, match="requests activations in 8 bits, which is ignored"):
        AutoModelForCausalLM.from_pretrained(tmp_path, cpu_optimize="float32")


@pytest.mark.parametrize("form", ["gptq", "gptq-by-activation", "awq-gemm", "fp8"])
def test_packed_folders_hold_the_same(tmp_path: Path, form: str) -> None:
    write_form(tmp_path / "stored", form)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "stored", cpu_optimize="float32")
    model.save_pretrained(tmp_path / "packed", packed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert torch.equal(logits(loaded), logits(model))
    assert (
        "quant_method" in json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    )
    dtypes = [
        [m.packed_dtype for m in one.modules() if isinstance(m, PackedLinear)] for one in (model, loaded)
    ]
    assert dtypes[0] == dtypes[1]


@pytest.mark.parametrize("originals", ["disk", "memory"])
@pytest.mark.parametrize("form", ["gptq", "fp8"])
def test_a_plain_save_writes_the_folder_again(tmp_path: Path, form: str, originals: str) -> None:
    write_form(tmp_path / "stored", form)
    options = {"dtype": "float32", "originals": originals}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "stored", cpu_optimize=options)
    model.save_pretrained(tmp_path / "again")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("stored", "again"))
    assert set(before) == set(after)
    assert all(torch.equal(before[n].view(torch.uint8), after[n].view(torch.uint8)) for n in before)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("stored", "again")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", cpu_optimize="float32")
    assert torch.equal(logits(again), logits(model))


def test_modules_that_are_not_quantized_stay_floats(tmp_path: Path) -> None:
    def write(path: str, rows: int, columns: int) -> Any:
        return awq(rows, columns, seed=seed_of(path))

    dense: Any = write_folder(tmp_path, llama(), AWQ | {"modules_to_not_convert": ["o_proj"]}, write)
    file = load_file(tmp_path / "model.safetensors")
    for number in range(2):
        path = f"model.layers.{number}.self_attn.o_proj"
        for name in ("qweight", "qzeros", "scales"):
            del file[f"{path}.{name}"]
        file[f"{path}.weight"] = dense.get_parameter(f"{path}.weight").data.clone()
    save_file(file, tmp_path / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path, cpu_optimize="float32")
    assert near(logits(model), logits(dense)) <= 1e-3
    assert model.model.layers[0].self_attn.o_proj.packed_dtype == "float32"
    assert model.model.layers[0].self_attn.q_proj.packed_dtype == "affine4"


def test_a_head_is_quantized_where_the_file_has_it_so(tmp_path: Path) -> None:
    dense: Any = write_folder(tmp_path, llama(), GPTQ | {"lm_head": True}, FORMS["gptq"][1])
    file = load_file(tmp_path / "model.safetensors")
    head = gptq(160, 64, seed=5)
    del file["lm_head.weight"]
    file.update({f"lm_head.{name}": value for name, value in head.tensors.items()})
    dense.lm_head.weight.data = head.weight
    save_file(file, tmp_path / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path, cpu_optimize="int8")
    assert model.lm_head.packed_dtype == "affine4"
    assert near(logits(model), logits(dense)) <= 1e-3


@pytest.mark.parametrize("kind", ["bin", "shards"])
def test_files_of_other_kinds(tmp_path: Path, kind: str) -> None:
    expected = logits(write_form(tmp_path, "awq-gemm"))
    path = tmp_path / "model.safetensors"
    file = load_file(path)
    path.unlink()
    if kind == "bin":
        torch.save(file, tmp_path / "pytorch_model.bin")
    else:
        shards = {
            name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(file)
        }
        for shard in set(shards.values()):
            some = {name: tensor for name, tensor in file.items() if shards[name] == shard}
            save_file(some, tmp_path / shard, {"format": "pt"})
        index = {"metadata": {}, "weight_map": shards}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, cpu_optimize="float32")
    assert near(logits(model), expected) <= 1e-3


def test_accelerated_models_are_pickled(tmp_path: Path) -> None:
    write_form(tmp_path, "gptq-by-activation")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, cpu_optimize="float32")
    assert torch.equal(logits(pickle.loads(pickle.dumps(model))), logits(model))


def test_pipelines_load_them_too(tmp_path: Path) -> None:
    dense = write_folder(tmp_path, bert(), *FORMS["gptq"])
    model = transformers.pipeline(
        "feature-extraction", tmp_path, tokenizer=object(), cpu_optimize="float32"
    ).model
    assert any(isinstance(m, PackedLinear) and m.packed_dtype == "affine4" for m in model.modules())
    assert dense is not None


def test_classes_for_tasks_and_the_command_line_load_them_too(tmp_path: Path) -> None:
    from hf_cpu_accel.frontends.optimum import CPUModelForCausalLM

    expected = logits(write_form(tmp_path / "stored", "awq-gemm"))
    model = CPUModelForCausalLM.from_pretrained(tmp_path / "stored", cpu_optimize="float32")
    assert near(logits(model), expected) <= 1e-3
    arguments = ["pack", str(tmp_path / "stored"), str(tmp_path / "packed"), "--dtype", "float32"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert torch.equal(logits(loaded), logits(model))


def test_without_the_keyword_transformers_loads_by_itself(tmp_path: Path) -> None:
    write_form(tmp_path, "awq-gemm")
    AutoModelForCausalLM.from_pretrained(tmp_path, cpu_optimize="float32")
    with pytest.raises(ImportError, match="gptqmodel"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_loads_in_several_threads_do_not_interfere(tmp_path: Path) -> None:
    tie_weights = PreTrainedModel.tie_weights  # which transformers exchanges for the time of a load
    expected = logits(write_form(tmp_path, "awq-gemm"))

    def load(number: int) -> bool:
        if number % 2:
            with pytest.raises(ImportError, match="gptqmodel"):
                AutoModelForCausalLM.from_pretrained(tmp_path)
            return True
        return (
            near(logits(AutoModelForCausalLM.from_pretrained(tmp_path, cpu_optimize="float32")), expected)
            <= 1e-3
        )

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(load, range(6))) == [True] * 6
    assert PreTrainedModel.tie_weights is tie_weights
