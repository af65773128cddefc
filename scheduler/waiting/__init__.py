"""Waiting tasks as clients see them: positions, reasons and estimated starts."""
