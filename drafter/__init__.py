"""Grows and prunes draft trees."""
