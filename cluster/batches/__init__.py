"""Files and batches of OpenAI's API, in a folder that outlives the service."""
