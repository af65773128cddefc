"""Admission of turns and sessions: bounds, quotas, and forecasts of waiting times."""
