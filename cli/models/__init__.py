"""Commands that load, change and download models and adapters."""
