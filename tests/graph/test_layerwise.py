"""Embeddings by layers and chunks: what the whole model gives, from files and into files."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.graph import inference

NODES, FEATURES = 60, 12
MODELS = {
    "gcn": lambda: pyg.GCN(FEATURES, 16, 3, out_channels=5, norm="batch_norm"),
    "gcn last": lambda: pyg.GCN(FEATURES, 16, 2, out_channels=5, jk="last", act_first=True),
    "sage": lambda: pyg.GraphSAGE(
        FEATURES, 16, 2, out_channels=5, norm="layer_norm", norm_kwargs={"mode": "node"}
    ),
    "gin": lambda: pyg.GIN(FEATURES, 16, 2, out_channels=5),
    "gat": lambda: pyg.GAT(FEATURES, 16, 2, out_channels=6, heads=2, v2=True),
    "edge": lambda: pyg.EdgeCNN(FEATURES, 16, 2, out_channels=5),
}


@pytest.fixture
def x() -> Tensor:
    return torch.randn(NODES, FEATURES)


@pytest.fixture
def edge_index() -> Tensor:
    return torch.randint(0, NODES - 4, (2, 300))


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_whole_models_answer(name: str, accelerated: bool, x: Tensor, edge_index: Tensor) -> None:
    model = MODELS[name]().eval()
    expected = model(x, edge_index).detach()
    if accelerated:
        accelerate_for_cpu(model, dtype="float32")
    for batch_size in (1, 17, 1000):
        output = inference(model, x, edge_index, batch_size=batch_size)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
        assert not output.requires_grad


def test_files(tmp_path: Path, x: Tensor, edge_index: Tensor, capsys: pytest.CaptureFixture[str]) -> None:
    """Features from a numpy.memmap, results in a file, nothing else left."""
    mapped = np.memmap(tmp_path / "x.bin", np.float32, "w+", shape=(NODES, FEATURES))
    mapped[:] = x.numpy()
    model = accelerate_for_cpu(pyg.GraphSAGE(FEATURES, 16, 3, out_channels=5).eval(), dtype="float32")
    file = tmp_path / "embeddings.bin"
    output = inference(
        model, torch.from_numpy(mapped), edge_index, batch_size=20, out=file, progress_bar=True
    )
    assert "9/9" in capsys.readouterr().err
    torch.testing.assert_close(output, model(x, edge_index), rtol=1e-4, atol=1e-5)
    stored = torch.from_file(str(file), size=NODES * 5).view(NODES, 5)
    assert torch.equal(stored, output)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["embeddings.bin", "x.bin"]


def test_bfloat16_and_no_nodes(x: Tensor, edge_index: Tensor) -> None:
    model = pyg.GraphSAGE(FEATURES, 16, 2, out_channels=5).eval().bfloat16()
    expected = model(x.bfloat16(), edge_index)
    output = inference(model, x.bfloat16(), edge_index, batch_size=9)
    assert output.dtype is torch.bfloat16
    torch.testing.assert_close(output, expected, rtol=5e-2, atol=5e-2)
    none = inference(model, x[:0].bfloat16(), edge_index[:, :0])
    assert none.shape == (0, 5)


def test_what_cannot_be_cut_into_chunks(x: Tensor, edge_index: Tensor) -> None:
    graph_norm = pyg.GraphSAGE(FEATURES, 16, 2, norm="graph_norm").eval()
    for model, problem, error in (
        (torch.nn.Linear(FEATURES, 3).eval(), "with layers", TypeError),
        (pyg.GraphSAGE(FEATURES, 16, 2), "training mode", ValueError),
        (pyg.GraphSAGE(FEATURES, 16, 2, jk="cat").eval(), "jk='cat'", ValueError),
        (graph_norm, "a norm reads other nodes", ValueError),
    ):
        with pytest.raises(error, match=problem):
            inference(model, x, edge_index)
    model = MODELS["sage"]().eval()
    with pytest.raises(ValueError, match="batch_size=0"):
        inference(model, x, edge_index, batch_size=0)
    with pytest.raises(ValueError, match="processes=0: expected an integer of at least 1"):
        inference(model, x, edge_index, processes=0)
    with pytest.raises(ValueError, match=r"expected \[nodes, 12\]"):
        inference(model, x[:, :5], edge_index)
    with pytest.raises(RuntimeError, match="out of range"):
        inference(model, x, edge_index + NODES)


@pytest.mark.parametrize("to_file", [False, True])
@pytest.mark.parametrize("name", ["gcn", "sage", "gat"])
def test_two_processes_give_what_one_gives(
    name: str,
    to_file: bool,
    x: Tensor,
    edge_index: Tensor,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Bit for bit, as the chunks are the same; and what the whole graph gives."""
    model = accelerate_for_cpu(MODELS[name]().eval(), dtype="float32")
    torch.set_num_threads(2)
    out = tmp_path / "embeddings.bin" if to_file else None
    one = inference(model, x, edge_index, batch_size=7)
    two = inference(model, x, edge_index, batch_size=7, processes=2, out=out, progress_bar=True)
    assert torch.equal(one, two)
    torch.testing.assert_close(two, model(x, edge_index), rtol=1e-4, atol=1e-5)
    steps = model.num_layers * -(-NODES // 7)
    assert f"{steps}/{steps}" in capsys.readouterr().err
    assert torch.get_num_threads() == 2


def test_more_processes_than_chunks(x: Tensor, edge_index: Tensor) -> None:
    model = MODELS["sage"]().eval()
    assert torch.equal(
        inference(model, x, edge_index, processes=8), inference(model, x, edge_index, processes=1)
    )


class Fails(torch.nn.ReLU):
    """An activation that fails in any process but the one that made it."""

    def __init__(self, how: Callable[[], object]) -> None:
        super().__init__()
        self.home, self.how = os.getpid(), how

    def forward(self, input: Tensor) -> Tensor:
        if os.getpid() != self.home:
            self.how()
        else:
            time.sleep(0.02)  # so that the others get a chunk
        return super().forward(input)


def fall_over() -> None:
    raise ZeroDivisionError("on purpose")


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "told"), [(fall_over, "ZeroDivisionError: on purpose"), (be_killed, "exited with code -9")]
)
def test_another_process_that_fails_is_told_of(
    how: Callable[[], object], told: str, x: Tensor, edge_index: Tensor
) -> None:
    model = pyg.GraphSAGE(FEATURES, 16, 2, out_channels=5, act=Fails(how)).eval()
    with pytest.raises(RuntimeError, match=told):
        inference(model, x, edge_index, batch_size=2, processes=2)
    assert not multiprocessing.active_children()
