"""What is remembered of a tensor: for the same object with the same values, and for nothing else."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_cpu_accel.guard import values as module
from hf_cpu_accel.lazy.remember import Memo, remember

EDITS: dict[str, Callable[[Tensor], object]] = {
    "add_": lambda tensor: tensor.add_(1),
    "a view": lambda tensor: tensor.view(-1)[2:3].fill_(7),
    "an index": lambda tensor: tensor.__setitem__((0, 0), 9),
    "copy_": lambda tensor: tensor.copy_(torch.full((2, 3), 5)),
    "set_": lambda tensor: tensor.set_(torch.full((2, 3), 4)),
    "resize_": lambda tensor: tensor.resize_(1, 3),
    "other strides": lambda tensor: tensor.as_strided_((2, 3), (1, 2)),
    "other storage": lambda tensor: setattr(tensor, "data", torch.full((2, 3), 3)),
}
UNCOUNTED: dict[str, Callable[[Tensor], object]] = {
    ".data": lambda tensor: tensor.data.fill_(8),
    "numpy": lambda tensor: tensor.numpy().fill(8),
}


def values(tensor: Tensor, **options: object) -> list[object]:
    return remember(tensor, "values", lambda: tensor.clone().tolist(), **options)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("edit", EDITS.values(), ids=list(EDITS))
def test_an_edited_tensor_is_another_one(edit: Callable[[Tensor], object], inference: bool) -> None:
    with torch.inference_mode(inference):
        tensor = torch.arange(6).view(2, 3).clone()
        known = values(tensor)
        assert values(tensor) is known
        edit(tensor)
        assert values(tensor) == tensor.tolist()


@pytest.mark.parametrize("edit", UNCOUNTED.values(), ids=list(UNCOUNTED))
def test_writes_past_torch_are_seen_in_what_is_compared_by_value(edit: Callable[[Tensor], object]) -> None:
    tensor = torch.arange(6).view(2, 3).clone()
    known = values(tensor, by_value=True)
    assert values(tensor, by_value=True) is known
    edit(tensor)
    assert values(tensor, by_value=True) == tensor.tolist()


@pytest.mark.parametrize("edit", UNCOUNTED.values(), ids=list(UNCOUNTED))
@pytest.mark.parametrize("shape", [(2, 3), (700, 30), (0,)])
def test_writes_past_torch_to_a_whole_tensor_are_seen_in_a_sample(
    edit: Callable[[Tensor], object], shape: tuple[int, ...]
) -> None:
    tensor = torch.zeros(shape)
    known = values(tensor, by_sample=True)
    assert values(tensor, by_sample=True) is known
    edit(tensor)
    assert values(tensor, by_sample=True) == tensor.tolist()


def test_large_tensors_without_versions_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_COPIED", 40)
    with torch.inference_mode():
        small, large = torch.ones(5), torch.ones(11, dtype=torch.float32)
        assert values(small) is values(small)
        assert values(large) is not values(large)
    counted = torch.ones(11)
    assert values(counted, by_value=True) is values(counted, by_value=True)  # by its version
    counted.add_(1)
    assert values(counted, by_value=True) == counted.tolist()


def test_keys_and_other_tensors_tell_results_apart() -> None:
    tensor, other = torch.ones(3), torch.ones(3)

    def both(key: str, also: Tensor | None) -> object:
        return remember(tensor, key, object, also=(also,))

    known = both("a", other)
    assert both("a", other) is known
    assert both("b", other) is not known
    assert both("a", None) is not both("a", other)
    known = both("a", other)
    other.add_(1)
    assert both("a", other) is not known


def test_results_go_with_their_tensors_and_are_bounded() -> None:
    memo = Memo(most=3)
    tensors = [torch.ones(2) for _ in range(5)]
    for tensor in tensors:
        memo.get(tensor, "itself", lambda tensor=tensor: tensor)  # would keep itself alive
    assert len(memo) == 3
    memo.clear()
    memo.get(tensors[0], "key", object)
    memo.get(tensors[1], "key", object, also=(tensors[2],))
    del tensors[0]
    gc.collect()
    assert len(memo) == 1
    del tensors[1]
    gc.collect()
    assert len(memo) == 0


def test_threads_that_ask_and_edit() -> None:
    """Each thread edits a tensor of its own and looks at a common one."""
    memo, common, errors = Memo(most=8), torch.arange(4), []

    def work(seed: int) -> None:
        own = torch.full((3,), seed)
        for step in range(300):
            own.add_(step)
            if memo.get(own, "sum", lambda: own.sum().item()) != own.sum().item():
                errors.append(seed)
            if memo.get(common, "sum", lambda: 6) != 6:
                errors.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
