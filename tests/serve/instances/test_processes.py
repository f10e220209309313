"""`InstancePool` of processes: shared weights, what one that is killed takes along, and what comes after it."""

import os
import signal
import time

import psutil
import pytest
import torch
import transformers
from torch import nn

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.serve.instances import InstanceDied, InstancePool, messages
from hf_cpu_accel.serve.instances.work import Failed


def work(model, item):
    if item == "sleep":
        time.sleep(60)
    if item == "exit":
        os._exit(3)
    if item == "fail":
        raise KeyError("of the child")
    if item == "odd result":
        return lambda: None
    return os.getpid() if item == "pid" else item


@pytest.fixture
def pool():
    with InstancePool(None, 2, 1, kind="process", call=work) as made:
        yield made


def wait_until(condition, seconds=20):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    assert condition()


def test_generating_models_use_processes_with_equal_results():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = accelerate_for_cpu(transformers.LlamaForCausalLM(config).eval(), dtype="int8", threads=1)
    prompts = [torch.randint(4, 100, (1, 5 + number)) for number in range(4)]

    def generate(model, ids):
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)

    expected = [generate(model, ids) for ids in prompts]
    with InstancePool(model, 2, 1, call=generate) as pool:
        assert pool.kind == "process"
        answers = list(pool.map(prompts))
    assert all(torch.equal(one, two) for one, two in zip(answers, expected, strict=True))


def test_weights_are_shared():
    model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048)).eval()
    accelerate_for_cpu(model, dtype="float32", threads=1)
    packed = 2 * 2048 * 2048 * 4
    with InstancePool(model, 2, 1, kind="process") as pool:
        list(pool.map([torch.randn(1, 2048) for _ in range(8)]))
        for pid in pool.pids:
            assert psutil.Process(pid).memory_full_info().uss < packed / 2
        assert set(pool.pids).isdisjoint({os.getpid(), None})


def test_exceptions_come_back_with_their_traceback(pool):
    with pytest.raises(KeyError, match="of the child") as caught:
        pool.submit("fail").result()
    assert "in work" in str(caught.value.__cause__)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pool.submit("odd result").result()
    assert list(pool.map(["a", "b", "c"])) == ["a", "b", "c"]


def test_killed_processes_lose_only_their_item_and_are_replaced(pool):
    before = pool.pids
    lost = pool.submit("sleep")
    wait_until(lost.running)
    (at_work,) = set(before) - answering(pool)
    others = [pool.submit(number) for number in range(8)]
    os.kill(at_work, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(InstanceDied, match=str(at_work)):
        lost.result(20)
    assert [future.result(20) for future in others] == list(range(8))
    wait_until(lambda: len(set(pool.pids) - {None, at_work}) == 2)
    assert time.monotonic() - killed < 5
    assert answering(pool) <= set(pool.pids)


def answering(pool):
    """The processes that answer."""
    return {future.result(20) for future in [pool.submit("pid") for _ in range(6)]}


def test_a_process_that_is_killed_while_it_waits_is_replaced(pool):
    before = set(pool.pids)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not before & set(pool.pids) and None not in pool.pids, 5)
    assert list(pool.map(range(10))) == list(range(10))


def test_a_process_that_ends_itself(pool):
    given = list(pool.map([1, "exit", 2], return_exceptions=True))
    assert [given[0], given[2]] == [1, 2]
    assert isinstance(given[1], InstanceDied)


def test_the_fork_server_is_replaced_too(pool):
    before = {*pool.pids, pool._fork_server.pid}
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not before & {*pool.pids, pool._fork_server.pid} and None not in pool.pids)
    assert list(pool.map(range(10))) == list(range(10))


def test_no_process_remains(pool):
    family = {*pool.pids, pool._fork_server.pid}
    pool.close()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in family))


def test_processes_end_with_their_parent():
    child = os.fork()
    if child == 0:
        pool = InstancePool(None, 1, 1, kind="process", call=work)
        os.execv("/bin/sleep", ["sleep", str(60 + 0 * len(pool.pids))])
    wait_until(lambda: len(psutil.Process(child).children(recursive=True)) == 2)
    family = psutil.Process(child).children(recursive=True)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    wait_until(lambda: not any(process.is_running() for process in family))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_tensors_are_sent_unchanged(dtype):
    for tensor in (
        torch.randn(3, 5).to(dtype).t(),
        torch.tensor(1).to(dtype),
        torch.empty(0, 3, dtype=dtype),
    ):
        other = messages.loads(messages.dumps({"x": [tensor]}))["x"][0]
        assert other.dtype is dtype
        assert torch.equal(other, tensor)
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(messages.loads(messages.dumps(sparse)).to_dense(), torch.eye(3))


def test_exceptions_that_cannot_be_unpickled_are_described():
    class Odd(Exception):
        def __init__(self, one, two):
            super().__init__(f"{one} and {two}")

    reply = messages.loads(messages.dumps_reply([1, Failed(Odd("this", "that"))]))
    assert reply[0] == 1
    assert "this and that" in str(reply[1].error)
