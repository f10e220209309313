"""`dtypes`: modules by path or pattern in another dtype than the rest, alone and within fused layers."""

import pytest
import torch
import transformers
from torch import nn

from hf_cpu_accel import CPUAccelConfig, accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite.core.dtype_table import DtypeTable, coarsest
from tests.accuracy.models import bert, llama, token_ids

IDS = token_ids(1)[0]["input_ids"]


def hidden(model):
    with torch.no_grad():
        return model(IDS)[0]


def dtypes(model):
    return {item.name: item.dtype for item in explain(model).replaced}


def test_the_last_matching_pattern_wins():
    table = DtypeTable([("*", "int8"), ("a.b", "float32"), ("*.c", "bfloat16"), ("a.b.c.d", "int4")])
    assert [table.of(path) for path in ("x", "a.b", "a.b.x", "a.b.c", "a.b.c.e", "a.b.c.d", "a")] == [
        "int8", "float32", "float32", "bfloat16", "bfloat16", "int4", "int8",
    ]  # fmt: skip
    assert table.of("a.b.c.d") == "int4"
    assert table.followed_by([("a.b", "int8")]).of("a.b.c.d") == "int8"
    assert DtypeTable(()).of("a") is None
    assert DtypeTable([("a.b", "int8")]).of("a.bc") is None


def test_the_coarsest():
    assert coarsest(["bfloat16", "int8", "float32"]) == "int8"
    assert coarsest([]) == "float32"


@pytest.mark.parametrize(
    "given",
    [{"*": "bfloat16", "*.query": "int8"}, [["*", "bfloat16"], ["*.query", "int8"]]],
    ids=["dict", "pairs"],
)
def test_settings_keep_their_order(given):
    config = CPUAccelConfig(dtypes=given)
    assert config.dtypes == (("*", "bfloat16"), ("*.query", "int8"))
    assert CPUAccelConfig.from_json(config.to_json()) == config
    assert hash(config) == hash(CPUAccelConfig(dtypes=config.dtypes))
    assert config != CPUAccelConfig(dtypes=dict(reversed(config.dtypes)))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("int8", TypeError, r"dtypes='int8': expected a dict of module paths and dtypes"),
        ({"a": 8}, TypeError, r"dtypes\['a'\]=8: expected a string"),
        (
            {"a": "auto"},
            ValueError,
            r"dtypes\['a'\]='auto' is unknown, accepted: 'float32', 'bfloat16', 'int8'",
        ),
        ({3: "int8"}, TypeError, r"dtypes=\{3: 'int8'\}"),
    ],
)
def test_wrong_dtypes_are_named(given, error, message):
    with pytest.raises(error, match=message):
        CPUAccelConfig(dtypes=given)


@pytest.mark.parametrize(
    ("part", "base", "other"),
    [
        ("attention.self", "int8", "float32"),
        ("attention.output", "int8", "bfloat16"),
        ("intermediate", "bfloat16", "int8-weight"),
        ("output", "int8", "float32"),
    ],
)
def test_fused_layers_with_several_dtypes_agree_with_their_parts(part, base, other):
    model = bert()
    before = hidden(model)
    options = {"verify": True, "providers": "own"}
    accelerate_for_cpu(model, dtype=base, dtypes={f"encoder.layer.1.{part}": other}, **options)
    told = dtypes(model)
    assert told["encoder.layer.1"] == " + ".join(sorted({base, other}, key=DTYPES.index))
    assert told["encoder.layer.0"] == base
    mixed = hidden(model)
    restore(model)
    assert torch.equal(hidden(model), before)
    # By its parts, which a hook inside asks for. Between them nothing is rounded to bfloat16.
    accelerate_for_cpu(model, dtype=base, dtypes={f"encoder.layer.1.{part}": other}, **options)
    for layer in model.encoder.layer:
        layer.attention.register_forward_hook(lambda *args: None)
    error = (hidden(model) - mixed).norm() / mixed.norm()
    assert error < 2e-2


DTYPES = ("float32", "bfloat16", "int8", "int8-weight")


