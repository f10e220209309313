import copy
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.rewrite.linear import dispatch
from hf_cpu_accel.rewrite.linear.match import pack

WIDTH = 64


@pytest.fixture
def linears():
    made = [nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 64, bias=False), nn.Linear(WIDTH, 20)]
    return [linear.requires_grad_(False) for linear in made]  # as those of an accelerated model are


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
        monkeypatch.setattr(dispatch, name, counting(getattr(dispatch, name)))
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


def test_one_recorded_forward_tells_which_members_share_an_input(linears, gemms):
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
    assert _forget(gemms) == [32, 64, 20, 32, 84]  # recorded, then joined
    assert packed[0].group.runs == {1: (1, 2)}


def test_another_input_than_the_leaders_is_computed_on_its_own(linears):
    packed, input = pack(linears, "float32"), torch.randn(4, WIDTH)
    _check(packed, linears, input, input, input)
    _check(packed, linears, input, torch.randn(4, WIDTH), input.clone())


@pytest.mark.parametrize("inference", [False, True])
def test_an_input_changed_in_between_gives_no_stale_result(linears, inference):
    """Neither while the members' forward is recorded nor after it was."""
    with torch.inference_mode(inference), torch.no_grad():
        packed, input = pack(linears, "float32"), torch.randn(4, WIDTH)
        for writes in (True, True, False, False, False, True, False, True):
            for member, linear in zip(packed, linears, strict=True):
                torch.testing.assert_close(member(input), linear(input), rtol=1e-5, atol=1e-5)
                if writes:
                    input.add_(1.0)


@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
def test_hooks_of_members_see_and_change_each_of_them(linears, kind):
    packed, input = pack(linears, "float32"), torch.randn(4, WIDTH)
    for _ in range(3):
        _check(packed, linears, input, input, input)

    def double(module, args, *output):
        args[0].mul_(2.0)

    handle = getattr(packed[1], f"register_{kind}_hook")(double)
    for inference in (False, True):
        with torch.inference_mode(inference):
            given = torch.randn(1, WIDTH)
            before = given.clone()
            outputs = [member(given) for member in packed]
            inputs = [before, before * 2 if kind == "forward_pre" else before, before * 2]
            for output, linear, own in zip(outputs, linears, inputs, strict=True):
                torch.testing.assert_close(output, linear(own), rtol=1e-5, atol=1e-5)
    handle.remove()
    _check(packed, linears, input, input, input)


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


def test_another_path_of_the_host_is_recorded_too(linears, gemms):
    """Self-attention, then cross-attention, then self-attention again, where only key and value go on together."""
    packed, ran = pack(linears, "float32"), []
    for cross in (False, True, False):
        for _ in range(4):
            query, memory = torch.randn(1, 2, WIDTH), torch.randn(1, 4, WIDTH)
            _check(packed, linears, query, *(memory if cross else query for _ in range(2)))
        ran.append(_forget(gemms))
    assert [gemm[-2:] for gemm in ran] == [[116, 116], [32, 84], [32, 84]]


def test_a_host_that_goes_on_changing_its_path_is_served_one_by_one(linears, gemms):
    packed = pack(linears, "float32")
    for step in range(60):
        query, memory = torch.randn(1, 2, WIDTH), torch.randn(1, 4, WIDTH)
        _check(packed, linears, query, *(memory if step % 2 else query for _ in range(2)))
    _forget(gemms)
    for step in range(4):
        query, memory = torch.randn(1, 2, WIDTH), torch.randn(1, 4, WIDTH)
        _check(packed, linears, query, *(memory if step % 2 else query for _ in range(2)))
    assert 116 not in gemms  # nothing is computed in vain


def test_holds_no_input_alive_after_the_last_member(linears):
    packed, input = pack(linears, "float32"), torch.randn(4, WIDTH)
    for _ in range(3):
        _check(packed, linears, input, input, input)
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


def test_the_first_forward_of_an_accelerated_model_is_the_recorded_one(linears, gemms):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value = linears

        def forward(self, x):
            return self.query(x).sum() + self.key(x).sum() + self.value(x).sum()

    model = accelerate_for_cpu(nn.Sequential(Block()).eval(), dtype="float32")
    for _ in range(2):
        with torch.no_grad():
            model(torch.randn(3, WIDTH))
    assert gemms[-1] == 116
