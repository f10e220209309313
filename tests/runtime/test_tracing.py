"""What is constant while a graph is traced is marked as torch marks it: the test that fails says that torch's mark has changed."""

import torch

from hf_cpu_accel.runtime.tracing import constant_while_traced


def test_the_mark_is_torchs() -> None:
    ours = constant_while_traced(lambda: True)
    theirs = torch.compiler.assume_constant_result(lambda: True)
    assert vars(ours) == vars(theirs) != {}


def test_what_is_marked_is_asked_once_for_each_graph() -> None:
    asked: list[int] = []

    @constant_while_traced
    def is_on() -> bool:
        asked.append(1)
        return True

    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x if is_on() else x

    compiled = torch.compile(double, backend="eager", fullgraph=True)
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    assert len(asked) == 1
