"""Takes the documents' pictures with a headless Chromium, and measures the inspector in it.

python -m bench.pictures readme       # README's first screen, wide and narrow, from the site that `make docs` built
python -m bench.pictures inspector    # the inspector after a run with a target of 300M's cost; needs quiet cores
python -m bench.pictures stalls       # how long a step of 4,000 keeps the inspector busy; needs quiet cores
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.harness import say, scaled
from cluster.local_service import local_service
from secateur.config import EngineArgs
from tests.support.chromium import Page, chromium, chromium_path

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
SITE = ROOT / "build" / "docs" / "index.html"
NAME = "bundled-at-300m-cost"
CACHE = ROOT / "build" / "bench"
SCREENS = {"wide": (1280, 900), "narrow": (390, 844)}
PROMPT = "def quicksort(items):\n    "
INSPECTOR = ROOT / "cluster" / "http" / "inspector.html"
STEPS = 4000
DRAW = """(async () => {
  const tree = {nodes: [{status: "root", parent: null, text: " a", draft_prob: null, weight: null}],
    tokens: [{text: " a", origin: "bonus", depth: 0}], draft_ms: null, verify_ms: 1};
  window.busy = [];
  for (let step = 0; step < %d; step++) {
    await new Promise(resolve => setTimeout(resolve));
    const begin = performance.now();
    panes.on.add(tree); panes.on.show(); follow();
    document.body.getBoundingClientRect();
    busy.push(performance.now() - begin);
  }
})(), 0"""
"""Draws the steps; `busy` gets the milliseconds of each, its layout included."""
DONE = "panes.off.speeds.length === 3 && document.querySelector('#stop').disabled"


def readme(page: Page) -> None:
    """Write README's first screen in each size."""
    for name, (width, height) in SCREENS.items():
        page.open(SITE.as_uri(), width=width, height=height)
        page.screenshot(IMAGES / f"readme-{name}.png")


def inspector(page: Page) -> None:
    """Write the inspector's two answers, their speeds and a step's tree."""
    args = EngineArgs.load({"port": 0, "device": "cpu", "max_num_seqs": 1, "served_model_name": NAME})
    with scaled(args, "300m", CACHE, say) as args, local_service(args) as url:
        page.open(url, width=1280, height=895)
        page.wait("document.querySelector('#model').textContent.includes('eagle3')")
        page.evaluate(f"document.querySelector('#prompt').value = {PROMPT!r}")
        page.evaluate("document.querySelector('#run').click()")
        page.wait(DONE, seconds=600)
        page.evaluate("choose(panes.on, 3)")
        page.screenshot(IMAGES / "inspector.png")


def stalls(page: Page) -> None:
    """Print the median and the longest time that a step, as it would arrive from a stream, keeps the page busy."""
    page.open(INSPECTOR.as_uri())
    page.evaluate(DRAW % STEPS)
    page.wait(f"busy.length === {STEPS}", seconds=600)
    busy = sorted(page.evaluate("busy"))
    shown = page.evaluate("document.querySelectorAll('#on .token').length")
    print(f"{shown} steps drawn: a step takes {busy[STEPS // 2]:.1f} ms, the longest {busy[-1]:.1f} ms")


COMMANDS = {"readme": readme, "inspector": inspector, "stalls": stalls}

if __name__ == "__main__":
    path = chromium_path()
    if len(sys.argv) != 2 or sys.argv[1] not in COMMANDS or path is None:
        sys.exit(__doc__ if path else "No Chromium here: install the package chromium.")
    with chromium(path) as browser, browser.page() as page:
        page.call("Emulation.setScrollbarsHidden", hidden=True)
        COMMANDS[sys.argv[1]](page)