def test_a_float32_linear_is_exact_in_a_layer_of_8_bits():
    """All but one linear are as good as 0, so that nothing else is rounded."""
    model = bert()
    with torch.no_grad():
        for path, module in model.encoder.layer[0].named_modules():
            if isinstance(module, nn.Linear) and path != "output.dense":
                module.weight.mul_(1e-9)
        model.encoder.layer[0].intermediate.dense.bias.normal_()
    before = model.encoder.layer[0](torch.randn(1, 5, 128, generator=torch.Generator().manual_seed(0)))
    before = before[0] if isinstance(before, tuple) else before
    accelerate_for_cpu(model, dtype="int8", dtypes={"encoder.layer.0.output": "float32"}, verify=True)
    now = model.encoder.layer[0](torch.randn(1, 5, 128, generator=torch.Generator().manual_seed(0)))
    now = now[0] if isinstance(now, tuple) else now
    torch.testing.assert_close(now, before, rtol=1e-4, atol=1e-4)


def test_linears_of_one_packed_weight_are_packed_separately():
    model = accelerate_for_cpu(bert(), dtype="int8", dtypes={"*.1.attention.self.value": "bfloat16"})
    told = dtypes(model)
    assert told["encoder.layer.1.attention.self.value"] == "bfloat16"
    assert told["encoder.layer.1.attention.self.query"] == "int8"
    # The op for encoder layers needs them side by side, and the steps of a recorded layer do not.
    layers = {
        item.name: item.structure for item in explain(model).replaced if item.structure.endswith("layer")
    }
    assert layers == {
        "encoder.layer.0": "encoder layer",
        "encoder.layer.1": "recorded layer",
        "encoder.layer.2": "encoder layer",
    }


def test_decoders_and_their_heads():
    model = llama()
    ids = token_ids(1, 12)[0]["input_ids"]
    with torch.no_grad():
        before = model(ids).logits
        accelerate_for_cpu(
            model,
            dtype="int8",
            dtypes={"model.layers.0.mlp": "float32", "model.layers.1": "bfloat16", "lm_head": "int4"},
        )
        told, now = dtypes(model), model(ids).logits
    assert told["model.layers.0"] == "float32 + int8"
    assert told["model.layers.1"] == "bfloat16"
    assert told["lm_head"] == "int4"
    assert told["model.layers.0.mlp.gate_proj"] == "float32"
    assert torch.nn.functional.cosine_similarity(now, before, dim=-1).min() > 0.98
    with torch.no_grad():
        assert torch.equal(restore(model)(ids).logits, before)


def test_a_pooler_in_8_bits_on_request():
    assert dtypes(accelerate_for_cpu(bert(), dtype="int8"))["pooler"] == "float32"
    assert dtypes(accelerate_for_cpu(bert(), dtype="int8", dtypes={"pooler": "int8"}))["pooler"] == "int8"


def test_two_linears_of_one_feed_forward_network():
    torch.manual_seed(0)
    config = transformers.T5Config(d_model=64, d_kv=16, d_ff=128, num_heads=4, num_layers=2, vocab_size=200)
    model = transformers.T5EncoderModel(config).eval()
    before = hidden(model)
    accelerate_for_cpu(model, dtype="int8", dtypes={"*.DenseReluDense.wo": "float32"}, verify=True)
    told = dtypes(model)
    assert told["encoder.block.0.layer.1.DenseReluDense.wo"] == "float32"
    assert told["encoder.block.0.layer.1.DenseReluDense.wi"] == "int8"
    assert torch.nn.functional.cosine_similarity(hidden(model), before, dim=-1).min() > 0.99


def test_convolutions():
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=32, hidden_sizes=[64, 64], depths=[1, 1], layer_type="basic"
    )
    model = transformers.ResNetModel(config).eval()
    image = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(image)[0]
        accelerate_for_cpu(model, dtype="int8", dtypes={"encoder.stages.1": "bfloat16"}, verify=True)
        now = model(image)[0]
    told = dtypes(model)
    held = {
        told[name] for name in told if name.startswith("encoder.stages.1") and name.endswith("convolution")
    }
    assert "int8" not in held
    assert any(kind == "int8" for name, kind in told.items() if name.startswith("encoder.stages.0"))
    assert torch.nn.functional.cosine_similarity(now.flatten(1), before.flatten(1)).min() > 0.99
