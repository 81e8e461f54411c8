# /// script
# dependencies = ["instructor", "openai"]
# ///
"""instructor: answers of a type, by tools and by JSON schemas."""

import os
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


client = OpenAI(base_url=f"{os.environ['SECATEUR_URL']}/v1", api_key="none")
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    answer = instructor.from_openai(client, mode=mode).chat.completions.create(
        model="secateur",
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        response_model=Weather,
        max_retries=1,
    )
    assert isinstance(answer, Weather), mode
