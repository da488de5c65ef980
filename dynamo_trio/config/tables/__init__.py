"""The settings themselves, one module a concern. :class:`~dynamo_trio.config.Config` joins them.

Each field states its variable, its rule, its default and its help text; the flag's name follows
from the variable's.
"""
