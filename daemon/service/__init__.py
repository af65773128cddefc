"""The systemd service: notifications, watchdog, installation, reload."""
