"""Between text and tokens: tokenizers, detokenization, reasoning and tool calls. Knows neither HTTP nor Ray."""
