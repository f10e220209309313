import copy
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn

from hf_cpu_accel.rewrite import served
from hf_cpu_accel.rewrite.linear import pack

WIDTH = 64


@pytest.fixture
def linears():
    return [nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 64, bias=False), nn.Linear(WIDTH, 20)]


@pytest.fixture
def gemms(monkeypatch):
    """The output features of every GEMM that ran."""
    calls = []

    def counting(op):
        def counted(input, weight, *rest, **options):
            calls.append(weight.out_features)
            return op(input, weight, *rest, **options)

        return counted

    for name in ("linear", "linear_split"):
        monkeypatch.setattr(served, name, counting(getattr(served, name)))
    return calls


def _check(packed, linears, *inputs):
    """Calls the members in order, member i with inputs[i], and compares with the originals."""
    with torch.no_grad():
        for member, linear, input in zip(packed, linears, inputs, strict=True):
            torch.testing.assert_close(member(input), linear(input), rtol=1e-5, atol=1e-5)


def _forget(gemms):
    done = list(gemms)
    gemms.clear()
    return done


def test_learns_which_members_share_an_input(linears, gemms):
    packed, input = pack(linears, "float32"), torch.randn(2, 5, WIDTH)
    _check(packed, linears, input, input, input)
    assert _forget(gemms) == [32, 64, 20]
    for _ in range(3):
        _check(packed, linears, input, input, input)
        assert _forget(gemms) == [116]
    other = torch.randn(1, 3, WIDTH)
    _check(packed, linears, other, other, other)
    assert gemms == [116]


def test_merged_outputs_are_contiguous_like_those_of_a_linear(linears):
    """Some models call q.view(-1, head_dim): a strided slice would break them from the second forward on."""
    packed, input = pack(linears, "float32"), torch.randn(2, 5, WIDTH)
    for _ in range(3):
        assert all(member(input).is_contiguous() for member in packed)


def test_cross_attention_merges_key_and_value_only(linears, gemms):
    packed = pack(linears, "float32")
    for _ in range(2):
        query, memory = torch.randn(1, 2, WIDTH), torch.randn(1, 4, WIDTH)
        _check(packed, linears, query, memory, memory)
    assert _forget(gemms) == [32, 64, 20, 32, 84]
    assert packed[0].group.runs == {1: (1, 2)}


def test_another_input_than_the_leaders_is_computed_on_its_own(linears):
    packed, input = pack(linears, "float32"), torch.randn(4, WIDTH)
    _check(packed, linears, input, input, input)
    _check(packed, linears, input, torch.randn(4, WIDTH), input.clone())


@pytest.mark.parametrize("inference", [False, True])
def test_an_input_changed_in_between_gives_no_stale_result(linears, inference):
    with torch.inference_mode(inference):
        packed, input = pack(linears, "float32"), torch.randn(4, WIDTH)
        for _ in range(3):
            for member, linear in zip(packed, linears, strict=True):
                torch.testing.assert_close(member(input), linear(input), rtol=1e-5, atol=1e-5)
                input.add_(1.0)


def test_slices_nobody_came_for_are_not_computed_again(linears, gemms):
    packed, input = pack(linears, "float32"), torch.randn(4, WIDTH)
    _check(packed, linears, input, input, input)
    _forget(gemms)
    for _ in range(3):
        _check(packed[:2], linears[:2], input, input)
    assert _forget(gemms) == [116, 96, 96]
    for _ in range(2):
        _check(packed[:1], linears[:1], input)
    assert gemms == [96, 32]


def test_stops_taking_notes(linears):
    group = pack(linears, "float32")[0].group
    with torch.no_grad():
        for _ in range(40):
            group.forward(0, torch.randn(1, WIDTH))
    assert group._lessons == 0
    assert group.runs == {}


def test_holds_no_input_alive(linears):
    packed, input = pack(linears, "float32"), torch.randn(4, WIDTH)
    _check(packed, linears, input, input, input)
    with torch.no_grad():
        packed[0](input)
    reference = weakref.ref(input)
    del input
    assert reference() is None


def test_threads_do_not_see_each_others_slices(linears):
    packed, input = pack(linears, "float32"), torch.randn(4, WIDTH)
    _check(packed, linears, input, input, input)
    errors = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        try:
            for _ in range(100):
                own = torch.randn(3, WIDTH, generator=generator)
                _check(packed, linears, own, own, own)
        except AssertionError as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))], ids=["copy", "pickle"]
)
def test_copies_share_one_packed_weight_and_what_was_learned(linears, gemms, clone):
    packed, input = pack(linears, "float32"), torch.randn(2, WIDTH)
    for _ in range(2):
        _check(packed, linears, input, input, input)
    twins = clone(nn.ModuleList(packed))
    assert len({id(twin.group) for twin in twins}) == 1
    assert twins[0].group.packed.data.data_ptr() != packed[0].group.packed.data.data_ptr()
    _forget(gemms)
    _check(twins, linears, input, input, input)
    assert gemms == [116]


def test_alone_while_compiling(linears, monkeypatch, gemms):
    packed, input = pack(linears, "float32"), torch.randn(2, WIDTH)
    for _ in range(2):
        _check(packed, linears, input, input, input)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    _forget(gemms)
    _check(packed, linears, input, input, input)
    assert gemms == [32, 64, 20]


def test_empty_inputs(linears):
    packed = pack(linears, "int8")
    for shape in ((0, 5, WIDTH), (2, 0, WIDTH)):
        input = torch.empty(shape)
        for _ in range(2):
            for member, linear in zip(packed, linears, strict=True):
                assert member(input).shape == linear(input).shape
