"""The inspector in a real browser: type, stream, move a threshold, replay a link; nothing leaves the host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from cluster.local_service import local_service
from secateur.config import EngineArgs
from tests.support.chromium import Page, chromium_page, chromium_path

BROWSER = chromium_path()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no Chromium here")]

KEY = "the key"
DONE = (
    "document.querySelector('#stop').disabled && document.querySelector('#off .state').textContent.includes('tokens')"
)
TEXT = "document.querySelector('#on .text').textContent"
VERIFIED = "parseFloat(document.querySelector('#on [data-value=verified]').textContent)"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with local_service(EngineArgs.load({"port": 0, "device": "cpu", "max_num_seqs": 2, "api_key": KEY})) as url:
        yield f"{url}/"


@pytest.fixture
def page(url: str) -> Iterator[Page]:
    assert BROWSER is not None
    with chromium_page(BROWSER) as page:
        yield page
        assert {urlsplit(request).netloc for request in page.requests} <= {urlsplit(url).netloc, ""}
        assert {urlsplit(request).scheme for request in page.requests} <= {"http", "about", "data"}
        refusals = [problem for problem in page.problems if re.search(r"status of 40[01] ", problem)]
        assert page.problems == refusals


def start(page: Page, url: str, **how: object) -> None:
    """Open the page and give it the key."""
    page.open(url, **how)
    page.wait("!document.querySelector('#key-row').hidden")
    page.evaluate("document.querySelector('#key').focus()")
    page.type(KEY)
    page.press("Tab", 9)
    page.wait("document.querySelector('#model').textContent.includes('eagle3')")


def run(page: Page, prompt: str) -> None:
    page.evaluate("document.querySelector('#prompt').value = ''; document.querySelector('#prompt').focus()")
    page.type(prompt)
    page.evaluate("document.querySelector('#run').focus()")
    page.press("Enter", 13)
    page.wait(DONE)


def set_value(page: Page, id: str, value: str) -> None:
    page.evaluate(
        f"{{ const own = document.querySelector('#{id}'); own.value = '{value}';"
        "for (const name of ['input', 'change']) own.dispatchEvent(new Event(name, {bubbles: true})); }"
    )


def test_a_higher_threshold_verifies_fewer_nodes_and_writes_the_same_text(page: Page, url: str) -> None:
    start(page, url)
    set_value(page, "tree_prune_min_prob", "0")
    run(page, "def merge(a, b):\n")
    text, verified = page.evaluate(TEXT), page.evaluate(VERIFIED)
    assert text.startswith("def merge(a, b):\n") and len(text) > 60
    assert text == page.evaluate("document.querySelector('#off .text').textContent")
    set_value(page, "tree_prune_min_prob", "0.4")  # runs again
    page.wait(f"{VERIFIED} < {verified} && {DONE}")
    assert page.evaluate(TEXT) == text
    assert page.evaluate("document.querySelector('#on .note').textContent") == "The same text as before."
    pruned = "1 + panes.on.trees.findIndex(tree => tree.nodes.some(node => node.status === 'pruned'))"
    page.evaluate(f"choose(panes.on, {pruned})")
    statuses = "[...document.querySelectorAll('.node')].map(node => node.classList[1])"
    assert {"root", "pruned"} <= set(page.evaluate(statuses))
    assert "pruned: min_prob" in page.evaluate("document.querySelector('#tree').textContent")
    assert page.evaluate("document.querySelectorAll('.text .token.accepted').length") > 10


def test_steps_can_be_walked_with_the_keyboard(page: Page, url: str) -> None:
    start(page, url)
    run(page, "for i in")
    page.evaluate("document.querySelector('#step').focus()")
    for key, code in (("Home", 36), ("ArrowRight", 39)):
        page.press(key, code)
    assert "step 2 of" in page.evaluate("document.querySelector('#step-name').textContent")
    chosen = page.evaluate("[...document.querySelectorAll('.chosen')].map(token => token.dataset.step)")
    assert set(chosen) == {"2"}


def test_a_link_fills_in_the_form_and_its_run_repeats_the_answer(page: Page, url: str) -> None:
    start(page, url)
    set_value(page, "seed", "77")
    set_value(page, "temperature", "1")
    run(page, "class Stack:\n")
    text, link = page.evaluate(TEXT), page.evaluate("location.href")
    assert "seed=77" in link and KEY not in link
    start(page, link)
    assert page.evaluate("document.querySelector('#prompt').value") == "class Stack:\n"
    assert "tokens" not in page.evaluate("document.querySelector('#on .state').textContent"), (
        "a link alone runs nothing"
    )
    page.evaluate("document.querySelector('#run').click()")
    page.wait(DONE)
    assert page.evaluate(TEXT) == text


def test_markup_in_a_prompt_or_an_answer_is_text(page: Page, url: str) -> None:
    start(page, url)
    markup = "<img src=x onerror=document.title='hacked'><script>document.title='hacked'</script><b>"
    run(page, markup)
    assert page.evaluate(TEXT).startswith(markup)
    assert page.evaluate("document.querySelectorAll('main img, main script, main b').length") == 0
    assert page.evaluate("document.title") == "Secateur inspector"


def test_a_chat_and_a_refusal_are_shown(page: Page, url: str) -> None:
    start(page, url)
    page.evaluate("document.querySelector('[value=chat]').click()")
    run(page, "Write a loop.")
    assert page.evaluate("document.querySelectorAll('#on .text .token').length") > 3
    set_value(page, "max_tokens", "100000")
    page.wait("document.querySelector('#problem').textContent.includes('max_tokens')")


@pytest.mark.parametrize(("width", "height", "is_dark"), [(1280, 900, False), (1280, 900, True), (390, 844, False)])
def test_nothing_overflows_sideways(
    page: Page, url: str, tmp_path: Path, width: int, height: int, is_dark: bool
) -> None:
    start(page, url, width=width, height=height, is_dark=is_dark)
    run(page, "def quicksort(items):\n")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000
