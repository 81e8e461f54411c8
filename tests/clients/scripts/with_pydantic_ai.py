# /// script
# dependencies = ["pydantic-ai-slim[openai]==2.68.0"]
# ///
"""pydantic-ai: an agent whose output is a type, by a tool and by a JSON schema, over chats and responses."""

import os
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Weather(BaseModel):
    """Tells the weather of a city."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


provider = OpenAIProvider(f"{os.environ['SECATEUR_URL']}/v1", api_key="none")
for model in (OpenAIChatModel("secateur", provider=provider), OpenAIResponsesModel("secateur", provider=provider)):
    for output in (Weather, NativeOutput(Weather)):
        answer = Agent(model, output_type=output).run_sync("What is the weather in Paris?").output
        assert isinstance(answer, Weather), output
