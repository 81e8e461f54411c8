# /// script
# dependencies = ["instructor==1.17.0", "openai==3.3.0"]
# ///
"""instructor: answers of a type by tools, by JSON schemas and by JSON objects, whole and growing."""

import os
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


class Anything(BaseModel):
    """Any JSON object: the mode JSON tells the schema to the model alone, and a small model does not follow it."""

    model_config = ConfigDict(extra="allow")


client = OpenAI(base_url=f"{os.environ['SECATEUR_URL']}/v1", api_key="none")
ASKED = {"model": "secateur", "messages": [{"role": "user", "content": "What is the weather in Paris?"}]}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    typed = instructor.from_openai(client, mode=mode)
    answer = typed.chat.completions.create(**ASKED, response_model=Weather, max_retries=1)
    assert isinstance(answer, Weather), mode
    *_, last = typed.chat.completions.create_partial(**ASKED, response_model=Weather)
    assert Weather.model_validate(last.model_dump()), mode
typed = instructor.from_openai(client, mode=instructor.Mode.JSON)
answer = typed.chat.completions.create(**ASKED, response_model=Anything, max_retries=5, seed=1)
assert isinstance(answer, Anything)
