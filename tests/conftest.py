"""Fixtures and settings shared by all tests."""

from hypothesis import settings

# The tests share two cores with four database servers: the time of a single example means nothing.
settings.register_profile("pillarbox", deadline=None)
settings.load_profile("pillarbox")
