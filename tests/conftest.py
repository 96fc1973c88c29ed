"""Fixtures and settings shared by all tests."""

from hypothesis import settings

from tests.brokers import private_broker

__all__ = ["private_broker"]

# The tests share two cores with four databases and five brokers: the time of a single example means nothing.
settings.register_profile("pillarbox", deadline=None)
settings.load_profile("pillarbox")
