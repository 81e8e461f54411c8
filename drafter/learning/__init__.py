"""The draft head that learns from what was verified, while its drafter waits for the next message."""
