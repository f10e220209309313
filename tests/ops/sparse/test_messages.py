"""Messages of several parts and their reductions against plain torch: parts, layouts, widths, gradients; and rows in segments."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from hf_cpu_accel.ops import sparse
from hf_cpu_accel.ops.messages import messages, reference
from hf_cpu_accel.ops.segment_matmul import segment_matmul
from tests.ops.sparse.cases import csr

OPS = torch.ops.hf_cpu_accel
WIDTHS = (17, 145)
ALL = ",".join(messages.AGGREGATES)


def parts(width: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A graph of 41 targets, of which some have no edges, and 53 sources; and every part that a message can have."""
    rowptr, col = csr(41, 53, 300)
    # Multiples of 1/8 tie often, and their sums are exact: extremes are the same in whatever order they are made.
    x, target, edge = (torch.randn(rows, width).mul(8).round().div(8).to(dtype) for rows in (53, 41, 310))
    order = torch.randperm(310)[:300].int()
    return {"rowptr": rowptr, "col": col, "x": x, "target": target, "edge": edge, "order": order}


def forms(given: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """With and without the parts that need not be there."""
    found = []
    for with_target, with_edge in itertools.product((False, True), repeat=2):
        left_out = set() if with_target else {"target"}
        left_out = left_out | (set() if with_edge else {"edge", "order"})
        found.append({name: part for name, part in given.items() if name not in left_out})
    return found


def check_messages(seed: int = 0) -> None:
    """Called for every instruction-set tier."""
    torch.manual_seed(seed)
    for width, dtype in itertools.product(WIDTHS, sparse.KERNEL_DTYPES):
        tolerance = 1e-4 if dtype is torch.float32 else 2e-2
        for form, relu in itertools.product(forms(parts(width, dtype)), (False, True)):
            rowptr, col, x, *_ = form.values()
            rest = [form.get("order"), x, form.get("target"), form.get("edge"), relu]
            output, ties = OPS.message_reduce(rowptr, col, *rest, ALL, True, None, None, None)
            expected = reference.message_reduce_reference(rowptr, col, *rest, ALL, True)
            torch.testing.assert_close(output, expected[0], rtol=tolerance, atol=tolerance)
            if dtype is torch.float32:
                assert torch.equal(ties, expected[1])
            written = OPS.edge_messages(rowptr, col, *rest, None, None, None)
            torch.testing.assert_close(written, reference.edge_messages_reference(rowptr, col, *rest))
    check_gradients(40)


def check_gradients(width: int) -> None:
    for form, relu in itertools.product(forms(parts(width)), (False, True)):
        for reduces in (("sum", "max"), ("mean", "min", "max", "std"), ("var",)):
            _same_gradients(form, relu, reduces)
        learned = {name: part.requires_grad_() for name, part in form.items() if part.is_floating_point()}
        arguments = [
            form["rowptr"],
            form["col"],
            form.get("order"),
            form["x"],
            form.get("target"),
            form.get("edge"),
        ]
        _same(
            messages.edge_messages(**form, relu=relu),
            reference.edge_messages_reference(*arguments, relu),
            learned,
        )


def _same_gradients(form: dict[str, Tensor], relu: bool, reduces: tuple[str, ...]) -> None:
    learned = {name: part.requires_grad_() for name, part in form.items() if part.is_floating_point()}
    output = messages.message_reduce(**form, reduces=reduces, relu=relu)
    arguments = [
        form["rowptr"],
        form["col"],
        form.get("order"),
        form["x"],
        form.get("target"),
        form.get("edge"),
    ]
    expected = reference.message_reduce_reference(*arguments, relu, ",".join(reduces), False)[0]
    _same(output, expected, learned)


def _same(output: Tensor, expected: Tensor, learned: dict[str, Tensor]) -> None:
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    weights = torch.randn(output.shape)
    grads = [torch.autograd.grad((y * weights).sum(), list(learned.values())) for y in (output, expected)]
    for name, ours, theirs in zip(learned, *grads, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-3, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_reductions_and_messages() -> None:
    check_messages()


def test_gradients_of_the_reference_in_double() -> None:
    """What the kernels are tested against is itself right."""
    form = {name: part.double() if part.is_floating_point() else part for name, part in parts(3).items()}
    leaves = [torch.randn_like(form[name], requires_grad=True) for name in ("x", "target", "edge")]

    def run(x: Tensor, target: Tensor, edge: Tensor) -> Tensor:
        given = {**form, "x": x, "target": target, "edge": edge}
        return messages.message_reduce(**given, reduces=("sum", "max", "var"), relu=True)

    assert torch.autograd.gradcheck(run, leaves)


def test_rows_of_their_own() -> None:
    """col=None: entry e has row e of x; entries of no row count for nothing."""
    rowptr = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    x = torch.randn(7, 9, requires_grad=True)
    for reduces in (("sum", "max"), ("mean", "std")):
        output = messages.message_reduce(rowptr, None, x, reduces)
        expected = reference.message_reduce_reference(
            rowptr, None, None, x, None, None, False, ",".join(reduces), False
        )[0]
        _same(output, expected, {"x": x})
    assert not messages.edge_messages(rowptr, None, x)[5:].any()


def test_layouts_and_threads_change_nothing() -> None:
    form = parts(24)
    expected = messages.message_reduce(**form, reduces=messages.AGGREGATES)
    wide = {
        name: torch.zeros(len(form[name]), 48)[:, ::2].copy_(form[name]) for name in ("x", "target", "edge")
    }
    assert torch.equal(messages.message_reduce(**{**form, **wide}, reduces=messages.AGGREGATES), expected)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert torch.equal(messages.message_reduce(**form, reduces=messages.AGGREGATES), expected)
    finally:
        torch.set_num_threads(threads)


def test_variance_is_not_drowned_by_what_messages_share() -> None:
    rowptr, col = csr(5, 6, 60)
    x = torch.randn(6, 8)
    far = messages.message_reduce(rowptr, col, x + 1000.0, ("var",))
    near = messages.message_reduce(rowptr, col, (x + 1000.0) - 1000.0, ("var",))
    torch.testing.assert_close(far, near, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("reduce", messages.AGGREGATES)
def test_nan_is_not_hidden(reduce: str) -> None:
    form = parts(20)
    form["x"][int(form["col"][1]), 7] = torch.nan
    output = messages.message_reduce(**form, reduces=(reduce,))
    arguments = [form["rowptr"], form["col"], form["order"], form["x"], form["target"], form["edge"]]
    expected = reference.message_reduce_reference(*arguments, False, "sum", False)[0]
    assert torch.equal(output.isnan(), expected.isnan())


def test_bad_arguments_are_named() -> None:
    form = parts(16)
    for change, error, message in (
        ({"reduces": ("median",)}, ValueError, "median"),
        ({"reduces": ()}, ValueError, "one or more"),
        ({"target": torch.zeros(3, 16)}, ValueError, r"target of shape \(3, 16\)"),
        ({"edge": torch.zeros(310, 4)}, ValueError, r"edge of shape \(310, 4\)"),
        ({"target": torch.zeros(41, 16).double()}, TypeError, "target is torch.float64"),
        ({"order": torch.full((300,), 310, dtype=torch.int32)}, RuntimeError, "rows that exist"),
        ({"col": torch.full((300,), -1, dtype=torch.int32)}, RuntimeError, "rows that exist"),
        ({"order": torch.zeros(7, dtype=torch.int32)}, RuntimeError, "as long as col"),
    ):
        with pytest.raises(error, match=message):
            messages.message_reduce(**{"reduces": ("sum",), **form, **change})
    with pytest.raises(ValueError, match="2 segments"):
        segment_matmul(torch.zeros(3, 4), [1, 3], torch.zeros(3, 4, 5))


def test_segments_have_weights_of_their_own() -> None:
    x = torch.randn(9, 6, requires_grad=True)
    ends = [4, 4, 9]
    for shape in ((3, 6, 5), (3, 2, 3, 4)):
        weight = torch.randn(shape, requires_grad=True)
        dense = weight if weight.dim() == 3 else torch.stack([torch.block_diag(*blocks) for blocks in weight])
        expected = torch.cat([x[:4] @ dense[0], x[4:] @ dense[2]])
        _same(segment_matmul(x, ends, weight), expected, {"x": x, "weight": weight})


def test_opcheck() -> None:
    form = {
        name: part.requires_grad_() if part.is_floating_point() else part for name, part in parts(8).items()
    }
    graph, rest = (
        (form["rowptr"], form["col"], form["order"]),
        (form["x"], form["target"], form["edge"], True),
    )
    turned = sparse.csr_transpose(form["rowptr"], form["col"], 53)
    torch.library.opcheck(OPS.message_reduce, (*graph, *rest, "mean,max,std", True, *turned))
    torch.library.opcheck(OPS.edge_messages, (*graph, *rest, *turned))
    plain = [part.detach() for part in rest[:3]]
    table = torch.randn(41, 8)
    torch.library.opcheck(OPS.message_grad_edges, (*graph, *plain, True, table, "base", True, True))
    torch.library.opcheck(OPS.message_grad_sources, (*turned[:2], *plain[:2], True, table, "base"))
    weight = torch.randn(2, 8, 3, requires_grad=True)
    torch.library.opcheck(OPS.segment_matmul, (form["x"], [20, 53], weight))
