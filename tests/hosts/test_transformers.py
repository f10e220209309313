import pytest
import torch
from transformers import BertConfig, BertModel, Pipeline

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.hosts.find import find

CONFIG = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "vocab_size": 50,
}


class PlainPipeline(Pipeline):
    """A pipeline that takes ids as words."""

    def _sanitize_parameters(self, **kwargs):
        return {}, {}, {}

    def preprocess(self, input_, **parameters):
        return {"input_ids": torch.tensor([[int(word) for word in input_.split()]])}

    def _forward(self, input_tensors, **parameters):
        return self.model(**input_tensors)

    def postprocess(self, model_outputs, **parameters):
        return model_outputs.last_hidden_state


@pytest.fixture
def model():
    return BertModel(BertConfig(**CONFIG)).eval()


def test_a_model_is_its_own_root(model):
    (root,) = find(model)
    assert root.module is model
    assert root.host == "transformers"


def test_a_pipeline_is_accelerated_through_its_model(model):
    pipe = PlainPipeline(model=model, tokenizer=None, device="cpu")
    assert find(pipe)[0].module is model
    before = pipe("1 2 3")
    assert accelerate_for_cpu(pipe, dtype="float32") is pipe
    assert pipe.model is model
    torch.testing.assert_close(pipe("1 2 3"), before, rtol=1e-4, atol=1e-5)
    modules = list(model.modules())
    accelerate_for_cpu(model, dtype="float32")
    assert list(model.modules()) == modules
    assert explain(pipe).to_dict() == explain(model).to_dict()
    assert restore(pipe) is pipe
    assert torch.equal(pipe("1 2 3"), before)


def test_a_pipeline_without_a_torch_model_is_refused(model):
    pipe = PlainPipeline(model=model, tokenizer=None, device="cpu")
    pipe.model = "elsewhere"
    with pytest.raises(TypeError, match=r"target\.model is a str; expected"):
        find(pipe)
