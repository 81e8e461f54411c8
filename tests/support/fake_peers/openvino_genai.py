"""OpenVINO GenAI's continuous batching: each step gives each request a token, the prompt's first plus its number."""

from enum import Enum
from types import SimpleNamespace

SchedulerConfig = GenerationConfig = SimpleNamespace


class GenerationStatus(Enum):
    RUNNING = 0
    FINISHED = 1


class Handle:
    def __init__(self, first, count):
        self._left = list(range(first, first + count))
        self._ready = []

    def step(self):
        self._ready += self._left[:1]
        del self._left[:1]

    def can_read(self):
        return bool(self._ready)

    def read(self):
        ready, self._ready = self._ready, []
        return {0: SimpleNamespace(generated_ids=ready)}

    def get_status(self):
        return GenerationStatus.RUNNING if self._left else GenerationStatus.FINISHED


class ContinuousBatchingPipeline:
    def __init__(self, model, scheduler, device, options):
        self._handles = []
        self._most = scheduler.max_num_seqs

    def add_request(self, number, prompts, config):
        assert config.ignore_eos
        self._handles.append(Handle(prompts[0][0], config.max_new_tokens))
        running = [handle for handle in self._handles if handle.get_status() is GenerationStatus.RUNNING]
        assert len(running) <= self._most, "more requests at a time than were asked for"
        return self._handles[-1]

    def step(self):
        for handle in self._handles:
            handle.step()
