from hf_cpu_accel.providers.autotune import NATIVE, autotune


class Machine:
    """A clock that only calls move: call i of `name` takes times[name][i], the last time for ever."""

    def __init__(self, **times):
        self.now = 0.0
        self.times = {name: list(values) for name, values in times.items()}
        self.calls = dict.fromkeys(times, 0)

    def run(self):
        return autotune({name: self._runner(name) for name in self.times}, clock=lambda: self.now)

    def _runner(self, name):
        def call():
            values = self.times[name]
            self.now += values[min(self.calls[name], len(values) - 1)]
            self.calls[name] += 1

        return call


def test_ours_stays_unless_another_is_clearly_faster():
    assert Machine(own=[1.0], other=[0.98]).run().winner == NATIVE
    result = Machine(own=[1.0], other=[0.96]).run()
    assert result.winner == "other"
    assert result.seconds == {"own": 1.0, "other": 0.96}
    assert result.steady


def test_the_fastest_of_several_wins():
    assert Machine(own=[1.0], slower=[0.9], faster=[0.8]).run().winner == "faster"


def test_one_lucky_round_does_not_win():
    # Two calls before the first round.
    assert Machine(own=[1.0], other=[1, 1, 0.5, 1.1]).run().winner == NATIVE


def test_one_unlucky_round_does_not_lose():
    assert Machine(own=[1.0], other=[0.9, 0.9, 0.9, 5.0, 0.9]).run().winner == "other"


def test_scattered_times_need_a_long_lead():
    ours = [1, 1, 1.0, 1.4, 1.4, 1.4, 1.4]
    assert Machine(own=ours, other=[1, 1, 0.9, 1.1]).run().winner == NATIVE  # faster in every round
    assert Machine(own=ours, other=[1, 1, 0.5, 0.7]).run().winner == "other"


def test_the_hopeless_cost_one_round():
    machine = Machine(own=[1.0], slow=[2.0])
    machine.run()
    assert machine.calls == {"own": 3, "slow": 3}


def test_short_calls_are_repeated():
    machine = Machine(own=[1e-4], slow=[2e-4])
    assert machine.run().seconds["own"] - 1e-4 < 1e-9
    assert machine.calls["own"] == 2 + 3


def test_scattered_times_are_not_steady():
    machine = Machine(own=[1, 1, 1, 2, 2, 2, 2], other=[0.5])
    result = machine.run()
    assert result.winner == "other"
    assert not result.steady
