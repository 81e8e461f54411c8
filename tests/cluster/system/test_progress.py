"""Progress lines: each stage once, then again while it lasts; hidden progress prints nothing."""

import re
import threading

import pytest

from cluster.system import progress
from cluster.system.progress import Progress


def test_each_stage_is_printed_once_and_repeated_while_it_lasts(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_LOOK_S", 0.005)
    monkeypatch.setattr(progress, "REPEAT_S", 0.05)
    stage, seen, shown = ["a"], threading.Event(), Progress()
    say = shown.say
    shown.say = lambda what: (say(what), seen.set() if what == "still b" else None)
    with shown.during("a", stage=lambda: stage[0]):
        stage[0] = "b"
        assert seen.wait(10)
    lines = capsys.readouterr().err.splitlines()
    said = [re.fullmatch(r"secateur: \d+ s, (.*)", line)[1] for line in lines]
    assert [what for what in dict.fromkeys(said) if what != "still a"] == ["a", "b", "still b"]


def test_hidden_progress_prints_nothing_and_starts_no_thread(capsys):
    before, hidden = threading.active_count(), Progress(is_shown=False)
    with pytest.raises(KeyError), hidden.during("a"):
        assert threading.active_count() == before
        hidden.say("b")
        raise KeyError
    assert capsys.readouterr().err == ""
