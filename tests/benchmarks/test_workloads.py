"""Names of workloads, ragged batches, and what is compared of their outputs."""

import pytest
import torch

from benchmarks import workloads


@pytest.mark.parametrize(
    "name",
    [
        *("bert-base-uncased", "bert-base-uncased:128", ":1x2", "a:1x2x3", "a:2x8-", "a:2x-8"),
        *("vit-base:1x8", "vit-huge:1", "vit-base:0", "vit-base"),
    ],
)
def test_names_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match=r"MODEL:BATCHxTOKENS.*sd15-unet"):
        workloads.parse(name)


@pytest.mark.parametrize("name", ["bert-tiny:0x8", "bert-tiny:2x0", "bert-tiny:2x9-8", "bert-tiny:1x8-9"])
def test_sizes_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match="SHORTEST <= LONGEST"):
        workloads.parse(name)


def test_an_unknown_model_names_the_known() -> None:
    with pytest.raises(ValueError, match="bert-base-uncased"):
        workloads.parse("bert-huge:1x8")


@pytest.mark.parametrize("name", dict.fromkeys([*workloads.DEFAULT, *workloads.AGAINST_RIVALS]))
def test_default_workloads_exist(name: str) -> None:
    batch, tokens = name.split(":")[1].split("x")
    lengths = workloads.parse(name).lengths
    assert len(lengths) == int(batch)
    assert (min(lengths), max(lengths)) == (int(tokens.split("-")[0]), int(tokens.split("-")[-1]))


def test_ragged_lengths_are_even_mixed_and_always_the_same() -> None:
    lengths = workloads.spread_lengths(16, 8, 128)
    assert sorted(lengths) == list(range(8, 129, 8))
    assert list(lengths) != sorted(lengths)
    assert lengths == workloads.spread_lengths(16, 8, 128)
    assert sorted(workloads.spread_lengths(3, 5, 6)) == [5, 5, 6]
    assert workloads.spread_lengths(2, 7, 7) == (7, 7)


def test_ragged_inputs_are_padded_and_padding_is_not_compared() -> None:
    workload = workloads.parse("bert-tiny:3x2-6")
    model = workload.build()
    model.config.pad_token_id = 5  # not the id that an absent one would give
    inputs = workload.inputs(model)
    mask = inputs["attention_mask"]
    assert mask.sum(1).tolist() == list(workload.lengths)
    assert (inputs["input_ids"][mask == 0] == 5).all()
    assert (inputs["input_ids"][mask == 1] >= 1000).all()
    assert not torch.equal(inputs["input_ids"], workload.inputs(model, seed=1)["input_ids"])

    (output,) = workload.forward(model, inputs)
    wrong_at_padding = torch.where(mask.bool().unsqueeze(-1), output, torch.nan)
    assert output.shape == (3, 6, 128)
    (real,) = workload.real_tokens([output])
    assert real.shape == (12, 128)
    assert torch.equal(real, workload.real_tokens([wrong_at_padding])[0])


def test_the_pooler_is_left_out() -> None:
    assert workloads.parse("bert-tiny:1x8").build().pooler is None


def test_writing_is_as_long_as_asked_for() -> None:
    workload = workloads.parse("t5-small:2x7+5")
    model = workload.build()
    inputs = workload.inputs(model)
    assert inputs["input_ids"].shape == (2, 7)
    (tokens,) = workload.forward(model, inputs)
    assert tokens.shape == (2, 5)
    assert tokens.is_floating_point()
    assert workload.real_tokens([tokens])[0] is tokens


@pytest.mark.parametrize("name", workloads.WRITING)
def test_the_models_that_write_exist(name: str) -> None:
    assert f"{workloads.parse(name).tokens}+{workloads.parse(name).new}" == name.split("x")[1]


def test_decoders_write_greedily() -> None:
    workload = workloads.parse("gpt2:1x4+3")
    assert (workload.tokens, workload.new) == (4, 3)
    with torch.device("meta"):
        assert type(workload.build()).__name__ == "GPT2LMHeadModel"


def test_graph_networks() -> None:
    workload = workloads.parse("SAGE:50x200")
    model = workload.build()
    inputs = workload.inputs(model)
    assert inputs["x"].shape == (50, 128)
    assert inputs["edge_index"].shape == (2, 200)
    (rows,) = workload.forward(model, inputs)
    assert rows.shape == (50, 40)
    assert torch.equal(rows, workload.forward(workload.build(), workload.inputs(model))[0])


def test_writing_is_for_models_that_generate_text() -> None:
    with pytest.raises(ValueError, match="bert-tiny only reads"):
        workloads.parse("bert-tiny:1x8+8")
    with pytest.raises(ValueError, match="one to write"):
        workloads.parse("t5-small:1x8+0")
