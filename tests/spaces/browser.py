"""Every Space in headless Chromium: click, wait, read, compare with Python, on a desk and on a phone. `make test-spaces` runs it.

Screenshots are left in build/spaces, to be looked at.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Page, Request, expect, sync_playwright
from scipy.io import wavfile
from transformers import pipeline

from tests.spaces.folders import FOLDERS, ROOT, module_of
from tests.spaces.whisper import write_whisper

PICTURES = ROOT / "build" / "spaces"
SECONDS = 180  # for a model to be loaded, or run twice, on a busy machine
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 400, "height": 800}


@contextmanager
def started(folder: str, variables: dict[str, str]) -> Iterator[str]:
    """`python app.py` as its README says, on a free port; its address once it is healthy."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    environment = {**os.environ, "GRADIO_SERVER_PORT": str(port), **variables}
    process = subprocess.Popen([sys.executable, "app.py"], cwd=FOLDERS / folder, env=environment)
    try:
        wait_until_healthy(address, process)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=30)


def wait_until_healthy(address: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        assert process.poll() is None, f"app.py ended with {process.returncode}"
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
                assert b'"status":"ok"' in answer.read()
                return
        except OSError:
            time.sleep(1)
    raise AssertionError(f"{address} was not healthy within {SECONDS} s")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "Chromium is missing; on Debian: apt-get install -y chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, headless=True, args=QUIET)
        yield browser
        browser.close()


@contextmanager
def opened(chromium: Any, address: str, viewport: dict[str, int]) -> Iterator[Page]:
    """The page, which may talk to `address` alone and must not throw."""
    context = chromium.new_context(viewport=viewport, has_touch=viewport is PHONE)
    page = context.new_page()
    elsewhere: list[str] = []
    errors: list[str] = []

    def note(request: Request) -> None:
        if not request.url.startswith((address, "data:", "blob:")):
            elsewhere.append(request.url)

    page.on("request", note)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(address)
    expect(page.locator("#run")).to_be_visible(timeout=1000 * SECONDS)
    yield page
    assert not elsewhere, f"the page asked other machines: {elsewhere}"
    assert not errors, errors
    context.close()


def run_and_look(page: Page, name: str) -> None:
    """Click, wait for the chart, open the plan, take a picture, and check what every Space shows."""
    page.locator("#run").click()
    expect(page.locator("#sentence")).to_contain_text("Speedup", timeout=1000 * SECONDS)
    expect(page.locator("#chart img")).to_be_visible(timeout=1000 * SECONDS)
    page.get_by_text("Plan: output of explain(model)").click()
    expect(page.locator("#plan tbody tr").first).to_be_visible()
    page.wait_for_timeout(1000)
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png", full_page=True)
    width = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert width[0] <= width[1], f"the page is {width[0]} pixels wide, the screen {width[1]}"
    assert re.search(
        r"Speedup [\d.]+x.*: [\d.]+ m?s instead of [\d.]+ m?s", page.locator("#sentence").inner_text()
    )
    assert "accelerate_for_cpu(" in page.locator("#code").inner_text()
    assert "modules replaced" in page.locator("#summary").inner_text()


def refused(page: Page, message: str) -> None:
    """Click, and read why nothing was done."""
    page.locator("#run").click()
    expect(page.get_by_text(message).first).to_be_visible(timeout=1000 * SECONDS)


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_semantic_search(chromium: Any, viewport: dict[str, int], request: pytest.FixtureRequest) -> None:
    search = module_of("semantic-search", "search")
    with started("semantic-search", {}) as address, opened(chromium, address, viewport) as page:
        page.locator("#query textarea, #query input").first.fill("when do I get my money back?")
        run_and_look(page, f"semantic-search-{request.node.callspec.id}")
        pair = search.Pair(search.load())
        best = search.search(pair, "when do I get my money back?", search.PASSAGES)[0]
        row = page.locator("#found tbody tr").first.inner_text()
        assert best.passage in row
        assert f"{best.eager:.3f}" in row
        page.locator("#query textarea, #query input").first.fill(" ")
        refused(page, "The query is empty; enter a query.")


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_chat(chromium: Any, viewport: dict[str, int], request: pytest.FixtureRequest) -> None:
    chat = module_of("chat", "chat")
    with started("chat", {}) as address, opened(chromium, address, viewport) as page:
        page.locator("#message textarea").fill("What is the capital of France?")
        page.locator("#tokens input[type=number]").fill("12")
        page.locator("#tokens input[type=number]").press("Tab")
        run_and_look(page, f"chat-{request.node.callspec.id}")
        model, tokenizer = chat.load()
        conversation = chat.conversation_of([], "What is the capital of France?", 12, tokenizer)
        *_, expected = chat.stream(model, tokenizer, conversation, 12)
        assert expected.text.strip() in page.inner_text("#eager")
        assert "What is the capital of France?" in page.inner_text("#history")
        refused(page, "The message is empty; enter a message.")
        page.locator("#clear").click()
        expect(page.locator("#history")).not_to_contain_text("France")


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_graph_explorer(chromium: Any, viewport: dict[str, int], request: pytest.FixtureRequest) -> None:
    graphs = module_of("graph-explorer", "graphs")
    explorer = graphs.explore(graphs.COMMUNITIES)
    with started("graph-explorer", {}) as address, opened(chromium, address, viewport) as page:
        page.locator("#node input").fill("7")
        run_and_look(page, f"graph-explorer-{request.node.callspec.id}")
        node = graphs.node_of(explorer, 7)
        expected = f"Node 7 has class {node.label} and {node.degree} neighbors"
        assert expected in page.inner_text("#told")
        cells = page.locator("#classes tbody tr").first.locator("td").all_inner_texts()
        assert cells[0] == str(int(node.eager.argmax()))
        assert abs(float(cells[2]) - float(node.eager.max())) < 2e-4
        # The first neighbor is drawn above the node in the middle.
        picture = page.locator("#picture img")
        box = picture.bounding_box()
        picture.click(position={"x": box["width"] / 2, "y": box["height"] * 0.1})  # scrolls there first
        expect(page.locator("#told")).to_contain_text(f"Node {node.neighbors[0]} ", timeout=1000 * SECONDS)
        page.get_by_text(graphs.KARATE).click()
        expect(page.locator("#node input")).to_have_value("0")  # no node of the other graph
        page.locator("#node input").fill("34")
        refused(page, "Node 34 does not exist; enter a number from 0 to 33.")


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_image_generation(chromium: Any, viewport: dict[str, int], request: pytest.FixtureRequest) -> None:
    drawing = module_of("image-generation", "drawing")
    with started("image-generation", {}) as address, opened(chromium, address, viewport) as page:
        page.locator("#digit input[type=number]").fill("8")
        page.locator("#digit input[type=number]").press("Tab")
        run_and_look(page, f"image-generation-{request.node.callspec.id}")
        expected = drawing.sheet(drawing.draw(drawing.load(), 8, 4, 20, 0))
        source = page.locator("#eager img").get_attribute("src")
        with (
            urllib.request.urlopen(source, timeout=30) as answer,
            Image.open(io.BytesIO(answer.read())) as image,
        ):
            assert image.size == expected.size
            pixels = np.asarray(image.convert("L"), dtype=int)
            assert abs(pixels - np.asarray(expected, dtype=int)).max() <= 8
        page.locator("#seed input").fill("4294967296")
        refused(page, "The seed is 4294967296; enter a whole number from 0 to 2147483647.")


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_speech_to_text(
    chromium: Any, viewport: dict[str, int], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    speech = module_of("speech-to-text", "speech")
    write_whisper(tmp_path)
    model = {"SPEECH_MODEL": str(tmp_path)}
    with started("speech-to-text", model) as address, opened(chromium, address, viewport) as page:
        run_and_look(page, f"speech-to-text-{request.node.callspec.id}")
        recognizer = pipeline("automatic-speech-recognition", model=str(tmp_path), device="cpu")
        expected = speech.transcribe(recognizer, speech.samples_of(wavfile.read(speech.SAMPLE)))
        rows = page.locator("#texts tbody tr").all_inner_texts()
        assert expected
        assert "".join(expected.split()) in "".join(rows[1].split())
        page.get_by_label("Clear").first.click()
        refused(page, "There is no recording; record one or choose a file.")
