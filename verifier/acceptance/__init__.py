"""Acceptance rules: which path of a draft tree the target would have said itself."""
