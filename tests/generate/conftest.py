import pytest

from tests.generate.replaying import count_replayed


@pytest.fixture
def loops(monkeypatch):
    """The lengths of the prompts that went through our loops, in order."""
    from hf_cpu_accel.generate import hook

    calls = []

    def counting(loop):
        def counted(model, input_ids, *args, **kwargs):
            calls.append(input_ids.shape[1])
            return loop(model, input_ids, *args, **kwargs)

        return counted

    for name in ("decode", "beam_search"):
        monkeypatch.setattr(hook, name, counting(getattr(hook, name)))
    return calls


@pytest.fixture
def replayed(monkeypatch):
    """A list with one entry for each replayed step: whether it was as predicted."""
    return count_replayed(monkeypatch)
