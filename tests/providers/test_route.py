import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hf_cpu_accel.packing.linear import pack_linear
from hf_cpu_accel.providers.autotune import NATIVE
from hf_cpu_accel.providers.choice import FEWEST_ROWS
from hf_cpu_accel.providers.route import Route
from hf_cpu_accel.rewrite.linear.dispatch import LinearWork, Part

WIDTH, FEATURES = 32, 48


class SpiedWork(LinearWork):
    """Notes who does the work."""

    def __init__(self):
        super().__init__(Part(pack_linear(torch.randn(FEATURES, WIDTH), "float32"), torch.randn(FEATURES)))
        self.done = []

    def own(self, *inputs):
        self.done.append(NATIVE)
        return super().own(*inputs)

    def by(self, provider):
        run = super().by(provider)

        def noted(*inputs):
            self.done.append(provider.name)
            return run(*inputs)

        return noted


@pytest.fixture
def work():
    return SpiedWork()


def served(route, input):
    """Who served `input`, when all is measured."""
    route(input)
    route.work.done.clear()
    route(input)
    (name,) = route.work.done
    return name


def test_the_winner_serves_its_range_and_nothing_else(work, force):
    measurements = force("oneDNN")
    route = Route(work, measured=True)
    expected = work.own(torch.ones(20, WIDTH))
    torch.testing.assert_close(route(torch.ones(20, WIDTH)), expected)
    assert served(route, torch.randn(4, 5, WIDTH)) == "oneDNN"
    assert served(route, torch.randn(FEWEST_ROWS - 1, WIDTH)) == NATIVE
    assert served(route, torch.randn(WIDTH)) == NATIVE
    assert served(route, torch.randn(0, WIDTH)) == NATIVE
    assert len(measurements.held) == 1
    measurements.winner = NATIVE
    assert served(route, torch.randn(33, WIDTH)) == NATIVE
    assert route.elsewhere() == {(17, 32): "oneDNN"}


def test_known_ranges_are_looked_up_only(work, force, monkeypatch):
    force("oneDNN")
    route = Route(work, measured=True)
    route(torch.randn(20, WIDTH))
    monkeypatch.setattr(Route, "_decide", None)
    route(torch.randn(32, WIDTH))


def test_not_measured_is_ours_without_a_question(work, force):
    measurements = force("oneDNN")
    assert served(Route(work, measured=False), torch.randn(20, WIDTH)) == NATIVE
    assert measurements.held == []


def test_settings_have_tables_of_their_own(work, force):
    measurements = force("oneDNN")
    route = Route(work, measured=True)
    for dtype, threads in [(torch.float32, 1), (torch.bfloat16, 1), (torch.float32, 2)] * 2:
        torch.set_num_threads(threads)
        output = route(torch.randn(20, WIDTH).to(dtype))
        assert output.dtype is dtype
    assert len(measurements.held) == 3
    assert work.part.copies.nbytes == 4 * WIDTH * FEATURES


def test_losers_copies_are_freed(work, force):
    force(NATIVE)
    Route(work, measured=True)(torch.randn(20, WIDTH))
    assert work.part.copies.nbytes == 0


def test_a_provider_that_is_gone_is_replaced_by_ours(work, force, monkeypatch):
    force("oneDNN")
    monkeypatch.setattr("hf_cpu_accel.providers.route.provider_named", lambda name, dtype: None)
    assert served(Route(work, measured=True), torch.randn(20, WIDTH)) == NATIVE


def test_measuring_leaves_the_random_numbers_alone(work, force):
    force("oneDNN")
    input = torch.randn(20, WIDTH)
    before = torch.get_rng_state()
    Route(work, measured=True)(input)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("decided", [False, True])
def test_graphs_hold_our_op(work, force, decided):
    measurements = force("oneDNN")
    work = LinearWork(work.part)
    route = Route(work, measured=True)
    if decided:
        route(torch.randn(20, WIDTH))
    held = len(measurements.held)
    input, graphs = torch.randn(20, WIDTH), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: route(x) * 2, backend=backend, fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(input), work.own(input) * 2)
    compiled(torch.randn(50, WIDTH))
    assert len(graphs) == 1
    traced = torch.jit.trace(route.__call__, input, check_trace=False)
    torch.testing.assert_close(traced(input), work.own(input))
    symbolic = make_fx(route.__call__, tracing_mode="symbolic", _allow_non_fake_inputs=True)(input)
    for text in (str(graphs[0].graph), str(traced.graph), str(symbolic.graph)):
        assert "hf_cpu_accel" in text
        assert "mkldnn" not in text
    assert len(measurements.held) == held


def test_autocast_is_served_by_ours(work, force):
    force("BLAS")
    route, input = Route(work, measured=True), torch.randn(20, WIDTH)
    assert served(route, input) == "BLAS"
    work.done.clear()
    with torch.autocast("cpu", torch.bfloat16):
        assert route(input).dtype is torch.float32
    assert work.done == [NATIVE]
