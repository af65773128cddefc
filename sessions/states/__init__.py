"""Named states: frozen histories with which sessions begin."""
