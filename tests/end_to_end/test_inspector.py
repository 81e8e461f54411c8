"""The inspector in a real browser: type, stream, move a threshold, replay a link; nothing leaves the host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from cluster.local_service import local_service
from secateur.config import EngineArgs
from tests.support.chromium import Browser, Page, chromium, chromium_path

BROWSER = chromium_path()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no Chromium here")]

KEY = "the key"
DONE = (
    "document.querySelector('#stop').disabled && document.querySelector('#off .state').textContent.includes('tokens')"
)
TEXT = "document.querySelector('#on .text').textContent"
LOWEST_CONTRAST = """(() => {
  const context = Object.assign(document.createElement("canvas"), {width: 1, height: 1}).getContext("2d");
  const painted = colours => {
    context.clearRect(0, 0, 1, 1);
    for (const colour of colours) { context.fillStyle = colour; context.fillRect(0, 0, 1, 1); }
    return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = colour => colour.map(part => part / 255).map(part => part <= 0.03928 ? part / 12.92
    : ((part + 0.055) / 1.055) ** 2.4).reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
  let lowest = [99];
  for (const each of document.querySelectorAll("body *")) {
    const hasText = [...each.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    if (!hasText || !each.checkVisibility() || each.disabled) continue;
    const behind = [];
    for (let at = each; at; at = at.parentElement) behind.unshift(getComputedStyle(at).backgroundColor);
    const [dark, bright] = [light(painted(behind)), light(painted([...behind, getComputedStyle(each).color]))]
      .sort((a, b) => a - b);
    const ratio = (bright + 0.05) / (dark + 0.05);
    if (ratio < lowest[0]) lowest = [ratio, each.className, each.textContent.slice(0, 40)];
  }
  return lowest;
})()"""
"""The lowest contrast of a text with what is behind it, by WCAG's formula, and where it is."""
VERIFIED = "parseFloat(document.querySelector('#on [data-value=verified]').textContent)"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with local_service(EngineArgs.load({"port": 0, "device": "cpu", "max_num_seqs": 2, "api_key": KEY})) as url:
        yield f"{url}/"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert BROWSER is not None
    with chromium(BROWSER) as running:
        yield running


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    with browser.page() as page:
        yield page
        assert {urlsplit(request).netloc for request in page.requests} <= {urlsplit(url).netloc, ""}
        assert {urlsplit(request).scheme for request in page.requests} <= {"http", "about", "data"}
        refusals = [problem for problem in page.problems if re.search(r"status of 40[01] ", problem)]
        assert page.problems == refusals


def start(page: Page, url: str, *, prune: str | None = "thresholds", **how: object) -> None:
    """Open the page, give it the key and set how trees are pruned; None = as the page has it, `auto`, in eight runs."""
    page.open(url, **how)
    page.wait("!document.querySelector('#key-row').hidden")
    page.evaluate("document.querySelector('#key').focus()")
    page.type(KEY)
    page.press("Tab", 9)
    page.wait("document.querySelector('#model').textContent.includes('eagle3')")
    if prune is not None:
        set_value(page, "max_tokens", "40")  # each step is drawn
        set_value(page, "tree_prune", prune)


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


def test_auto_is_compared_by_runs_that_take_turns_after_one_that_does_not_count(page: Page, url: str) -> None:
    start(page, url, prune=None)
    set_value(page, "max_tokens", "40")
    assert page.evaluate("document.querySelector('#tree_prune').value") == "auto"
    page.evaluate(
        "window.asked = []; { const before = call;"
        " call = (path, body, signal) => { asked.push(body); return before(path, body, signal); }; }"
    )
    run(page, "def quicksort(items):\n")
    bodies = page.evaluate("asked")
    is_on = [body["speculative"].get("enabled", True) for body in bodies]
    assert is_on == [True, False] * 4
    assert [body.get("return_speculative_trees", False) for body in bodies] == [True] * 2 + [False] * 6
    assert [body["seed"] for body in bodies] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert page.evaluate("[panes.on, panes.off].map(pane => pane.speeds.length)") == [3, 3]


def test_comments_ids_and_lines_of_an_event_are_read(page: Page, url: str) -> None:
    start(page, url)
    stream = r': a comment\n\ndata: {"a":\ndata: 1}\nid: 7\n\ndata: [DONE]\n\n'
    page.evaluate(
        "(async () => { window.read = []; "
        f"for await (const event of events(new Response('{stream}'))) read.push(event); window.ended = true; }})()"
    )
    page.wait("window.ended")
    assert page.evaluate("read") == [{"a": 1}]


def test_thousands_of_steps_are_drawn_without_looking_at_the_earlier_ones(page: Page, url: str) -> None:
    start(page, url)
    looks = page.evaluate(
        """(() => {
        let looks = 0;
        const tree = {nodes: [{status: "root", parent: null, text: "a", draft_prob: null, weight: null}],
          tokens: [{text: "a", origin: "bonus", depth: 0}], draft_ms: null, verify_ms: 1};
        const seen = new Proxy(tree, {get: (own, name) => (looks++, own[name])});
        for (let step = 0; step < 4000; step++) { panes.on.add(seen); panes.on.show(); follow(); }
        return looks;
      })()"""
    )
    assert page.evaluate("document.querySelectorAll('#on .token').length") == 4000
    assert looks < 4000 * 20


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
    start(page, link, prune=None)
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
def test_nothing_overflows_sideways_and_every_text_can_be_read(
    page: Page, url: str, tmp_path: Path, width: int, height: int, is_dark: bool
) -> None:
    start(page, url, width=width, height=height, is_dark=is_dark)
    run(page, "def quicksort(items):\n")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    lowest = page.evaluate(LOWEST_CONTRAST)
    assert lowest[0] >= 4.5, lowest
    page.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000
