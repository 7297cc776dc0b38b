"""The fixtures of these tests. What they share is in tests/support."""

from fixtures import cwd, environment, finished, killed, program, two_saves, whole

__all__ = ["cwd", "environment", "finished", "killed", "program", "two_saves", "whole"]
