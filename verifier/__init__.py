"""Tells the truth: schedules, verifies draft trees with the target model, and commits what it would have said."""
