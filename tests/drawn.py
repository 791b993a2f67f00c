"""Settings of tests whose cases are drawn by hypothesis: a busy machine may take its time."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

UNHURRIED = settings(deadline=None, suppress_health_check=list(HealthCheck))
